"""The engine: takes requests and steps until they are done; LLM drives it."""

import math
import time
from collections import deque

from octavo.errors import ConfigError, RequestError
from octavo.models import Decoder
from octavo.models.tokenizer import StreamDecoder, Tokenizer
from octavo.nn import pin_codes
from octavo.ops.attention import PAGE_SIZE
from octavo.ops.sampling import request_seed
from octavo.serve.engine.block_manager import BlockManager
from octavo.serve.engine.config import EngineConfig
from octavo.serve.engine.detokenizer import Detokenizer
from octavo.serve.engine.grammar import Grammar, GrammarFactory
from octavo.serve.engine.kv_cache import allocate_kv_cache, plan_num_pages, release_memory
from octavo.serve.engine.model_runner import Launched, ModelRunner
from octavo.serve.engine.scheduler import Scheduler
from octavo.serve.engine.sequence import Request, Sequence
from octavo.serve.engine.stats import EngineStats
from octavo.serve.engine.weight_update import POLICIES, RunningPolicy, WeightUpdate
from octavo.serve.outputs import CompletionOutput, RequestOutput
from octavo.serve.sampling_params import ParameterError, SamplingParams


class Engine:
    """Continuous batching over one model.

    Args:
        model: its numerics decide every bit.
        tokenizer: for text; None for token ids only.
        config: limits.

    Attributes:
        stats: counters. max_model_len: the longest sequence, prompt and output.
        weight_version: of the weights that the cache's pages were made with.
    """

    def __init__(self, model: Decoder, tokenizer: Tokenizer | None, config: EngineConfig) -> None:
        self.model, self.tokenizer, self.config = model, tokenizer, config
        pin_codes(model)  # CUDA graphs and weight updates go by the addresses
        num_pages = plan_num_pages(model, config)
        self.max_model_len = config.resolve_max_model_len(model.config.max_position_embeddings, num_pages * PAGE_SIZE)
        self.weight_version, self.numerics = model.weight_version, model.numerics
        self.stats = EngineStats(num_kv_pages=num_pages)
        self.block_manager = BlockManager(num_pages, PAGE_SIZE, self._salt(), config.enable_prefix_caching)
        self.scheduler = Scheduler(self.block_manager, config.max_num_seqs, config.max_num_batched_tokens, self.stats)
        self.model_runner = ModelRunner(model, allocate_kv_cache(model, num_pages), config, self.max_model_len)
        self._launched: deque[Launched] = deque()
        is_ahead = config.async_scheduling
        self._looks_ahead = model.device.type == "cuda" if is_ahead is None else is_ahead
        self._eos_ids = {*model.config.eos_token_ids}
        if tokenizer is not None and tokenizer.eos_id is not None:
            self._eos_ids.add(tokenizer.eos_id)
        self.grammars = GrammarFactory(tokenizer, model.config.vocab_size, frozenset(self._eos_ids))
        self._num_requests = 0

    @property
    def has_unfinished(self) -> bool:
        return self.scheduler.has_unfinished

    def check_request(self, prompt_ids: list[int], params: SamplingParams) -> None:
        """Refuse what can never be served.

        Raises:
            RequestError: an empty or too long prompt, ids outside the vocabulary, stop strings without a tokenizer, a
                schema that cannot be kept to.
        """
        vocab_size = self.model.config.vocab_size
        if not prompt_ids:
            raise RequestError("a prompt needs at least one token, got none; give a start token for free generation")
        bad = next((t for t in prompt_ids if type(t) is not int or not 0 <= t < vocab_size), None)
        if bad is not None:
            raise RequestError(f"prompt token ids must be integers from 0 to {vocab_size - 1}, got {bad!r}")
        if len(prompt_ids) >= self.max_model_len:
            raise RequestError(f"the prompt has {len(prompt_ids)} tokens, {self._limit_text()}; shorten it")
        if params.stop_strings and self.tokenizer is None:
            raise ParameterError("stop", "strings need a tokenizer, and this engine has none; use stop_token_ids")
        bad = next((t for t in params.logit_bias or () if t >= vocab_size), None)
        if bad is not None:
            raise ParameterError("logit_bias", f"names token {bad}, but the vocabulary ends at {vocab_size - 1}")
        if params.schema_text is not None:
            self.grammars.check(params.schema_text)

    def add_request(
        self, prompt_ids: list[int], params: SamplingParams, prompt: str | None = None, keep_text: bool = False
    ) -> Request:
        """Queue a prompt.

        Args:
            prompt: its text, if it was one. keep_text: decode token by token, for streaming.
        Raises:
            RequestError: see check_request.
        """
        self.check_request(prompt_ids, params)
        if not self.has_unfinished:
            self.refit()
        request_id = self._num_requests
        self._num_requests += 1
        root = (params.seed, 0) if params.seed is not None else (self.config.seed, request_id)
        max_tokens = math.inf if params.max_tokens is None else params.max_tokens
        stop_ids = params.stop_ids if params.ignore_eos else params.stop_ids | self._eos_ids
        sequences = [
            Sequence(
                index=index,
                token_ids=list(prompt_ids),
                prompt_len=len(prompt_ids),
                params=params,
                seed=request_seed(*root, index),
                max_len=int(min(len(prompt_ids) + max_tokens, self.max_model_len)),
                stop_token_ids=stop_ids,
                detokenizer=self._make_detokenizer(params, keep_text),
                grammar=self._make_grammar(params),
            )
            for index in range(params.n)
        ]
        for seq in sequences:
            self.scheduler.add(seq)
        self.stats.num_requests += 1
        return Request(request_id, prompt, list(prompt_ids), sequences)

    def step(self) -> list[Sequence]:
        """Launch a forward pass, and take in the tokens of the oldest one under way.

        With async_scheduling the pass before stays under way meanwhile, so that the first call returns none.

        Returns:
            The sequences that got a token; look at their is_finished.
        Raises:
            RequestError: if the model's weights changed since they started.
        """
        self.refit()
        began = time.perf_counter()
        advanced: list[Sequence] = []
        num_ahead = int(self._can_look_ahead())
        try:
            is_idle = len(self._launched) > num_ahead or not self._launch()
            if is_idle or len(self._launched) > num_ahead:
                advanced = self._collect()
            while self._launched and not self.has_unfinished:
                self._collect()  # tokens behind an end that was not known at their launch
            if not self.has_unfinished:
                self.model_runner.rest()
        except BaseException:
            self.abort_all()  # the step's pages may not have been written
            raise
        self.stats.seconds += time.perf_counter() - began
        return advanced

    def _can_look_ahead(self) -> bool:
        """Whether nothing that runs or waits needs the last token's value before its next one is sampled: a grammar."""
        if not self._looks_ahead:
            return False
        return not any(seq.grammar is not None for seq in (*self.scheduler.running, *self.scheduler.waiting))

    def _launch(self) -> bool:
        """Schedule a pass and start it; False if there is nothing to do before tokens under way are known."""
        chunks = self.scheduler.schedule()
        if not chunks:
            return False
        self._launched.append(self.model_runner.launch(chunks))
        for chunk in chunks:
            chunk.sequence.num_pending += chunk.is_last
        self.stats.num_steps += 1
        return True

    def _collect(self) -> list[Sequence]:
        """Take in the oldest pass under way: its sequences that live and got a token."""
        assert self._launched, "a step without work: no sequence is unfinished, or none fits"
        launched = self._launched.popleft()
        sampled = iter(self.model_runner.collect(launched))
        advanced = []
        for chunk in launched.chunks:
            seq = chunk.sequence
            self.scheduler.settle(chunk)
            if not chunk.is_last:
                continue
            token = next(sampled)
            seq.num_pending -= 1
            if seq.is_finished:  # it ended before this token was known
                continue
            seq.append(token.token_id, token.logprobs, self.weight_version)
            advanced.append(seq)
            if seq.is_finished:
                self.scheduler.finish(seq)
        self.stats.output_tokens += len(advanced)
        return advanced

    def abort(self, request: Request) -> None:
        """Drop a request's unfinished sequences."""
        for seq in request.sequences:
            if not seq.is_finished:
                self.scheduler.finish(seq)
                seq.finish_reason = "abort"
        self.model_runner.rest()

    def abort_all(self) -> None:
        """Drop every sequence and forget the prefix cache."""
        for seq in (*self.scheduler.running, *self.scheduler.waiting):
            self.scheduler.finish(seq)
            seq.finish_reason = "abort"
        self._launched.clear()
        self.model_runner.rest()
        self.block_manager.reset_prefix_cache(self._salt())

    def refit(self) -> int:
        """Take note of new weights in the model: pages of older ones are never used again.

        Returns:
            The weight version.
        Raises:
            RequestError: while sequences are unfinished. ConfigError: the model's numerics changed.
        """
        if self.model.numerics != self.numerics:
            raise ConfigError("the model's numerics changed under the engine; make a new LLM for the new ones")
        if self.model.weight_version != self.weight_version:
            if self.has_unfinished:
                raise RequestError("the weights changed while sequences were unfinished; finish or abort them first")
            self.weight_version = self.model.weight_version
            self.block_manager.reset_prefix_cache(self._salt())
            self.model_runner.note_new_weights()
        return self.weight_version

    def commit_update(self, update: WeightUpdate, running: RunningPolicy = "wait") -> int:
        """Put staged weights in the place of the live ones; tokens from now on carry the new version.

        Args:
            running: what becomes of unfinished sequences. "abort" ends them. "keep" lets them go on: all their keys and
                values are computed again, each token keeps the version that sampled it. "wait" wants none: see LLM and
                EngineLoop, which finish them first.
        Returns:
            The new weight version. No page of an older one is used again.
        Raises:
            RequestError: sequences are unfinished, or the update is none of this model or has ended.
            CheckpointError: the update is not whole; nothing has changed. BackendError: writing failed and was undone;
                "abort" and "keep" have acted by then. LostWeightsError: it could not be undone.
        """
        if running not in POLICIES:
            raise RequestError(f"running must be one of {', '.join(POLICIES)}, got {running!r}")
        if update.model is not self.model:
            raise RequestError("the update was made for another model than the one that this engine runs")
        if running == "wait" and self.has_unfinished:
            raise RequestError("sequences are unfinished; finish them first, or commit with running='abort' or 'keep'")
        update.verify()
        if running == "abort":
            self.abort_all()
        while self.has_pending:
            self.collect_pending()  # their tokens are of the old weights
        self._start_over()
        self.weight_version = update.write()
        self.block_manager.reset_prefix_cache(self._salt())
        self.model_runner.note_new_weights()
        return self.weight_version

    @property
    def has_pending(self) -> bool:
        """Whether passes are under way whose tokens were not taken in."""
        return bool(self._launched)

    def collect_pending(self) -> list[Sequence]:
        """Take in the oldest pass under way without launching another; its sequences that got a token, as step."""
        return self._collect() if self._launched else []

    def _start_over(self) -> None:
        """Take every sequence's pages; what was computed or looked up with the weights of now is forgotten."""
        self.scheduler.preempt_all()
        for seq in self.scheduler.waiting:
            seq.page_hashes.clear()
            if seq.scores_prompt:
                seq.prompt_logprobs.clear()

    def forget_prefixes(self) -> None:
        """Empty the prefix cache; running sequences keep their pages."""
        self.block_manager.forget_cached_pages()

    def sleep(self) -> None:
        """Give the KV cache's memory back until wake(); the weights stay.

        Raises:
            RequestError: while sequences are unfinished.
        """
        if self.has_unfinished:
            raise RequestError("sequences are unfinished; finish or abort them before the engine sleeps")
        self.block_manager.reset_prefix_cache(self._salt())
        self.model_runner.drop_cache()
        release_memory(self.model)

    def wake(self) -> None:
        """Take memory for the KV cache again, as many pages as before."""
        if not self.model_runner.layers:
            self.model_runner.set_cache(allocate_kv_cache(self.model, self.stats.num_kv_pages))

    def check_integrity(self) -> None:
        """Assert that the pages' bookkeeping holds; see BlockManager.check_integrity."""
        self.block_manager.check_integrity([*self.scheduler.running, *self.scheduler.waiting])

    def make_output(self, request: Request) -> RequestOutput:
        """A request's state as its caller sees it."""
        return RequestOutput(
            request.request_id,
            request.prompt,
            request.prompt_token_ids,
            [self._make_completion(seq) for seq in request.sequences],
            request.prompt_logprobs,
        )

    def _make_completion(self, seq: Sequence) -> CompletionOutput:
        token_ids = seq.output_token_ids
        logprobs = seq.logprobs if seq.params.logprobs is not None else None
        return CompletionOutput(
            index=seq.index,
            text=self._text(seq),
            token_ids=token_ids,
            logprobs=None if logprobs is None else list(logprobs),
            cumulative_logprob=None
            if logprobs is None
            else math.fsum(entry[token].logprob for entry, token in zip(logprobs, token_ids, strict=True)),
            finish_reason=seq.finish_reason,
            stop_reason=seq.stop_reason,
            weight_versions=list(seq.weight_versions),
        )

    def _text(self, seq: Sequence) -> str:
        """The output's text; the token that ended it has none, and ids that only the model knows have none."""
        if seq.detokenizer is not None:
            return seq.detokenizer.text if seq.is_finished else seq.detokenizer.settled_text
        if self.tokenizer is None:
            return ""
        ids = seq.output_token_ids
        if seq.finish_reason == "stop":
            ids.pop()
        return self.tokenizer.decode([t for t in ids if t < self.tokenizer.vocab_size])

    def _make_detokenizer(self, params: SamplingParams, keep_text: bool) -> Detokenizer | None:
        if self.tokenizer is None or not (params.stop_strings or keep_text):
            return None
        return Detokenizer(StreamDecoder(self.tokenizer), params.stop_strings, self.tokenizer.vocab_size)

    def _make_grammar(self, params: SamplingParams) -> Grammar | None:
        return None if params.schema_text is None else self.grammars.make(params.schema_text)

    def _limit_text(self) -> str:
        if self.max_model_len == self.model.config.max_position_embeddings:
            return f"but the model's context is {self.max_model_len}, one of them for the output"
        if self.max_model_len == self.config.max_model_len:
            return f"but max_model_len is {self.max_model_len}, one of them for the output"
        return (
            f"but the whole KV cache holds {self.max_model_len} ({self.stats.num_kv_pages} pages of {PAGE_SIZE}), "
            "one of them for the output; raise num_kv_pages or gpu_memory_utilization"
        )

    def _salt(self) -> str:
        """What a cached page depends on beside its tokens."""
        return f"{self.weight_version} {self.numerics.fingerprint()} {self.model.config!r}"
