"""SamplingParams: every bad value is a RequestError that names the field and the rule."""

import dataclasses
from typing import Any

import pytest

from octavo.errors import KeywordError, OctavoError, RequestError
from octavo.serve import keywords
from octavo.serve.sampling_params import MAX_LOGPROBS, ParameterError, SamplingParams

NAN, INF = float("nan"), float("inf")

BAD: dict[str, tuple[object, ...]] = {
    "temperature": (-0.1, NAN, INF, 1e-9, "hot", None),
    "top_p": (0.0, 1.1, -0.5, NAN),
    "top_k": (-2, 1.5, True),
    "min_p": (-0.1, 1.1),
    "max_tokens": (-1, 2.0),
    "n": (0, None, 5000),
    "stop": ("", ["a", ""], ["a", 1], 7),
    "stop_token_ids": ([-1], ["a"], [True], 3),
    "seed": (1.0, "x", 2**63),
    "logprobs": (-1, MAX_LOGPROBS + 1, True),
    "prompt_logprobs": (MAX_LOGPROBS + 1,),
    "ignore_eos": (1,),
    "min_tokens": (-1, 65),
    "presence_penalty": (2.5,),
    "frequency_penalty": (NAN,),
    "repetition_penalty": (0, 10**400),
    "logit_bias": ({"1": 1}, {-1: 1}, {1: 101}, [1]),
    "json_schema": ("{", "[]", 5),
}


@pytest.mark.parametrize(("field", "value"), [(field, value) for field, values in BAD.items() for value in values])
def test_bad_value_is_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field and isinstance(caught.value, RequestError)


def test_limits_themselves_are_fine() -> None:
    limits = {"top_p": 1, "top_k": -1, "min_p": 1.0, "max_tokens": 1, "n": 4096, "logprobs": MAX_LOGPROBS}
    params = SamplingParams(0, stop=["a", "b"], stop_token_ids=[0], seed=-(2**63), **limits)  # type: ignore[arg-type]
    assert params.is_greedy
    assert params.stop_strings == ("a", "b")
    assert SamplingParams(max_tokens=None, stop="x").stop_strings == ("x",)


def test_is_frozen_and_unknown_fields_are_errors() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().top_k = 3  # type: ignore[misc]
    with pytest.raises(TypeError, match="best_of"):
        SamplingParams(best_of=2)  # type: ignore[call-arg]


@pytest.mark.parametrize(
    ("given", "ours"),
    [
        ({"max_new_tokens": 5}, {"max_tokens": 5}),
        ({"num_return_sequences": 3}, {"n": 3}),
        ({"stop_strings": ["a"]}, {"stop": ["a"]}),
        ({"guided_json": {"type": "object"}}, {"json_schema": {"type": "object"}}),
        ({"best_of": 2, "n": 2}, {"n": 2}),
        ({"best_of": 1, "use_beam_search": False, "length_penalty": 1.0, "num_beams": 1}, {}),
        ({"guided_decoding": None, "logits_processors": None, "skip_special_tokens": True}, {}),
        ({"do_sample": True, "pad_token_id": 0}, {}),
        ({"top_k": 0, "stream_interval": 4}, {"top_k": -1}),
    ],
    ids=str,
)
def test_names_of_other_libraries_are_taken(given: dict[str, Any], ours: dict[str, Any]) -> None:
    assert SamplingParams(**given) == SamplingParams(**ours)


@pytest.mark.parametrize(
    ("given", "text"),
    [
        ({"best_of": 2}, "does not take best_of=2; octavo has no beam search"),
        ({"use_beam_search": True}, "does not take use_beam_search=True; octavo has no beam search"),
        ({"structured_outputs": {"json": {}}}, "give json_schema, a JSON schema"),
        ({"do_sample": False}, "greedy decoding is temperature=0"),
        ({"max_length": 10}, "it counts the prompt too; give max_tokens"),
        ({"eos_token_id": 3}, "give stop_token_ids"),
        ({"max_new_tokens": 5, "max_tokens": 6}, "max_new_tokens is another name of max_tokens; give max_tokens alone"),
        ({"max_new_token": 5}, "no keyword 'max_new_token'; did you mean 'max_new_tokens', which is 'max_tokens' here"),
        ({"top_pp": 1.0}, "did you mean 'top_p'"),
        ({"xyzzy": 1}, "no keyword 'xyzzy'; its keywords are frequency_penalty, ignore_eos"),
    ],
    ids=str,
)
def test_other_keywords_are_refused_with_what_to_do(given: dict[str, Any], text: str) -> None:
    with pytest.raises(KeywordError, match=text) as caught:
        SamplingParams(**given)
    assert isinstance(caught.value, TypeError | OctavoError) and str(caught.value).startswith("SamplingParams")


def test_a_keyword_that_changes_nothing_is_logged_once(caplog: pytest.LogCaptureFixture) -> None:
    keywords._noted.clear()
    with caplog.at_level("INFO", logger="octavo.serve.keywords"):
        for _ in range(3):
            SamplingParams(best_of=1)
    assert caplog.messages == ["SamplingParams: best_of=1 is taken and changes nothing here"]
