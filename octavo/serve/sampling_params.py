"""SamplingParams: how a request is sampled; checked once, when it is made. vLLM's names and meanings."""

import dataclasses
import functools
import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import RequestError
from octavo.serve.keywords import SAMPLING_NAMES, takes_foreign_fields

MAX_LOGPROBS = 20
MAX_SAMPLES = 4096
# below this a quotient logits / temperature leaves fp32
MIN_TEMPERATURE = 1e-6
MAX_PENALTY = 2.0
MAX_LOGIT_BIAS = 100.0


class ParameterError(RequestError):
    """A parameter out of its range; `field` is its name."""

    def __init__(self, field: str, rule: str) -> None:
        super().__init__(f"{field} {rule}")
        self.field = field


@takes_foreign_fields(SAMPLING_NAMES)
@dataclasses.dataclass(frozen=True)
class SamplingParams:
    """Parameters of one request.

    Args:
        temperature: 0 is greedy; else at least 1e-6.
        top_p: keep the smallest set of tokens with this probability mass, in (0, 1]; 1 is off.
        top_k: keep the best k tokens; -1 and 0 are off.
        min_p: drop tokens below this share of the best token's probability, in [0, 1]; 0 is off.
        max_tokens: tokens to generate at most; None for as many as the context holds. 0 computes the prompt alone, for
            its prompt_logprobs: the output is empty and ends with "length".
        stop: strings that end the text; what they match, and everything behind it, is cut off `text`.
        stop_token_ids: tokens that end it, beside the model's end-of-sequence token; they stay in `token_ids`.
        ignore_eos: generate on behind the end-of-sequence token.
        n: samples of the prompt.
        seed: makes the request's tokens its own, whatever else is in the batch; None draws on the engine's seed.
        logprobs: None for none, 0 for the sampled token's, k for those of the k best tokens too (at most 20).
            A logprob is log_softmax(logits / temperature) over the whole vocabulary, before top-k, top-p and min-p,
            and before penalties, logit_bias, min_tokens and json_schema: what the model says, not what was allowed.
            At temperature 0 it is the one of temperature 1.
        prompt_logprobs: the same for each token of the prompt but the first, under the same temperature.
        min_tokens: no token that ends the output is drawn before so many tokens; a stop string still ends it.
        presence_penalty: taken off the logit of each token that the output holds, in [-2, 2].
        frequency_penalty: the same, once for each time that it holds it, in [-2, 2].
        repetition_penalty: > 0; the logit of each token of prompt and output is divided by it, or multiplied where it
            is negative; 1 is off.
        logit_bias: token id -> number from -100 to 100 that is added to its logit.
        json_schema: the output is JSON of this schema ({} for any object), given as text or as an object; needs the
            library llguidance and a tokenizer. LLM compiles it in the caller's thread without a limit of time or
            memory; the server tries it first (docs/serving.md).

    What changes logits changes the sampling alone, and depends on the sequence's own tokens alone. Order: logit_bias,
    min_tokens, repetition, frequency and presence penalty, json_schema, temperature, top_k, top_p, min_p.

    Keywords of vLLM and transformers that mean one of these are taken (max_new_tokens), or where they ask for nothing
    (best_of=1).

    Raises:
        ParameterError: for a value outside these; a RequestError.
        KeywordError: another keyword; also a TypeError.
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
    prompt_logprobs: int | None = None
    min_tokens: int = 0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] | None = None
    json_schema: str | Mapping[str, Any] | None = None

    def __post_init__(self) -> None:
        _check_number("temperature", self.temperature)
        if self.temperature < 0 or 0 < self.temperature < MIN_TEMPERATURE:
            raise ParameterError(
                "temperature", f"must be 0 (greedy) or at least {MIN_TEMPERATURE:g}, got {self.temperature}"
            )
        _check_number("top_p", self.top_p)
        if not 0 < self.top_p <= 1:
            raise ParameterError("top_p", f"must be in (0, 1], got {self.top_p}; 1 turns it off")
        _check_integer("top_k", self.top_k)
        if not -1 <= self.top_k < 2**63:
            raise ParameterError("top_k", f"must be at least 1, or -1 or 0 to turn it off, got {self.top_k}")
        object.__setattr__(self, "top_k", self.top_k or -1)
        _check_interval("min_p", self.min_p, 0.0, 1.0)
        _check_range("max_tokens", self.max_tokens, 0, None)
        _check_range("n", self.n, 1, MAX_SAMPLES, optional=False)
        _check_range("seed", self.seed, -(2**63), 2**63 - 1)
        _check_range("logprobs", self.logprobs, 0, MAX_LOGPROBS)
        _check_range("prompt_logprobs", self.prompt_logprobs, 0, MAX_LOGPROBS)
        if not isinstance(self.ignore_eos, bool):
            raise ParameterError("ignore_eos", f"must be a bool, got {self.ignore_eos!r}")
        object.__setattr__(self, "stop", _as_stop_strings(self.stop))
        object.__setattr__(self, "stop_token_ids", _as_token_ids(self.stop_token_ids))
        self._check_adjustments()

    def _check_adjustments(self) -> None:
        _check_range("min_tokens", self.min_tokens, 0, None, optional=False)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise ParameterError("min_tokens", f"must be at most max_tokens={self.max_tokens}, got {self.min_tokens}")
        _check_interval("presence_penalty", self.presence_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_interval("frequency_penalty", self.frequency_penalty, -MAX_PENALTY, MAX_PENALTY)
        _check_number("repetition_penalty", self.repetition_penalty)
        if not 1e-3 <= self.repetition_penalty <= 1e3:
            raise ParameterError("repetition_penalty", f"must be from 0.001 to 1000, got {self.repetition_penalty}")
        object.__setattr__(self, "logit_bias", _as_logit_bias(self.logit_bias))
        object.__setattr__(self, "json_schema", _as_json_text(self.json_schema))
        if self.json_schema is not None and self.ignore_eos:
            raise ParameterError("json_schema", "needs the end-of-sequence token to end the text; leave out ignore_eos")

    @property
    def schema_text(self) -> str | None:
        """`json_schema` as text."""
        assert self.json_schema is None or isinstance(self.json_schema, str), "it was made text when it was checked"
        return self.json_schema

    @property
    def has_penalties(self) -> bool:
        """A logit depends on the tokens so far."""
        return self.presence_penalty != 0 or self.frequency_penalty != 0 or self.repetition_penalty != 1

    @functools.cached_property
    def adjusts_logits(self) -> bool:
        """Sampling sees other logits than the model's."""
        return self.has_penalties or bool(self.logit_bias) or self.min_tokens > 0 or self.json_schema is not None

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
    # an integer beyond fp64 has no float
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool)
    if not is_number or (isinstance(value, int) and abs(value) > 2**63) or not math.isfinite(value):  # type: ignore[arg-type]
        raise ParameterError(name, f"must be a finite number, got {_shown(value)}")


def _check_interval(name: str, value: float, low: float, high: float) -> None:
    _check_number(name, value)
    if not low <= value <= high:
        raise ParameterError(name, f"must be in [{low:g}, {high:g}], got {value}; {max(low, 0.0):g} turns it off")


def _check_integer(name: str, value: object) -> None:
    if isinstance(value, bool) or not isinstance(value, int):
        raise ParameterError(name, f"must be an integer, got {_shown(value)}")


def _check_range(name: str, value: int | None, low: int, high: int | None, *, optional: bool = True) -> None:
    if value is None and optional:
        return
    _check_integer(name, value)
    assert value is not None, "an integer was checked"
    if value < low or (high is not None and value > high):
        bounds = f"at least {low}" if high is None else f"from {low} to {high}"
        raise ParameterError(name, f"must be {bounds}{', or None' if optional else ''}, got {_shown(value)}")


def _as_stop_strings(stop: object) -> tuple[str, ...]:
    strings = (stop,) if isinstance(stop, str) else stop if stop is not None else ()
    if not isinstance(strings, (list, tuple)) or not all(isinstance(s, str) and s for s in strings):
        raise ParameterError("stop", f"must be a non-empty string or a list of such, got {_shown(stop)}")
    return tuple(strings)


def _as_token_ids(ids: object) -> tuple[int, ...]:
    values = ids if ids is not None else ()
    if not isinstance(values, (list, tuple)) or not all(type(i) is int and i >= 0 for i in values):
        raise ParameterError("stop_token_ids", f"must be a list of integers >= 0, got {_shown(ids)}")
    return tuple(values)


def _as_logit_bias(bias: object) -> dict[int, float] | None:
    if bias is None:
        return None
    if not isinstance(bias, Mapping) or not all(type(i) is int and i >= 0 for i in bias):
        raise ParameterError("logit_bias", f"must map token ids, integers >= 0, to numbers, got {_shown(bias)}")
    for token_id, value in bias.items():
        _check_number("logit_bias", value)
        if abs(value) > MAX_LOGIT_BIAS:
            raise ParameterError(
                "logit_bias", f"must be from {-MAX_LOGIT_BIAS:g} to {MAX_LOGIT_BIAS:g}, got {value} for {token_id}"
            )
    return dict(bias) or None


def _as_json_text(schema: object) -> str | None:
    """A schema as JSON text, of an object."""
    if schema is None:
        return None
    try:
        fields = json.loads(schema) if isinstance(schema, str) else schema
        if isinstance(fields, Mapping):
            return json.dumps(dict(fields))
    except (ValueError, TypeError, RecursionError) as error:
        raise ParameterError("json_schema", f"must be a JSON schema: {error}") from None
    raise ParameterError("json_schema", f"must be a JSON schema, an object, got {_shown(schema)}")


def _shown(value: object) -> str:
    """A value for an error's text: not megabytes of it."""
    text = repr(value) if not isinstance(value, int) or abs(value) < 2**64 else "an integer beyond 64 bits"
    return text if len(text) <= 200 else f"{text[:200]}..."
