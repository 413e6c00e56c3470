"""PassQueue: forward passes under way, from their launch until their tokens are taken in; Engine.step advances it."""

from collections import deque

from octavo.models import Decoder
from octavo.serve.engine.model_runner import Launched, ModelRunner
from octavo.serve.engine.scheduler import Scheduler
from octavo.serve.engine.sequence import Sequence
from octavo.serve.engine.stats import EngineStats


class PassQueue:
    """The oldest pass is taken in first; true while there is one.

    Args:
        looks_ahead: launch a pass before the tokens of the one before it are known, where nothing needs them.
    """

    def __init__(
        self,
        model: Decoder,
        scheduler: Scheduler,
        model_runner: ModelRunner,
        stats: EngineStats,
        *,
        looks_ahead: bool,
    ) -> None:
        self._model, self._scheduler, self._model_runner, self._stats = model, scheduler, model_runner, stats
        self._looks_ahead = looks_ahead
        self._launched: deque[Launched] = deque()

    def __bool__(self) -> bool:
        return bool(self._launched)

    def advance(self, weight_version: int) -> list[Sequence]:
        """Launch a pass, and take in the oldest one; looking ahead, it leaves one under way.

        Returns:
            As collect; none where a pass stays under way alone.
        """
        # a grammar needs the last token's value before its next one is sampled
        num_ahead = int(self._looks_ahead and not self._scheduler.num_grammars)
        advanced: list[Sequence] = []
        is_idle = len(self._launched) > num_ahead or not self._launch(weight_version)
        if is_idle or len(self._launched) > num_ahead:
            advanced = self.collect(weight_version)
        while self._launched and not self._scheduler.has_unfinished:
            self.collect(weight_version)  # tokens behind an end that was not known at their launch
        return advanced

    def _launch(self, weight_version: int) -> bool:
        """Schedule a pass and start it; False if there is nothing to do before tokens under way are known."""
        chunks = self._scheduler.schedule()
        if not chunks:
            return False
        if self._model.kv_table is not None:
            self._model.kv_table.check(weight_version)
        self._launched.append(self._model_runner.launch(chunks))
        for chunk in chunks:
            chunk.sequence.num_pending += chunk.is_last
        self._stats.num_steps += 1
        return True

    def collect(self, weight_version: int) -> list[Sequence]:
        """Take in the oldest pass under way.

        Args:
            weight_version: of the weights that the pass was computed with.
        Returns:
            Its sequences that live and got a token, or ended without one.
        """
        assert self._launched, "a step without work: no sequence is unfinished, or none fits"
        launched = self._launched.popleft()
        token_ids, scores = self._model_runner.collect(launched)
        self._scheduler.commit_tokens(launched.chunks)
        sampled = [chunk.sequence for chunk in launched.chunks if chunk.is_last]
        advanced = []
        for seq, token_id, logprobs in zip(sampled, token_ids, scores, strict=True):
            seq.num_pending -= 1
            if seq.finish_reason is not None:  # it ended before this token was known
                continue
            if seq.max_len == seq.prompt_len:  # its prompt alone was to be scored
                seq.finish_reason = "length"
            else:
                seq.append(token_id, logprobs, weight_version)
                self._stats.output_tokens += 1
            advanced.append(seq)
            if seq.finish_reason is not None:
                if self._model_runner.choices is not None:  # before another step may write to its pages
                    seq.routed_experts = self._model_runner.choices.read(seq.page_table, seq.num_tokens - 1)
                self._scheduler.finish(seq)
        return advanced

    def clear(self) -> None:
        """Forget every pass; its tokens are lost."""
        self._launched.clear()
