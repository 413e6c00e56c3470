"""Refit: codes made once a version and shared with the engine, views over the same tensors, and what it refuses."""

from typing import Any

import pytest
import torch

from octavo.errors import ExactnessError, NonFiniteError
from octavo.models import Decoder, sequence_logprobs
from octavo.nn import Linear, live_tensors
from octavo.nn.weights import operands
from octavo.nn.weights.write_watch import WriteWatch
from octavo.numerics import Numerics, get_recipe
from octavo.ops.quantize import quantize
from octavo.rl.engines.embedded import EmbeddedEngine
from octavo.rl.evaluate import Evaluator
from octavo.rl.refit import refit, share_weights
from octavo.rl.tasks import Arithmetic
from octavo.serve import LLM, SamplingParams
from tests.rl.conftest import Policy, nudge

EXACT = Numerics(get_recipe("blockwise"), "fp8", exact=True)
TASK = Arithmetic(num_digits=1, heldout_share=0.3)


def codes_of(model: Decoder) -> list[torch.Tensor]:
    return [q.qdata for m in model.modules() if isinstance(m, Linear) for q in m.quantized_weight()]


def test_codes_are_made_once_and_are_the_trainers_and_the_samplers(policy: Policy) -> None:
    model, tokenizer = policy
    model.set_numerics(EXACT)
    llm = LLM(model, tokenizer=tokenizer, max_num_seqs=4)
    stale = [codes.clone() for codes in codes_of(model)]
    nudge(model)
    report = refit(model, model, EmbeddedEngine(llm))
    fresh = codes_of(model)
    assert report.num_quantized == len(fresh) > 0
    assert report.num_bytes > sum(codes.numel() for codes in fresh)
    assert any(not torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(stale, fresh, strict=True))
    llm.generate(["1+1="], SamplingParams(max_tokens=2))
    sequence_logprobs(model, [[1, 2, 3]])[0].sum().backward()
    assert all(a is b for a, b in zip(fresh, codes_of(model), strict=True))


def test_a_refit_quantizes_each_weight_once_in_both_layouts_and_in_place(
    policy: Policy, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, tokenizer = policy
    model.set_numerics(EXACT)
    llm = LLM(model, tokenizer=tokenizer, max_num_seqs=4)
    calls: list[tuple[str, bool]] = []
    for name in ("quantize", "quantize_columns", "quantize_both"):
        run = getattr(operands, name)

        def counted(*args: Any, run: Any = run, name: str = name, **options: Any) -> Any:
            calls.append((name, options.get("out") is not None))
            return run(*args, **options)

        monkeypatch.setattr(operands, name, counted)
    linears = [m for m in model.modules() if isinstance(m, Linear) and m.recipe is not None]
    ranges = {id(m): len(m.quantized_weight()) for m in linears}
    places = {name: tensor.data_ptr() for name, tensor in live_tensors(model).items()}
    for is_trained in (False, True, True):
        nudge(model)
        calls.clear()
        report = refit(model, model, EmbeddedEngine(llm))
        assert report.num_quantized == sum(ranges.values())
        num_both = sum(n == 1 for n in ranges.values()) if is_trained else 0
        assert calls.count(("quantize_both", True)) == num_both
        assert calls.count(("quantize", True)) == len(calls) - num_both == report.num_quantized - num_both
        assert {name: tensor.data_ptr() for name, tensor in live_tensors(model).items()} == places
        for linear in linears:
            assert linear.weight is not None and linear.recipe is not None and linear.recipe.weight is not None
            for rows, codes in linear.forward_operands(linear.recipe):
                fresh = quantize(linear.weight.detach()[rows], linear.recipe.weight)
                assert torch.equal(codes.qdata.view(torch.uint8), fresh.qdata.view(torch.uint8))
                assert torch.equal(codes.scale, fresh.scale)
        calls.clear()
        for _ in range(2):  # micro-batches: the codes of one backward wait for the next
            sequence_logprobs(model, [[1, 2, 3]])[0].sum().backward()
        columns = sum(n for n in ranges.values() if not is_trained or n > 1)
        assert calls == [("quantize_columns", False)] * columns


@pytest.mark.parametrize("is_view", [False, True], ids=["exact", "a view in FP8"])
def test_no_code_is_stale_after_a_refit(policy: Policy, is_view: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """What CUDA graphs read by address, before any forward: the new weights' codes and scales, of the new version."""
    monkeypatch.setattr(WriteWatch, "look", lambda *_: None)  # which guards what a refit should not need
    model, tokenizer = policy
    model.set_numerics(Numerics() if is_view else EXACT)
    sampler = share_weights(model, EXACT) if is_view else model
    llm = LLM(sampler, tokenizer=tokenizer, max_num_seqs=4)
    for param in model.parameters():
        param.data.mul_(1.5)  # as a kernel writes: torch does not count it
    model.mark_weights_updated()
    refit(model, sampler, EmbeddedEngine(llm))
    held, num_seen = live_tensors(sampler), 0
    for name, linear in sampler.named_modules():
        if isinstance(linear, Linear) and linear.recipe is not None and f"{name}.codes.0" in held:
            ranges = operands.quantize_forward(linear.weight.detach(), linear.parts, linear.recipe.weight)
            for i, (_, fresh) in enumerate(ranges):
                assert torch.equal(held[f"{name}.codes.{i}"].view(torch.uint8), fresh.qdata.view(torch.uint8)), name
                assert torch.equal(held[f"{name}.scales.{i}"], fresh.scale), name
                num_seen += 1
    assert num_seen == len(codes_of(sampler)) > 0
    assert sampler.weight_version == llm.engine.weight_version == model.weight_version


def test_a_view_shares_parameters_and_not_numerics(policy: Policy) -> None:
    model, tokenizer = policy
    view = share_weights(model, Numerics(get_recipe("rowwise"), "fp8"))
    assert model.numerics == Numerics()
    assert view.numerics.recipe.name == "rowwise"
    assert all(a is b for a, b in zip(model.parameters(), view.parameters(), strict=True))
    assert all(a is not b for a, b in zip(model.modules(), view.modules(), strict=True))
    assert not codes_of(model)
    llm = LLM(view, tokenizer=tokenizer)
    nudge(model)
    assert view.weight_version != model.weight_version
    report = refit(model, view, EmbeddedEngine(llm))
    assert report.weight_version == model.weight_version == view.weight_version == llm.engine.weight_version
    assert report.num_quantized == len(codes_of(view))


def test_refit_refuses_what_would_keep_old_weights(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = policy
    stranger = Decoder(model.config, seed=1)
    with pytest.raises(ExactnessError, match="the engine samples from another model"):
        refit(model, model, EmbeddedEngine(LLM(stranger, tokenizer=tokenizer)))
    with pytest.raises(ExactnessError, match=r"embed_tokens\.weight is not the trainer's tensor"):
        refit(model, stranger, EmbeddedEngine(LLM(stranger, tokenizer=tokenizer)))
    llm = LLM(model, tokenizer=tokenizer)
    monkeypatch.setattr(llm, "refit", lambda *, is_checked: model.weight_version - is_checked)
    with pytest.raises(ExactnessError, match="the engine did not see the new weights"):
        refit(model, model, EmbeddedEngine(llm))


def test_evaluation_is_bf16_and_leaves_the_policy_alone(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int | None] = []
    generate = LLM.generate

    def spy(self: LLM, prompts: Any, params: SamplingParams) -> Any:
        asked.append(params.logprobs)
        return generate(self, prompts, params)

    monkeypatch.setattr(LLM, "generate", spy)
    model, tokenizer = policy
    model.set_numerics(EXACT)
    version = model.weight_version
    evaluator = Evaluator(model, tokenizer, TASK, max_tokens=4, max_num_seqs=8)
    prompts = TASK.prompts("heldout", 10, 0)
    assert 0.0 <= evaluator.mean_reward(prompts) <= 1.0
    assert evaluator.model.numerics == Numerics()
    assert (model.numerics, model.weight_version) == (EXACT, version)
    assert asked == [None]  # nobody reads them


def test_evaluation_sees_new_weights(policy: Policy) -> None:
    class Spelled(Arithmetic):
        def score(self, prompt: str, completion: str) -> float:
            return sum(map(ord, completion))

    model, tokenizer = policy
    evaluator = Evaluator(model, tokenizer, Spelled(num_digits=1), max_tokens=4, max_num_seqs=8)
    prompts = TASK.prompts("heldout", 10, 0)
    before = evaluator.mean_reward(prompts)
    assert evaluator.mean_reward(prompts) == before
    nudge(model, by=1.0)
    assert evaluator.mean_reward(prompts) != before


def test_a_weight_that_is_not_finite_is_refused_before_any_code_is_made(policy: Policy) -> None:
    model, tokenizer = policy
    model.set_numerics(EXACT)
    llm = LLM(model, tokenizer, num_kv_pages=16)
    before = [codes.clone() for codes in codes_of(model)]
    weight = model.layers[0].mlp.down_proj.weight
    with torch.no_grad():
        weight[1, 2] = torch.inf
    model.mark_weights_updated()
    held = [tensor for name, tensor in live_tensors(model).items() if ".codes" in name]
    with pytest.raises(NonFiniteError, match=r"layers\.0\.mlp\.down_proj\.weight"):
        refit(model, model, EmbeddedEngine(llm))
    assert all(torch.equal(a.view(torch.uint8), b.view(torch.uint8)) for a, b in zip(before, held, strict=True))


def test_weights_are_looked_through_once_for_inf_and_nan(policy: Policy, monkeypatch: pytest.MonkeyPatch) -> None:
    model, tokenizer = policy
    llm = LLM(model, tokenizer, num_kv_pages=16)
    passes: list[Decoder] = []
    for user in ("octavo.weights.refit", "octavo.serve.engine.engine"):
        monkeypatch.setattr(f"{user}.check_finite_weights", passes.append)
    nudge(model)
    refit(model, model, EmbeddedEngine(llm))
    assert passes == [model]
    nudge(model)
    llm.refit()
    assert passes == [model, model]
