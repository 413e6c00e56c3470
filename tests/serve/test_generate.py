"""What generate promises: greedy tokens, seeds, n, and bits that batch, cache and preemption cannot touch."""

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.models import Decoder
from octavo.nn import PackedContext
from octavo.ops.logprob import log_softmax
from octavo.serve import RequestOutput
from tests.serve.random_models import VOCAB, make_model, random_prompts


@pytest.fixture(scope="module")
def model() -> Decoder:
    return make_model("qwen3", "rowwise", num_layers=1)


def bits(outputs: list[RequestOutput]) -> list[tuple[list[int], list[dict[int, float]]]]:
    """Tokens and logprobs of every sample."""
    return [
        (sample.token_ids, [{token: entry.logprob for token, entry in at.items()} for at in sample.logprobs or []])
        for output in outputs
        for sample in output.outputs
    ]


def greedy_by_recomputation(model: Decoder, prompt: list[int], num_tokens: int) -> list[int]:
    """The plainest loop there is: the whole sequence through the model for each token."""
    tokens = list(prompt)
    with torch.no_grad():
        for _ in range(num_tokens):
            hidden = model(torch.tensor(tokens), PackedContext.from_lengths([len(tokens)], model.numerics))
            tokens.append(int(model.logits(hidden[-1:]).argmax()))
    return tokens[len(prompt) :]


@pytest.mark.parametrize(("family", "kv_cache_dtype"), [("qwen3", "fp8"), ("llama", "bf16")])
def test_greedy_equals_full_recomputation(family: str, kv_cache_dtype: str) -> None:
    model = make_model(family, "rowwise", kv_cache_dtype)
    prompts = random_prompts(4)
    params = SamplingParams(temperature=0, max_tokens=6, ignore_eos=True)
    outputs = LLM(model, max_num_batched_tokens=50, max_num_seqs=4).generate(prompts, params)
    for prompt, output in zip(prompts, outputs, strict=True):
        assert output.prompt_token_ids == prompt
        assert output.outputs[0].token_ids == greedy_by_recomputation(model, prompt, 6)


def test_a_request_with_a_seed_is_its_own(model: Decoder) -> None:
    prompts = random_prompts(6, seed=3)
    params = [SamplingParams(seed=i, top_p=0.9, top_k=40, max_tokens=12, logprobs=3) for i in range(6)]
    together = LLM(model).generate(prompts, params)
    alone = [LLM(model, seed=99).generate([p], [s])[0] for p, s in zip(prompts, params, strict=True)]
    assert bits(together) == bits(alone)
    backwards = LLM(model, max_num_seqs=2, max_num_batched_tokens=33).generate(prompts[::-1], params[::-1])
    assert bits(together) == bits(backwards[::-1])


def test_the_engine_seed_makes_a_run_and_its_successors(model: Decoder) -> None:
    prompts = [[5, 6, 7]] * 3
    params = SamplingParams(max_tokens=12, ignore_eos=True)
    first, second = LLM(model, seed=1), LLM(model, seed=1)
    assert bits(first.generate(prompts, params)) == bits(second.generate(prompts, params))
    # three requests with one prompt differ, and so does the next call
    outputs = first.generate(prompts, params) + LLM(model, seed=1).generate(prompts, params)
    assert len({tuple(output.outputs[0].token_ids) for output in outputs}) == 6
    other = LLM(model, seed=2).generate(prompts, params)
    assert bits(other) != bits(LLM(model, seed=1).generate(prompts, params))


def test_n_samples_differ_share_the_prompt_and_come_by_index(model: Decoder) -> None:
    llm = LLM(model)
    prompt = random_prompts(2)[1]
    (output,) = llm.generate([prompt], SamplingParams(n=4, seed=7, max_tokens=10, ignore_eos=True))
    assert [sample.index for sample in output.outputs] == [0, 1, 2, 3]
    assert len({tuple(sample.token_ids) for sample in output.outputs}) == 4
    assert llm.stats.num_prefix_hit_tokens == 3 * (len(prompt) // 64) * 64
    (again,) = LLM(model).generate([prompt], SamplingParams(n=2, seed=7, max_tokens=10, ignore_eos=True))
    assert [s.token_ids for s in again.outputs] == [s.token_ids for s in output.outputs[:2]]


def test_prefix_hits_change_no_bit(model: Decoder) -> None:
    prompts = random_prompts(5, seed=5)
    params = SamplingParams(seed=1, max_tokens=8, logprobs=2)
    without = LLM(model, enable_prefix_caching=False)
    expected = bits(without.generate(prompts, params))
    assert without.stats.num_prefix_hit_tokens == 0
    llm = LLM(model)
    llm.generate(prompts, params)
    hits = llm.stats.num_prefix_hit_tokens
    again = llm.generate(prompts, params)
    assert bits(again) == expected
    assert sum(output.num_cached_tokens for output in again) == llm.stats.num_prefix_hit_tokens - hits > 0


def test_preemption_changes_no_bit(model: Decoder) -> None:
    prompts = random_prompts(6, seed=6)
    params = SamplingParams(seed=1, max_tokens=24, logprobs=0, ignore_eos=True)
    roomy, tight = LLM(model), LLM(model, num_kv_pages=7, max_num_seqs=6, plan_known_lengths=False)
    assert bits(roomy.generate(prompts, params)) == bits(tight.generate(prompts, params))
    assert roomy.stats.num_preemptions == 0
    assert tight.stats.num_preemptions > 0
    assert tight.stats.num_recomputed_tokens > 0
    assert tight.stats.num_kv_pages_peak == 7
    tight.engine.check_integrity()


def test_known_lengths_are_planned_for(model: Decoder) -> None:
    """The same requests through the same pages: those that would lose theirs wait, with the same bits."""
    prompts = random_prompts(6, seed=6)
    params = SamplingParams(seed=1, max_tokens=24, logprobs=0, ignore_eos=True)
    roomy, tight = LLM(model), LLM(model, num_kv_pages=7, max_num_seqs=6)
    assert bits(roomy.generate(prompts, params)) == bits(tight.generate(prompts, params))
    assert tight.stats.num_preemptions == tight.stats.num_recomputed_tokens == 0
    assert tight.stats.num_kv_pages_peak >= 6
    tight.engine.check_integrity()


def test_logprobs_are_untruncated_log_softmax_and_hold_the_sampled_token(model: Decoder) -> None:
    prompt = random_prompts(1)[0]
    params = SamplingParams(temperature=1.3, top_k=2, max_tokens=5, logprobs=4, seed=0, ignore_eos=True)
    (sample,) = LLM(model).generate([prompt], params)[0].outputs
    tokens = prompt + sample.token_ids
    with torch.no_grad():
        hidden = model(torch.tensor(tokens), PackedContext.from_lengths([len(tokens)], model.numerics))
        expected = log_softmax(model.logits(hidden[len(prompt) - 1 : -1]), 1.3)
    assert sample.logprobs is not None
    for row, token, at in zip(expected, sample.token_ids, sample.logprobs, strict=True):
        best = row.topk(4).indices.tolist()
        assert set(best) | {token} == set(at)
        assert token in best[:2]  # top_k bounds what is drawn, not what is reported
        assert all(entry.logprob == row[i].item() for i, entry in at.items())
        assert [at[i].rank for i in best] == [1, 2, 3, 4]
    assert sample.cumulative_logprob == pytest.approx(
        sum(at[t].logprob for at, t in zip(sample.logprobs, sample.token_ids, strict=True))
    )


def test_greedy_reports_the_logprob_of_temperature_one(model: Decoder) -> None:
    greedy = SamplingParams(temperature=0, max_tokens=4, logprobs=1, ignore_eos=True)
    plain = SamplingParams(temperature=1, top_k=1, max_tokens=4, logprobs=1, ignore_eos=True)
    llm = LLM(model)
    assert bits(llm.generate([[4, 5, 6]], greedy)) == bits(llm.generate([[4, 5, 6]], plain))


def test_asking_for_logprobs_is_each_request_s_own_affair(model: Decoder) -> None:
    params = [SamplingParams(logprobs=k, seed=0, max_tokens=3, ignore_eos=True) for k in (None, 0, 2)]
    none, sampled, best = (o.outputs[0] for o in LLM(model).generate([[1, 2, 3]] * 3, params))
    assert none.token_ids == sampled.token_ids == best.token_ids
    assert none.logprobs is None and none.cumulative_logprob is None
    assert sampled.logprobs is not None and best.logprobs is not None
    assert [len(at) for at in sampled.logprobs] == [1, 1, 1]
    assert all(2 <= len(at) <= 3 for at in best.logprobs)
    assert sampled.cumulative_logprob == best.cumulative_logprob


def test_stop_tokens_and_end_of_sequence() -> None:
    params = SamplingParams(seed=0, max_tokens=20, ignore_eos=True)
    tokens = LLM(make_model(num_layers=1)).generate([[9, 8, 7]], params)[0].outputs[0].token_ids
    assert len(tokens) == 20
    eos, stop = tokens[7], tokens[3]
    llm = LLM(make_model(num_layers=1, eos_token_ids=(eos,)))
    assert llm.generate([[9, 8, 7]], params)[0].outputs[0].token_ids == tokens
    for given, token, reason in (({}, eos, None), ({"stop_token_ids": [stop]}, stop, stop)):
        ended = llm.generate([[9, 8, 7]], SamplingParams(seed=0, max_tokens=20, **given))[0].outputs[0]
        assert ended.token_ids == tokens[: tokens.index(token) + 1]
        assert (ended.finish_reason, ended.stop_reason) == ("stop", reason)


def test_the_least_and_the_outermost_prompts(model: Decoder) -> None:
    assert LLM(model).generate([], SamplingParams()) == []
    assert LLM(model).generate([[0, VOCAB - 1]], SamplingParams(max_tokens=1))[0].finished


def test_the_context_ends_what_max_tokens_does_not(model: Decoder) -> None:
    params = SamplingParams(max_tokens=None, ignore_eos=True)
    (output,) = LLM(model, max_model_len=20).generate([[1, 2, 3]], params)
    assert len(output.outputs[0].token_ids) == 17
    assert output.outputs[0].finish_reason == "length"


@pytest.mark.parametrize("recipe", ["bf16", "delayed", "tensorwise", "rowwise", "blockwise"])
def test_every_recipe_serves_in_fast_mode(recipe: str) -> None:
    llm = LLM(make_model("llama", recipe, exact=False), max_num_seqs=4, num_kv_pages=9)
    outputs = llm.generate(random_prompts(6), SamplingParams(max_tokens=6, logprobs=0, ignore_eos=True))
    assert all(len(o.outputs[0].token_ids) == 6 for o in outputs)
    assert all(entry.logprob <= 0 for o in outputs for at in o.outputs[0].logprobs or [] for entry in at.values())
