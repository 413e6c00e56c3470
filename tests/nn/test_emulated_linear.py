"""Linears under the emulated recipes multiply operands that were quantized along what their GEMM sums over."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from octavo import nn
from octavo.nn.functional import emulated
from octavo.numerics import get_recipe
from octavo.numerics.emulated import fake_quantize_mxfp8, fake_quantize_nvfp4
from octavo.numerics.hadamard import random_hadamard
from octavo.numerics.recipe import EMULATED_RECIPES, Recipe
from octavo.testing import assert_bitwise, assert_sqnr, generate
from tests.assertions import assert_all_sqnr

# Decoded operands are equal in bits, and fp32 sums of 72 to 224 products differ by their order alone.
SAME_OPERANDS_DB = 90


PLAIN_NVFP4 = {"stochastic_rounding": False, "random_hadamard": False, "square_weight_blocks": False}


def operand(x: torch.Tensor, recipe: str, *, is_weight: bool = False, seed: int | None = None) -> torch.Tensor:
    if recipe == "mxfp8":
        return fake_quantize_mxfp8(x)
    return fake_quantize_nvfp4(x, square_blocks=is_weight, stochastic_seed=seed)


def linear(recipe: Recipe, out_features: int = 32, in_features: int = 48) -> nn.Linear:
    layer = nn.Linear(in_features, out_features, dtype=torch.float32)
    layer.recipe = recipe
    with torch.no_grad():
        layer.weight.copy_(generate("normal", (out_features, in_features), seed=5))
    return layer


def backward(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """(dgrad, wgrad)."""
    source = x.clone().requires_grad_()
    layer.weight.grad = None
    layer(source).backward(grad)
    assert source.grad is not None and layer.weight.grad is not None
    return source.grad, layer.weight.grad


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
    sources = [random_hadamard(t) if recipe == "nvfp4" else t for t in (grad, x)]
    columns, x_columns = (operand(t.t().contiguous(), recipe, seed=s) for t, s in zip(sources, (1, None), strict=True))
    expected = operand(x, recipe) @ wide.t(), operand(grad, recipe, seed=0) @ tall.t(), columns @ x_columns.t()
    assert source.grad is not None and layer.weight.grad is not None
    assert_all_sqnr((out.detach(), source.grad, layer.weight.grad), expected, SAME_OPERANDS_DB)


@pytest.mark.parametrize("recipe", [get_recipe("mxfp8"), get_recipe("nvfp4", random_hadamard=False)])
def test_no_operand_is_copied_to_turn_it_round(recipe: Recipe, monkeypatch: pytest.MonkeyPatch) -> None:
    """What is quantized along the tokens is read where it lies, and so is what comes of it."""
    seen: list[torch.Tensor] = []
    for name in ("fake_quantize_mxfp8", "fake_quantize_nvfp4"):
        original = getattr(emulated, name)
        spy = lambda x, *args, original=original, **options: seen.append(x) or original(x, *args, **options)  # noqa: E731
        monkeypatch.setattr(emulated, name, spy)
    layer = nn.Linear(64, 48)
    layer.recipe = recipe
    x = torch.randn(80, 64, dtype=torch.bfloat16, requires_grad=True)
    grad = torch.randn(80, 48, dtype=torch.bfloat16)
    layer(x).backward(grad)
    assert [tuple(t.shape) for t in seen] == [(80, 64), (48, 64), (80, 48), (64, 48), (48, 80), (64, 80)]
    owners = [x, layer.weight, grad, layer.weight, grad, x]
    assert [t.data_ptr() for t in seen] == [t.data_ptr() for t in owners]


@pytest.mark.parametrize("tokens", [40, 48])
def test_switches_of_nvfp4(tokens: int) -> None:
    """With all three off every operand is rounded to nearest in blocks of 16 along what its GEMM sums over."""
    x, grad = generate("normal", (tokens, 48), seed=1), generate("normal", (tokens, 32), seed=2)
    layer = linear(get_recipe("nvfp4", **PLAIN_NVFP4))
    found = layer(x).detach(), *backward(layer, x, grad)
    weight = layer.weight.detach().bfloat16()
    wide, tall = (fake_quantize_nvfp4(w.contiguous()).float() for w in (weight, weight.t()))
    columns, x_columns = (fake_quantize_nvfp4(t.t().contiguous()) for t in (grad, x))
    expected = fake_quantize_nvfp4(x) @ wide.t(), fake_quantize_nvfp4(grad) @ tall.t(), columns @ x_columns.t()
    assert_all_sqnr(found, expected, SAME_OPERANDS_DB)
    # each switch changes what it should and nothing else: output, dgrad, wgrad
    changes = {"stochastic_rounding": (1, 2), "random_hadamard": (2,), "square_weight_blocks": (0, 1)}
    for name, changed in changes.items():
        layer.recipe = get_recipe("nvfp4", **{**PLAIN_NVFP4, name: True})
        other = layer(x).detach(), *backward(layer, x, grad)
        assert [i for i in range(3) if not torch.equal(other[i], found[i])] == list(changed), name


def test_scale_rounding_of_mxfp8() -> None:
    x, grad = generate("normal", (40, 48), seed=1), generate("normal", (40, 32), seed=2)
    for rounding in ("up", "down"):
        layer = linear(get_recipe("mxfp8", scale_rounding=rounding))
        expected = fake_quantize_mxfp8(x, scale_rounding=rounding)
        weight = fake_quantize_mxfp8(layer.weight.detach().bfloat16(), scale_rounding=rounding).float()
        assert_sqnr(layer(x).detach(), expected @ weight.t(), SAME_OPERANDS_DB)
        columns, x_columns = (fake_quantize_mxfp8(t.t().contiguous(), scale_rounding=rounding) for t in (grad, x))
        assert_sqnr(backward(layer, x, grad)[1], columns @ x_columns.t(), SAME_OPERANDS_DB)


def mean_error(layer: nn.Linear, x: torch.Tensor, grad: torch.Tensor, steps: int) -> list[float]:
    """How far the mean dgrad and wgrad of many steps are from those of an unrounded gradient, relative.

    The last token differs a little from step to step, as all data do in training; what it adds is left out.
    """
    sums, gradients = [torch.zeros(grad.shape[0], 48), torch.zeros(32, 48)], torch.zeros_like(grad)
    w = fake_quantize_nvfp4(layer.weight.detach().bfloat16(), square_blocks=True).float()
    x_columns = fake_quantize_nvfp4(random_hadamard(x).t().contiguous())  # [K, T]
    for step in range(steps):
        own = grad.clone()
        own[-1] *= 1 + step / (10 * steps)
        gradients += own
        for total, found in zip(sums, backward(layer, x, own), strict=True):
            total += found
    wanted = gradients @ w, random_hadamard(gradients).t() @ x_columns.t()
    errors = [(total - other)[: grad.shape[0] - 1] for total, other in zip(sums, wanted, strict=True)]
    return [float(e.norm() / other.norm()) for e, other in zip(errors, wanted, strict=True)]


def test_gradients_are_right_on_average() -> None:
    x, grad = generate("normal", (32, 48), seed=1), generate("normal", (32, 32), seed=2)
    grad[:, 0] *= 3  # each block's largest values stand apart: others do not saturate
    nearest = mean_error(linear(get_recipe("nvfp4", stochastic_rounding=False)), x, grad, 300)
    stochastic = mean_error(linear(get_recipe("nvfp4")), x, grad, 300)
    assert all(mean < 0.35 * biased for mean, biased in zip(stochastic, nearest, strict=True)), (stochastic, nearest)
    once = mean_error(linear(get_recipe("nvfp4")), x, grad, 1)
    assert all(single > biased for single, biased in zip(once, nearest, strict=True)), "noise is the price"


def test_recomputed_steps_have_the_same_bits() -> None:
    """Activation checkpointing, a second run and a resumed one: rounding depends on the gradient's values alone."""
    x, grad = generate("normal", (40, 48), seed=1), generate("normal", (40, 32), seed=2)
    first = backward(linear(get_recipe("nvfp4")), x, grad)
    layer = linear(get_recipe("nvfp4"))
    for step in range(3):  # whatever this layer has seen before
        backward(layer, x, generate("normal", (40, 32), seed=10 + step))
    torch.manual_seed(1234)
    source = x.clone().requires_grad_()
    layer.weight.grad = None
    checkpoint(layer, source, use_reentrant=False).backward(grad)
    for found, expected in zip((source.grad, layer.weight.grad), first, strict=True):
        assert found is not None
        assert_bitwise(found, expected)
    assert not layer.state_dict().keys() - {"weight"}, "no counter is kept"


@pytest.mark.parametrize("recipe", EMULATED_RECIPES)
def test_it_compiles_whole(recipe: str) -> None:
    x, grad = generate("normal", (40, 48), seed=1), generate("normal", (40, 32), seed=2)
    layer = linear(get_recipe(recipe))
    expected = layer(x), *backward(layer, x, grad)
    compiled = torch.compile(layer, fullgraph=True, backend="aot_eager")
    for found, wanted in zip((compiled(x), *backward(compiled, x, grad)), expected, strict=True):
        torch.testing.assert_close(found, wanted)
