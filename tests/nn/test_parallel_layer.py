"""GPT-J's layer: fused and unfused have the same bits, and both branches read one norm, quantized once."""

import pytest
import torch

from octavo.models import Decoder
from octavo.nn import PackedContext, set_fusion
from octavo.nn.functional import norm_linear, norm_parallel
from octavo.numerics import Numerics, Recipe, get_recipe
from octavo.ops.norm.norm_quantize import norm_quantize
from octavo.testing import assert_bitwise
from tests.recipes import FP8_RECIPES
from tests.serve.random_models import make_model

STATIC = get_recipe("tensorwise", static_input=True)
RECIPES = [*(get_recipe(name) for name in (*FP8_RECIPES, "bf16")), STATIC]
ALL_RECIPES = pytest.mark.parametrize("recipe", RECIPES, ids=lambda r: "static" if r.static_input else r.name)


def make(recipe: Recipe, device: torch.device, exact: bool = False) -> Decoder:
    # sizes that exact kernels take
    model = make_model("gptj", device=device, exact=False, vocab_size=128, intermediate_size=384, head_dim=64)
    model.set_numerics(Numerics(recipe, "bf16", exact))
    if recipe.static_input:
        for i, linear in enumerate(m for m in model.layers.modules() if hasattr(m, "set_input_scale")):
            linear.set_input_scale(torch.tensor(0.01 * (i + 1)))
    return model


def hidden(model: Decoder, tokens: int = 40) -> torch.Tensor:
    ids = torch.arange(tokens, device=model.device) % 96
    with torch.no_grad():
        return model(ids, PackedContext.from_lengths([tokens], model.numerics, model.device))


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each call of norm_quantize adds a residual."""
    found: list[bool] = []

    def counted(*args, **kwargs):  # type: ignore[no-untyped-def]
        found.append(kwargs["residual"] is not None)
        return norm_quantize(*args, **kwargs)

    monkeypatch.setattr(norm_linear, "norm_quantize", counted)
    return found


@ALL_RECIPES
def test_fused_equals_unfused(recipe: Recipe, device: torch.device, calls: list[bool]) -> None:
    model = make(recipe, device)
    fused = hidden(model)
    if recipe.static_input or recipe.has_state:  # each linear's input has a known scale of its own
        assert calls == [False, False, True, False]
    else:
        assert calls == ([False, True] if recipe.is_fp8 else [])
    calls.clear()
    set_fusion(model, False)
    assert_bitwise(fused, hidden(model))
    assert not calls


@pytest.mark.parametrize("tokens", [0, 1, 17])
def test_token_counts(tokens: int, device: torch.device) -> None:
    model = make(get_recipe("blockwise"), device)
    out = hidden(model, tokens)
    assert out.shape == (tokens, 128)
    assert out.isfinite().all()


def test_linears_of_other_recipes_are_left_to_their_modules(device: torch.device, calls: list[bool]) -> None:
    model = make(get_recipe("blockwise"), device)
    for layer in model.layers:
        layer.mlp.fc_out.set_recipe(get_recipe("rowwise"))
    fused = hidden(model)
    assert not calls
    set_fusion(model, False)
    assert_bitwise(fused, hidden(model))


@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_exact_on_a_cpu_keeps_the_order_free_norm(recipe: str, calls: list[bool]) -> None:
    model = make(get_recipe(recipe), torch.device("cpu"), exact=True)
    hidden(model)
    assert not calls
    assert not norm_parallel.can_infer_parallel(
        model.layers[0].input_layernorm, model.layers[0].self_attn.qkv_proj, *model.layers[0].mlp.children()
    )


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["rowwise", "blockwise"])
def test_exact_on_a_gpu_takes_the_fused_path(recipe: str, calls: list[bool]) -> None:
    """With the trainer's bits, gradients on."""
    model = make(get_recipe(recipe), torch.device("cuda"), exact=True)
    fused = hidden(model)
    assert calls == [False, True]
    ids = torch.arange(40, device=model.device) % 96
    trained = model(ids, PackedContext.from_lengths([40], model.numerics, model.device))
    assert trained.requires_grad
    assert_bitwise(trained.detach(), fused)
    set_fusion(model, False)
    assert_bitwise(fused, hidden(model))


@pytest.mark.gpu
@pytest.mark.parametrize("kind", ["input_layernorm", "norm"])
def test_exact_layer_norm_on_a_gpu_is_the_kernel_forward_and_backward(kind: str) -> None:
    model = make(get_recipe("bf16"), torch.device("cuda"))
    norm = model.norm if kind == "norm" else model.layers[0].input_layernorm
    x, grad = (torch.randn(70, 128, device="cuda").bfloat16() for _ in range(2))
    found = []
    for norm.exact in (False, True):
        leaf = x.clone().requires_grad_()
        norm.zero_grad()
        y = norm(leaf)
        y.backward(grad)
        found.append((y.detach(), leaf.grad, norm.weight.grad, norm.bias.grad))
    for plain, exact in zip(*found, strict=True):
        assert_bitwise(exact, plain)
    assert_bitwise(norm(x[3:5]).detach(), found[0][0][3:5])
