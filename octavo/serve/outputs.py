"""What generate returns, in vLLM's shape: a RequestOutput for each prompt, a CompletionOutput for each sample."""

import dataclasses
from array import array
from collections.abc import Callable, Sequence
from typing import Any, overload

import torch


@dataclasses.dataclass(frozen=True, slots=True)
class Logprob:
    """Log-probability of one token at one position.

    Attributes:
        logprob: log_softmax(logits / temperature), untruncated, natural log; an fp32 value. At temperature 0: of
            temperature 1.
        rank: 1 for the most probable token; None where only the sampled token was asked for (logprobs=0).
        decoded_token: the token's text; None without a tokenizer. Equality does not look at it.
    """

    logprob: float
    rank: int | None = None
    decoded_token: str | None = dataclasses.field(default=None, compare=False)


def with_texts(entry: dict[int, Logprob], text_of: Callable[[int], str]) -> dict[int, Logprob]:
    """A position's logprobs with the texts of their tokens."""
    return {i: Logprob(found.logprob, found.rank, text_of(i)) for i, found in entry.items()}


class FlatLogprobs(Sequence[dict[int, Logprob]]):
    """Logprobs of a sample's tokens: reads like a list with a dict token id -> Logprob for each of them.

    Where the sampled tokens' alone were asked for (logprobs=0), it holds numbers, and makes a dict when one is read: of
    a rollout's half million dicts Python's garbage collection would look at every one, again and again, while the GPU
    waits.

    Args:
        text_of: a token's text, looked up when an entry is read; None for none. A pickle holds the texts instead.
    """

    __slots__ = ("_entries", "_text_of", "_token_ids", "_values")

    def __init__(self, text_of: Callable[[int], str] | None = None) -> None:
        self._text_of = text_of
        self._token_ids, self._values = array("q"), array("d")
        self._entries: list[dict[int, Logprob]] = []  # where more than the sampled tokens' were asked for

    def append(self, token_id: int, logprobs: float | dict[int, Logprob]) -> None:
        """Add a sampled token with its logprob, or with a dict that has it; a sample has one kind alone."""
        self._token_ids.append(token_id)
        if isinstance(logprobs, dict):
            self._entries.append(logprobs)
            self._values.append(logprobs[token_id].logprob)
        else:
            self._values.append(logprobs)

    @property
    def sampled(self) -> list[float]:
        """Those of the sampled tokens."""
        return self._values.tolist()

    def copy(self, text_of: Callable[[int], str] | None = None) -> "FlatLogprobs":
        """What there is so far, with the texts of tokens where there is a tokenizer."""
        made = FlatLogprobs(text_of)
        made._token_ids, made._values, made._entries = self._token_ids[:], self._values[:], self._entries[:]
        return made

    def __len__(self) -> int:
        return len(self._values)

    @overload
    def __getitem__(self, index: int) -> dict[int, Logprob]: ...

    @overload
    def __getitem__(self, index: slice) -> list[dict[int, Logprob]]: ...

    def __getitem__(self, index: int | slice) -> dict[int, Logprob] | list[dict[int, Logprob]]:
        if isinstance(index, slice):
            return [self[i] for i in range(*index.indices(len(self)))]
        entry = self._entries[index] if self._entries else {self._token_ids[index]: Logprob(self._values[index])}
        return entry if self._text_of is None else with_texts(entry, self._text_of)

    def __getstate__(self) -> tuple[None, dict[str, Any]]:
        state = {name: getattr(self, name) for name in self.__slots__}
        if self._text_of is not None:
            ids = {*self._token_ids, *(i for entry in self._entries for i in entry)}
            state["_text_of"] = {i: self._text_of(i) for i in ids}.__getitem__
        return None, state

    def __eq__(self, other: object) -> bool:
        if isinstance(other, FlatLogprobs) and not (self._entries or other._entries):
            return (self._token_ids, self._values) == (other._token_ids, other._values)
        return isinstance(other, Sequence) and list(self) == list(other)

    __hash__ = None  # type: ignore[assignment]

    def __repr__(self) -> str:
        return repr(list(self))


@dataclasses.dataclass(frozen=True)
class CompletionOutput:
    """One sample.

    Attributes:
        index: which of the request's n samples.
        text: the output decoded as it follows the prompt, cut before a stop string; "" without a tokenizer.
        token_ids: every token generated, the one that ended it included.
        logprobs: for each token a dict token id -> Logprob, the sampled token always in it; None if not asked for.
            Its `sampled` are the numbers of the sampled tokens alone.
        cumulative_logprob: sum over the sampled tokens; None if logprobs were not asked for.
        finish_reason: "stop" (end of sequence, stop token or stop string), "length", "abort", "error", or None while it
            runs.
        stop_reason: the stop string or stop token id that ended it, or an error's text; None for end of sequence and
            length.
        weight_versions: for each token the version of the weights that made it.
        routed_experts: [prompt and output tokens - 1, layers with experts, experts a token] uint8 (int16 for more than
            256 experts) on the CPU: where each token that was computed went (the last one sampled was not), the
            likeliest expert first. None unless the LLM was made with enable_return_routed_experts, and until the
            sample is finished.
    """

    index: int
    text: str
    token_ids: list[int]
    logprobs: FlatLogprobs | None
    cumulative_logprob: float | None
    finish_reason: str | None
    stop_reason: str | int | None
    weight_versions: list[int]
    routed_experts: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class RequestOutput:
    """One prompt with its samples.

    Attributes:
        request_id: counts the engine's requests from 0.
        prompt: the prompt's text, or None if it came as token ids.
        prompt_token_ids: the prompt as the model saw it.
        outputs: the n samples, by index.
        prompt_logprobs: for each token of the prompt what CompletionOutput.logprobs has for the output's, None for the
            first; None if not asked for.
        num_cached_tokens: tokens of the prompt that the prefix cache had for the first sample.
    """

    request_id: int
    prompt: str | None
    prompt_token_ids: list[int]
    outputs: list[CompletionOutput]
    prompt_logprobs: list[dict[int, Logprob] | None] | None = None
    num_cached_tokens: int = 0

    @property
    def finished(self) -> bool:
        return all(output.finish_reason is not None for output in self.outputs)
