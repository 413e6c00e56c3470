"""Which steps' attention hands codes to the projection after it; the bits are the same either way."""

from typing import Any

import pytest
import torch

from octavo import LLM, SamplingParams, autocast
from octavo.errors import RecipeError
from octavo.models import Decoder
from octavo.nn import plan_fusion
from octavo.ops.attention import allocate_kv_layer
from octavo.serve.engine import paged_context
from octavo.serve.engine.paged_context import PagedContext
from tests.serve.random_models import make_model, max_gap, trainer_logprobs

PROMPTS, NUM_TOKENS = [[5, 6, 7, 8], [9, 10]], 4
RECIPES = [("blockwise", True), ("rowwise", True), ("tensorwise", True)]
RECIPES += [("delayed", False), ("mxfp8", False), ("bf16", False)]


def sample(model: Decoder, monkeypatch: pytest.MonkeyPatch) -> tuple[list[Any], dict[tuple[int, bool], int]]:
    """Outputs, and how often attention ran: (new tokens of the longest sequence, whether it was to leave codes)."""
    calls: dict[tuple[int, bool], int] = {}
    attend = paged_context.attention_paged

    def watched(*args: Any, max_query_len: int, out_scaling: Any, **options: Any) -> Any:
        key = max_query_len, out_scaling is not None
        calls[key] = calls.get(key, 0) + 1
        return attend(*args, max_query_len=max_query_len, out_scaling=out_scaling, **options)

    monkeypatch.setattr(paged_context, "attention_paged", watched)
    params = SamplingParams(max_tokens=NUM_TOKENS, ignore_eos=True, logprobs=0, seed=1)
    outputs = LLM(model, async_scheduling=False).generate(PROMPTS, params)
    monkeypatch.setattr(paged_context, "attention_paged", attend)
    return outputs, calls


@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
@pytest.mark.parametrize(("recipe", "takes_codes"), RECIPES)
def test_single_tokens_leave_codes(
    family: str, recipe: str, takes_codes: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if family == "qwen3_moe" and recipe == "mxfp8":
        pytest.skip("experts have no emulated recipes")
    model = make_model(family, recipe, exact=False)
    _, calls = sample(model, monkeypatch)
    decoded = {key: count for key, count in calls.items() if key[0] == 1}
    assert decoded == {(1, takes_codes): model.config.num_layers * (NUM_TOKENS - 1)}
    assert not any(coded for longest, coded in calls if longest > 1)


@pytest.mark.parametrize("recipe", ["blockwise", "rowwise"])
def test_exact_mode_stays_exact(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model("llama", recipe, exact=True)
    outputs, calls = sample(model, monkeypatch)
    assert calls[1, True] and max_gap(outputs, trainer_logprobs(model, outputs, 1.0)) == 0.0


@pytest.mark.parametrize("how", ["observer", "hook", "forward"])
def test_who_watches_the_projection_sees_its_input(how: str, monkeypatch: pytest.MonkeyPatch) -> None:
    model = make_model(exact=False)
    o_proj, seen = model.layers[0].self_attn.o_proj, []
    if how == "observer":
        o_proj.observer = lambda role, x, _: seen.append(x.dtype) if role == "input" else None
    elif how == "hook":
        o_proj.register_forward_hook(lambda _module, inputs, _output: seen.append(inputs[0].dtype))
    else:
        forward = o_proj.forward
        o_proj.forward = lambda x: (seen.append(x.dtype), forward(x))[1]
    plan_fusion(model)
    _, calls = sample(model, monkeypatch)
    assert calls[1, True] == calls[1, False] == NUM_TOKENS - 1  # of the other layer, and of this one
    assert set(seen) == {torch.bfloat16} and len(seen) >= NUM_TOKENS


def test_an_exact_projection_refuses_another_recipe() -> None:
    model = make_model(exact=True, kv_cache_dtype="bf16")
    o_proj = model.layers[0].self_attn.o_proj
    o_proj.recipe = None
    layers = [allocate_kv_layer(2, 2, 32, "bf16", torch.bfloat16) for _ in model.layers]
    context = PagedContext.build([(0, 1)], [[1]], layers, True, torch.device("cpu"))
    with torch.no_grad(), autocast(recipe="rowwise"), pytest.raises(RecipeError, match="exact"):
        model(torch.tensor([5]), context)
