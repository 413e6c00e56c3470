"""SamplingParams: how a request is sampled; checked once, when it is made. vLLM's names and meanings."""

import dataclasses
import math
from collections.abc import Sequence

from octavo.errors import RequestError

MAX_LOGPROBS = 20
MAX_SAMPLES = 4096
# below this a quotient logits / temperature leaves fp32
MIN_TEMPERATURE = 1e-6


@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Args:
        temperature: 0 is greedy; else at least 1e-6.
        top_p: keep the smallest set of tokens with this probability mass, in (0, 1]; 1 is off.
        top_k: keep the best k tokens; -1 is off.
        min_p: drop tokens below this share of the best token's probability, in [0, 1]; 0 is off.
        max_tokens: tokens to generate at most, at least 1; None for as many as the context holds.
        stop: strings that end the text; what they match, and everything behind it, is cut off `text`.
        stop_token_ids: tokens that end it, beside the model's end-of-sequence token; they stay in `token_ids`.
        ignore_eos: generate on behind the end-of-sequence token.
        n: samples of the prompt.
        seed: makes the request's tokens its own, whatever else is in the batch; None draws on the engine's seed.
        logprobs: None for none, 0 for the sampled token's, k for those of the k best tokens too (at most 20).
            A logprob is log_softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and min-p;
            at temperature 0 it is the one of temperature 1.

    Raises:
        RequestError: for a value outside these.
    """

    temperature: float = 1.0
    top_p: float = 1.0
    top_k: int = -1
    min_p: float = 0.0
    max_tokens: int | None = 64
    stop: str | Sequence[str] | None = None
    stop_token_ids: Sequence[int] | None = None
    ignore_eos: bool = False
    n: int = 1
    seed: int | None = None
    logprobs: int | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise RequestError(
                f"temperature must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature}"
            )
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise RequestError(f"top_p must be in (0, 1], got {self.top_p}; 1 turns it off")
        _check_integer("top_k", self.top_k)
        if self.top_k == 0 or self.top_k < -1:
            raise RequestError(f"top_k must be at least 1, or -1 to turn it off, got {self.top_k}")
        _check_number("min_p", self.min_p)
        if not 0 <= self.min_p <= 1:
            raise RequestError(f"min_p must be in [0, 1], got {self.min_p}; 0 turns it off")
        _check_range("max_tokens", self.max_tokens, 1, None)
        _check_range("n", self.n, 1, MAX_SAMPLES, optional=False)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise RequestError(f"ignore_eos must be a bool, got {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple, empty for none."""
        return tuple(self.stop or ())

    @property
    def stop_ids(self) -> frozenset[int]:
        """`stop_token_ids` as a set, empty for none."""
        return frozenset(self.stop_token_ids or ())

    @property
    def is_greedy(self) -> bool:
        return self.temperature == 0


def _check_number(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value):
        raise RequestError(f"{name} must be a finite number, got {value!r}")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} must be an integer, got {value!r}")


def _check_range(name: str, value: int | None, low: int, high: int | None, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    _check_integer(name, value)
    assert value is not None, "an integer was checked"
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise RequestError(f"{name} must be {bounds}{', or None' if optional else ''}, got {value}")


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop if stop is not None else ()
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise RequestError(f"stop must be a non-empty string or a list of such, got {stop!r}")
    return tuple(strings)


def _as_token_ids(ids: object) -> tuple[int, ...]:
    values = ids if ids is not None else ()
    if not isinstance(values, (list, tuple)) or not all(type(i) is int and i >= 0 for i in values):
        raise RequestError(f"stop_token_ids must be a list of integers >= 0, got {ids!r}")
    return tuple(values)
