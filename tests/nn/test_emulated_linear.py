"""Linears under the emulated recipes multiply operands that were quantized along what their GEMM sums over."""

import pytest
import torch

from octavo import nn
from octavo.nn import emulated_linear
from octavo.numerics import get_recipe
from octavo.numerics.emulated import fake_quantize_mxfp8, fake_quantize_nvfp4
from octavo.numerics.recipe import EMULATED_RECIPES
from octavo.testing import assert_sqnr, generate

# Decoded operands are equal in bits, and fp32 sums of 72 to 224 products differ by their order alone.
SAME_OPERANDS_DB = 90


def operand(x: torch.Tensor, recipe: str, *, is_weight: bool = False) -> torch.Tensor:
    if recipe == "mxfp8":
        return fake_quantize_mxfp8(x)
    return fake_quantize_nvfp4(x, square_blocks=is_weight)


@pytest.mark.parametrize("recipe", EMULATED_RECIPES)
def test_the_three_gemms(recipe: str, device: torch.device) -> None:
    x, grad, weight = (generate("heavy_tailed", s, seed=i) for i, s in enumerate([(72, 160), (72, 224), (224, 160)]))
    layer = nn.Linear(160, 224, dtype=torch.float32, device=device)
    layer.recipe = get_recipe(recipe)
    with torch.no_grad():
        layer.weight.copy_(weight)
    source = x.to(device).requires_grad_()
    out = layer(source)
    out.backward(grad.to(device))
    rounded = weight.bfloat16()
    wide, tall = (operand(w.contiguous(), recipe, is_weight=True).float() for w in (rounded, rounded.t()))
    columns, x_columns = (operand(t.t().contiguous(), recipe) for t in (grad, x))
    expected = operand(x, recipe) @ wide.t(), operand(grad, recipe) @ tall.t(), columns @ x_columns.t()
    assert source.grad is not None and layer.weight.grad is not None
    for found, wanted in zip((out.detach(), source.grad, layer.weight.grad), expected, strict=True):
        assert_sqnr(found, wanted, SAME_OPERANDS_DB)


@pytest.mark.parametrize("recipe", EMULATED_RECIPES)
def test_no_operand_is_copied_to_turn_it_round(recipe: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quantized along the tokens is read where it lies, and so is what comes of it."""
    seen: list[torch.Tensor] = []
    for name in ("fake_quantize_mxfp8", "fake_quantize_nvfp4"):
        original = getattr(emulated_linear, name)
        spy = lambda x, *args, original=original, **options: seen.append(x) or original(x, *args, **options)  # noqa: E731
        monkeypatch.setattr(emulated_linear, name, spy)
    layer = nn.Linear(64, 48)
    layer.recipe = get_recipe(recipe)
    x = torch.randn(80, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(80, 48, dtype=torch.bfloat16)
    layer(x).backward(grad)
    assert [tuple(t.shape) for t in seen] == [(80, 64), (48, 64), (80, 48), (64, 48), (48, 80), (64, 80)]
    owners = [x, layer.weight, grad, layer.weight, grad, x]
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in owners]


def test_it_compiles_whole() -> None:
    layer = nn.Linear(64, 48)
    layer.recipe = get_recipe("mxfp8")
    x = torch.randn(80, 64, dtype=torch.bfloat16)
    torch.testing.assert_close(torch.compile(layer, fullgraph=True, backend="aot_eager")(x), layer(x))
