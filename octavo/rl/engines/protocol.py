"""RolloutEngine: what the loop asks of whatever samples for it, in this process or behind HTTP."""

import dataclasses
import math
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Literal, Protocol

import torch

from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.weights.errors import EngineAnswerError, EngineError
from octavo.weights.refit import RefitReport, WeightSession, refit

# What becomes of requests that run when new weights are committed; their keys and values are computed again.
PauseMode = Literal["abort", "wait", "keep"]
Prompt = str | list[int]


@dataclasses.dataclass(frozen=True)
class SamplingSpec:
    """How a batch of prompts is sampled.

    Attributes:
        samples_per_prompt: completions of each prompt.
        max_tokens: the longest completion, in tokens.
        temperature: of sampling, and of the logprobs, which are of the untruncated distribution.
        stop: a string that ends a completion; None for none.
        has_logprobs: whether they are asked for; the embedded engine alone can leave them out.
    """

    samples_per_prompt: int
    max_tokens: int
    temperature: float
    stop: str | None = None
    has_logprobs: bool = True


@dataclasses.dataclass
class Completion:
    """One sample.

    Attributes:
        text: cut before the stop string.
        token_ids: every token sampled, what ended it included.
        logprobs: log pi of each token, as the engine computed it.
        weight_versions: of each token, in the trainer's count.
        finish_reason: "stop" or "length".
        stop_reason: the stop string that ended it, else None or what the engine says.
        routed_experts: [prompt and completion - 1, layers, experts a token], as CompletionOutput has it; None where the
            engine was not asked for it.
    """

    text: str
    token_ids: list[int]
    logprobs: list[float]
    weight_versions: list[int]
    finish_reason: str | None
    stop_reason: str | int | None
    routed_experts: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class Generation:
    """One prompt's token ids and its samples."""

    prompt_token_ids: list[int]
    completions: list[Completion]


class RolloutEngine(Protocol):
    """Whatever samples for the loop.

    Attributes:
        name: as in `engine.name` of a config.
        is_remote: it holds weights of its own, behind a server.
        num_requests: requests so far, which seed the next one's noise; None where the engine does not tell. A run that
            resumes sets it.
    """

    name: str
    is_remote: bool
    num_requests: int | None

    @property
    def tokenizer(self) -> Tokenizer | None:
        """The policy's."""

    @property
    def max_model_len(self) -> int:
        """The most tokens of a sequence, prompt and completion."""

    def generate(self, prompts: Sequence[Prompt], spec: SamplingSpec) -> list[Generation]:
        """Sample a batch.

        Returns:
            One Generation a prompt, in order, each with spec.samples_per_prompt completions.
        Raises:
            EngineError: nothing is then returned; the two below are kinds of it.
            StaleVersionError: older weights answered.
            StaleScaleError: they sampled under KV scales of others.
        """

    def begin_update(self, source: Decoder, version: int) -> WeightSession:
        """Start to hand over weights; one update at a time.

        Per-tensor KV scales of the source's own making (kv_scales = "trainer") go with the weights.

        After an update that fails before its commit the engine samples from the old weights. After a failed commit an
        engine that cannot take weights back (vLLM, SGLang) refuses to generate until another update succeeds.

        Args:
            source: the policy, in the sampler's numerics.
            version: of its weights, in the trainer's count.
        """

    def publish(
        self, trainer: Decoder, sampler: Decoder, hand_over_scales: Callable[[], None] = lambda: None
    ) -> RefitReport:
        """Make the engine sample from the trainer's weights, as its optimizer committed them.

        Args:
            sampler: the policy in the sampler's numerics, as the engine was built with.
            hand_over_scales: sets KV scales that were made for these weights, together with them.
        Raises:
            ExactnessError: the engine samples from another model, or from another version. What begin_update raises.
        """
        hand_over_scales()
        return refit(trainer, sampler, self)

    def exclusive(self) -> AbstractContextManager[None]:
        """Within, nothing is sampled by another thread; nothing to do where the caller's is the only one."""
        return nullcontext()

    def reallocate(self) -> None:
        """Allocate the KV cache again, as the sampler's table of KV scales has its layers by now; a server does so."""
        return

    def pause(self, mode: PauseMode) -> None:
        """Start no new step of any request, until resume."""

    def resume(self) -> None:
        """Go on."""

    def reset_prefix_cache(self) -> None:
        """Forget cached keys and values of prompts."""

    def stats(self) -> dict[str, float]:
        """Counters since the engine's start: "num_preemptions", and what else the engine tells."""

    def close(self) -> None:
        """Let go of connections and files; the engine itself goes on."""
        return


def check_completion(completion: Completion, spec: SamplingSpec, vocab_size: int, where: str) -> Completion:
    """Refuse a completion whose tokens, logprobs and versions do not belong together.

    Raises:
        EngineAnswerError: they do not.
        EngineError: for one that was aborted.
    """
    num_tokens = len(completion.token_ids)
    if completion.finish_reason not in ("stop", "length"):
        raise EngineError(
            f"{where}: a completion ended with {completion.finish_reason!r}, not by a stop or by its length; the step "
            "cannot use it"
        )
    for what, count in (("logprobs", len(completion.logprobs)), ("versions", len(completion.weight_versions))):
        if count != num_tokens:
            raise EngineAnswerError(
                f"{where}: {num_tokens} tokens came with {count} {what}; one of each is needed (off by "
                f"{count - num_tokens})"
            )
    if not 1 <= num_tokens <= spec.max_tokens:
        raise EngineAnswerError(f"{where}: {num_tokens} tokens came, of 1 to {spec.max_tokens} asked for")
    if bad := [token for token in completion.token_ids if not 0 <= token < vocab_size]:
        raise EngineAnswerError(f"{where}: token {bad[0]} is outside the policy's vocabulary of {vocab_size}")
    for place, logprob in enumerate(completion.logprobs):
        if not (math.isfinite(logprob) and logprob <= 0.0):
            raise EngineAnswerError(f"{where}: the logprob of token {place} is {logprob}; it must be finite and <= 0")
    return completion
