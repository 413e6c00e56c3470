"""The engine in this process, over the trainer's own tensors: an update is one quantization and one version."""

from collections.abc import Sequence

from octavo.errors import ExactnessError
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl.engines.protocol import (
    Completion,
    Generation,
    PauseMode,
    Prompt,
    RolloutEngine,
    SamplingSpec,
)
from octavo.serve import LLM, SamplingParams
from octavo.serve.outputs import CompletionOutput, RequestOutput


class EmbeddedEngine(RolloutEngine):
    """An LLM as a RolloutEngine.

    Args:
        llm: with a tokenizer; its own seed makes the noise, fresh at each call.
    """

    name = "embedded"
    is_remote = False

    def __init__(self, llm: LLM) -> None:
        self.llm = llm

    @property
    def tokenizer(self) -> Tokenizer | None:
        return self.llm.tokenizer

    @property
    def max_model_len(self) -> int:
        return self.llm.engine.max_model_len

    @property
    def num_requests(self) -> int | None:
        return self.llm.engine.num_requests

    @num_requests.setter
    def num_requests(self, value: int | None) -> None:
        assert value is not None, "the embedded engine counts"
        self.llm.engine.num_requests = value

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[Generation]:
        """See RolloutEngine."""
        params = SamplingParams(
            n=spec.samples_per_prompt,
            max_tokens=spec.max_tokens,
            temperature=spec.temperature,
            stop=spec.stop,
            logprobs=0 if spec.has_logprobs else None,
        )
        outputs = self._sample(prompts, params)
        return [Generation(output.prompt_token_ids, [as_completion(c) for c in output.outputs]) for output in outputs]

    def _sample(self, prompts: Sequence[Prompt], params: SamplingParams) -> list[RequestOutput]:
        return self.llm.generate(prompts, params)

    def begin_update(self, source: Decoder, version: int) -> "EmbeddedSession":
        """See RolloutEngine.

        Raises:
            ExactnessError: the engine samples from another model.
        """
        if self.llm.model is not source:
            raise ExactnessError("refit: the engine samples from another model than the one given as sampler")
        return EmbeddedSession(self.llm)

    def reallocate(self) -> None:
        """See RolloutEngine."""
        self.llm.engine.reallocate_kv_cache()

    def pause(self, mode: PauseMode) -> None:
        """Nothing: no request runs between two calls of generate."""

    def resume(self) -> None:
        """Nothing; see pause."""

    def reset_prefix_cache(self) -> None:
        """See RolloutEngine."""
        self.llm.engine.reset_prefix_cache()

    def stats(self) -> dict[str, float]:
        """See RolloutEngine."""
        stats = self.llm.stats
        return {
            "num_preemptions": float(stats.num_preemptions),
            "num_prefix_query_tokens": float(stats.num_prefix_query_tokens),
            "num_prefix_hit_tokens": float(stats.num_prefix_hit_tokens),
        }


class EmbeddedSession:
    """A refit: tensors and codes are shared, so staging has nothing to bring."""

    num_bytes = 0

    def __init__(self, llm: LLM) -> None:
        self._llm = llm

    def stage(self) -> None:
        """Nothing: the codes lie where the engine reads them."""

    def commit(self) -> int:
        """The version that the next tokens will carry; pages that older weights made are dropped."""
        return self._llm.refit(is_checked=True)  # by octavo.weights.refit.refit

    def abort(self) -> None:
        """Nothing was changed."""


def as_completion(output: CompletionOutput) -> Completion:
    """A sample of the LLM's, logprobs of the sampled tokens alone."""
    return Completion(
        output.text,
        output.token_ids,
        [] if output.logprobs is None else output.logprobs.sampled,
        output.weight_versions,
        output.finish_reason,
        output.stop_reason,
        output.routed_experts,
    )
