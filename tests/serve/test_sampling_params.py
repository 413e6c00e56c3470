"""SamplingParams: every bad value is a RequestError that names the field and the rule."""

import dataclasses

import pytest

from octavo.errors import RequestError
from octavo.serve.sampling_params import MAX_LOGPROBS, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD = [
    ("temperature", -0.1),
    ("temperature", NAN),
    ("temperature", INF),
    ("temperature", 1e-9),
    ("temperature", "hot"),
    ("temperature", None),
    ("top_p", 0.0),
    ("top_p", 1.1),
    ("top_p", -0.5),
    ("top_p", NAN),
    ("top_k", 0),
    ("top_k", -2),
    ("top_k", 1.5),
    ("top_k", True),
    ("min_p", -0.1),
    ("min_p", 1.1),
    ("max_tokens", 0),
    ("max_tokens", -1),
    ("max_tokens", 2.0),
    ("n", 0),
    ("n", None),
    ("n", 5000),
    ("stop", ""),
    ("stop", ["a", ""]),
    ("stop", ["a", 1]),
    ("stop", 7),
    ("stop_token_ids", [-1]),
    ("stop_token_ids", ["a"]),
    ("stop_token_ids", [True]),
    ("stop_token_ids", 3),
    ("seed", 1.0),
    ("seed", "x"),
    ("seed", 2**63),
    ("logprobs", -1),
    ("logprobs", MAX_LOGPROBS + 1),
    ("logprobs", True),
    ("ignore_eos", 1),
]


@pytest.mark.parametrize(("field", "value"), BAD, ids=[f"{field}={value!r}" for field, value in BAD])
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(RequestError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert "got" in str(caught.value)


def test_limits_themselves_are_fine() -> None:
    params = SamplingParams(
        temperature=0,
        top_p=1,
        top_k=-1,
        min_p=1.0,
        max_tokens=1,
        stop=["a", "b"],
        stop_token_ids=[0],
        n=4096,
        seed=-(2**63),
        logprobs=MAX_LOGPROBS,
    )
    assert params.is_greedy
    assert params.stop_strings == ("a", "b")
    assert SamplingParams(max_tokens=None, stop="x").stop_strings == ("x",)


def test_is_frozen_and_unknown_fields_are_errors() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]
