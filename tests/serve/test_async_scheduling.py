"""A step launched before the last one is read changes no token, whatever happens in between; nor does a graph."""

import dataclasses

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.serve import RequestOutput
from tests.serve.random_models import EOS, make_model, random_prompts

BASE = SamplingParams(temperature=0.9, max_tokens=24, logprobs=2)
PARAMS = [
    BASE,
    dataclasses.replace(BASE, ignore_eos=True),
    dataclasses.replace(BASE, max_tokens=1),
    dataclasses.replace(BASE, stop_token_ids=list(range(0, 96, 7)), logprobs=None),
    dataclasses.replace(BASE, n=3, seed=7, top_k=20),
    dataclasses.replace(BASE, temperature=0.0, prompt_logprobs=1),
]
PENALIZED = [*PARAMS, dataclasses.replace(BASE, presence_penalty=1.0, logit_bias={EOS: 3.0})]


# sizes that the exact kernels take; the others' sums are made in steps on the host
WIDE = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
WIDE_EXPERTS = WIDE | {"moe_intermediate_size": 128}


def run(llm: LLM, variants: list[SamplingParams]) -> list[RequestOutput]:
    prompts = random_prompts(2 * len(variants), seed=5)
    outputs = llm.generate(prompts, variants * 2)
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    assert llm.engine.block_manager.num_used_pages == 0
    return outputs


def make_llm(is_ahead: bool, device: str = "cpu", **options: object) -> LLM:
    model = make_model("qwen3", "blockwise", device=device)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "num_kv_pages": 14}
    return LLM(model, async_scheduling=is_ahead, **{**limits, **options})  # type: ignore[arg-type]


@pytest.mark.parametrize("variants", [PARAMS, PENALIZED], ids=["free", "penalized"])
def test_the_same_outputs(variants: list[SamplingParams]) -> None:
    ahead, behind = make_llm(True), make_llm(False)
    ahead.generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # request ids, and so seeds, go on from here
    behind.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    outputs = run(ahead, variants)
    assert outputs == run(behind, variants)
    assert ahead.stats.num_preemptions > 0
    assert ahead.stats.num_prefix_hit_tokens > 0
    reasons = {sample.finish_reason for output in outputs for sample in output.outputs}
    assert reasons == {"stop", "length"}


def test_pages_filled_by_tokens_under_way_are_found_later() -> None:
    llm = make_llm(True, num_kv_pages=40)
    first = llm.generate([[5] * 10], SamplingParams(max_tokens=130, ignore_eos=True, temperature=1.0, seed=1))[0]
    again = [5] * 10 + first.outputs[0].token_ids
    llm.stats.reset()
    llm.generate([again], SamplingParams(max_tokens=1))
    assert llm.stats.num_prefix_hit_tokens == 128


def test_the_first_step_returns_before_its_token_is_read() -> None:
    llm = make_llm(True)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.engine.step() == []
    assert [seq.num_pending for seq in request.sequences] == [1]
    assert llm.engine.step() == request.sequences
    assert llm.engine.step() == request.sequences
    assert request.is_finished
    assert not llm.engine.has_unfinished


def test_an_aborted_request_s_token_under_way_is_dropped() -> None:
    llm = make_llm(True)
    aborted, kept = (llm.engine.add_request([i, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)) for i in (1, 2))
    llm.engine.step()
    llm.engine.abort(aborted)
    while llm.engine.has_unfinished:
        assert aborted.sequences[0] not in llm.engine.step()
    assert aborted.num_output_tokens == 0
    assert kept.num_output_tokens == 4
    llm.engine.check_integrity()


def test_a_failing_collect_leaves_a_clean_engine(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = make_llm(True)

    def fail(launched: object) -> None:
        raise RuntimeError("out of luck")

    with monkeypatch.context() as patch:
        patch.setattr(llm.engine.model_runner, "collect", fail)
        with pytest.raises(RuntimeError, match="out of luck"):
            llm.generate([[1, 2, 3]])
    assert not llm.engine.has_unfinished
    assert llm.generate([[1, 2, 3]], SamplingParams(max_tokens=3))[0].outputs[0].token_ids


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
def test_graphs_and_lookahead_change_no_bit(family: str, recipe: str) -> None:
    """In exact mode; filled-up batches included."""
    model = make_model(family, recipe, device="cuda", **(WIDE_EXPERTS if family == "qwen3_moe" else WIDE))
    outputs = []
    for is_ahead, is_eager in ((False, True), (True, True), (True, False)):
        llm = LLM(
            model,
            max_num_seqs=6,
            max_num_batched_tokens=96,
            num_kv_pages=14,
            async_scheduling=is_ahead,
            enforce_eager=is_eager,
        )
        outputs.append(run(llm, PENALIZED))
        graphs = llm.engine.model_runner.graphs
        assert (graphs is None) == is_eager
        # the exact LayerNorm is an order-free sum in steps that the host makes, exact bf16 experts go one by one
        waits = family == "gptj" or (family, recipe) == ("qwen3_moe", "bf16")
        assert graphs is None or graphs.is_empty == waits
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.gpu
def test_graphs_see_new_weights_and_survive_sleep() -> None:
    model = make_model("qwen3", "blockwise", device="cuda", **WIDE)
    llm = LLM(model, max_num_seqs=4, num_kv_pages=14)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)

    def tokens() -> list[RequestOutput]:
        return [output.outputs for output in llm.generate([[1, 2, 3], [4, 5]], params)]

    before = tokens()
    llm.engine.sleep()
    llm.engine.wake()
    assert tokens() == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.mark_weights_updated()
    changed = tokens()
    assert changed != before
    fresh = LLM(model, max_num_seqs=4, num_kv_pages=14, enforce_eager=True, async_scheduling=False)
    llm = fresh
    assert [[dataclasses.replace(o, weight_versions=[]) for o in r] for r in tokens()] == [
        [dataclasses.replace(o, weight_versions=[]) for o in r] for r in changed
    ]
