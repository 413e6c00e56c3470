"""Penalties, biases and forbidden tokens: by hand on small rows, and a row never depends on its neighbours."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.errors import RequestError
from octavo.serve import ParameterError
from octavo.serve.engine.logit_adjustment import adjust_logits
from octavo.serve.engine.sequence import Sequence
from tests.serve.random_models import make_model

INF = float("inf")


def sequence(output: list[int], **params: object) -> Sequence:
    """A sequence with the prompt 1, 2 and an output."""
    given = SamplingParams(**params)  # type: ignore[arg-type]
    return Sequence(0, [1, 2, *output], 2, given, seed=0, max_len=100, stop_token_ids=frozenset({0, 7, 99}))


def adjusted(output: list[int], **params: object) -> list[float]:
    logits = torch.tensor([[0.0, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, 3.0]])
    result: list[float] = adjust_logits(logits, [sequence(output, **params)])[0].tolist()
    return result


def test_nothing_asked_is_nothing_done() -> None:
    logits = torch.randn(3, 8)
    assert adjust_logits(logits, [sequence([3])] * 3) is logits


@pytest.mark.parametrize(
    ("params", "expected"),
    [
        ({"presence_penalty": 0.5}, [0.0, 2.0, -2.0, 0.5, 4.0, -4.5, 0.5, 3.0]),
        ({"frequency_penalty": 0.5}, [0.0, 2.0, -2.0, 0.0, 4.0, -4.5, 0.5, 3.0]),
        ({"frequency_penalty": -1, "presence_penalty": 1}, [0.0, 2.0, -2.0, 2.0, 4.0, -4.0, 0.5, 3.0]),
        ({"repetition_penalty": 2}, [0.0, 1.0, -4.0, 0.5, 4.0, -8.0, 0.5, 3.0]),
        ({"logit_bias": {0: 1.5, 7: -100}}, [1.5, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, -97.0]),
        ({"min_tokens": 4}, [-INF, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, -INF]),
        ({"min_tokens": 3}, [0.0, 2.0, -2.0, 1.0, 4.0, -4.0, 0.5, 3.0]),
        ({"logit_bias": {3: 1}, "repetition_penalty": 2, "presence_penalty": 1}, [0, 1, -4, 0, 4, -9, 0.5, 3]),
    ],
    ids=str,
)
def test_by_hand(params: dict[str, object], expected: list[float]) -> None:
    assert adjusted([3, 3, 5], **params) == expected


def test_a_row_does_not_see_its_neighbours() -> None:
    logits = torch.randn(3, 8)
    kept = logits.clone()
    sequences = [sequence([3]), sequence([3, 4], repetition_penalty=1.3, frequency_penalty=0.3), sequence([])]
    together = adjust_logits(logits, sequences)
    alone = adjust_logits(logits[1:2], sequences[1:2])
    assert torch.equal(together[1:2], alone)
    assert torch.equal(together[0], logits[0]) and torch.equal(together[2], logits[2])
    assert torch.equal(logits, kept)


def test_logprobs_are_the_models_whatever_was_allowed() -> None:
    llm = LLM(make_model("llama", "rowwise"), num_kv_pages=12)
    params = {"temperature": 0, "max_tokens": 6, "ignore_eos": True, "logprobs": 3}
    free = llm.generate([[1, 2, 3]], SamplingParams(**params))[0].outputs[0]  # type: ignore[arg-type]
    first = free.token_ids[0]
    bent = llm.generate([[1, 2, 3]], SamplingParams(logit_bias={first: -50}, **params))[0].outputs[0]  # type: ignore[arg-type]
    assert bent.token_ids[0] != first
    assert free.logprobs is not None and bent.logprobs is not None
    assert bent.logprobs[0][first] == free.logprobs[0][first]  # still the best one
    assert bent.logprobs[0][bent.token_ids[0]].rank == 2


def test_prompt_logprobs_survive_chunks_preemption_and_the_prefix_cache() -> None:
    model = make_model("llama", "rowwise")
    prompts = [[1 + (7 * i + j) % 90 for j in range(100)] for i in range(3)]
    params = SamplingParams(temperature=0.8, max_tokens=60, ignore_eos=True, prompt_logprobs=2, seed=1)
    calm = LLM(model, num_kv_pages=24)
    expected = [output.prompt_logprobs for output in calm.generate(prompts, params)]
    assert [output.prompt_logprobs for output in calm.generate(prompts, params)] == expected
    tight = LLM(model, num_kv_pages=6, max_num_batched_tokens=40, max_num_seqs=3)
    assert [output.prompt_logprobs for output in tight.generate(prompts, params)] == expected
    assert tight.stats.num_preemptions > 0
    assert tight.stats.num_multi_chunk_prompts > 0
    for prompt, entries in zip(prompts, expected, strict=True):
        assert entries is not None and len(entries) == len(prompt) and entries[0] is None
        assert all(entry is not None and token in entry for token, entry in zip(prompt[1:], entries[1:], strict=True))


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("min_tokens", -1),
        ("min_tokens", 65),
        ("presence_penalty", 2.5),
        ("frequency_penalty", float("nan")),
        ("repetition_penalty", 0),
        ("repetition_penalty", 10**400),
        ("logit_bias", {"1": 1}),
        ("logit_bias", {-1: 1}),
        ("logit_bias", {1: 101}),
        ("logit_bias", [1]),
        ("prompt_logprobs", 21),
        ("json_schema", "{"),
        ("json_schema", "[]"),
        ("json_schema", 5),
    ],
)
def test_bad_values_are_refused_by_name(field: str, value: object) -> None:
    with pytest.raises(ParameterError, match=field) as caught:
        SamplingParams(**{field: value})  # type: ignore[arg-type]
    assert caught.value.field == field
    assert isinstance(caught.value, RequestError)


def test_what_only_an_engine_can_refuse() -> None:
    llm = LLM(make_model("llama", "rowwise"), num_kv_pages=4)
    with pytest.raises(RequestError, match="logit_bias names token 96"):
        llm.generate([[1]], SamplingParams(logit_bias={96: 1}))
    with pytest.raises(RequestError, match="json_schema needs a tokenizer"):
        llm.generate([[1]], SamplingParams(json_schema={}))
