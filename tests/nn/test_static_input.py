"""Recipes with static input scales: which are allowed, what a linear makes of its scale, fused and unfused alike."""

import copy
import dataclasses

import pytest
import torch

import octavo
from octavo.errors import CheckpointError, RecipeError
from octavo.nn import Linear, RMSNorm
from octavo.nn.functional.norm_linear import norm_linear
from octavo.nn.functional.norm_mlp import norm_mlp
from octavo.numerics import Numerics, get_recipe
from tests.assertions import assert_raises

STATIC = get_recipe("tensorwise", static_input=True)


def make_linear(in_features: int = 64, out_features: int = 96, scale: float = 0.02) -> Linear:
    torch.manual_seed(0)
    linear = Linear(in_features, out_features)
    linear.set_recipe(STATIC)
    linear.set_input_scale(torch.tensor(scale))
    return linear


def test_the_recipe() -> None:
    assert STATIC.static_input and not get_recipe("tensorwise").static_input
    assert STATIC.is_row_local and Numerics(STATIC, exact=True).fingerprint() != Numerics(STATIC).fingerprint()
    assert_raises(RecipeError, "exact=True needs", Numerics, get_recipe("tensorwise"), exact=True)
    for name in ("rowwise", "delayed", "blockwise"):
        assert_raises(RecipeError, "no field 'static_input'", get_recipe, name, static_input=True)
        with pytest.raises(RecipeError, match="static_input goes with one scale"):
            dataclasses.replace(get_recipe(name), static_input=True)
    assert_raises(RecipeError, "goes with one scale", get_recipe, "tensorwise", static_input=True, fake_quant=True)
    assert_raises(RecipeError, "must be True or False", get_recipe, "tensorwise", static_input=1)


def test_a_row_is_its_own() -> None:
    linear = make_linear()
    linear.exact = True
    x = torch.randn(7, 64).bfloat16()
    x[3] *= 100  # clipped, which no other row sees
    with torch.no_grad():
        assert torch.equal(linear(x)[5], linear(x[5:6])[0])


def test_the_output_is_that_of_the_clipped_input() -> None:
    linear = make_linear(scale=0.001)
    x = torch.randn(7, 64).bfloat16()
    codes = (x.float() * (1 / torch.tensor(0.001))).clamp(-448, 448).to(torch.float8_e4m3fn)
    weight = linear.quantized_weight()[0].dequantize()
    assert (codes.float().abs() == 448).any()
    with torch.no_grad():
        torch.testing.assert_close(linear(x).float(), codes.float() * 0.001 @ weight.t(), rtol=2**-7, atol=1e-4)


@pytest.mark.parametrize("trains", [False, True])
def test_fused_modules_have_the_bits_of_the_linears(trains: bool) -> None:
    norm, fc1, fc2 = RMSNorm(64), make_linear(64, 256), make_linear(128, 64, scale=0.01)
    x, residual = torch.randn(5, 64).bfloat16(), torch.randn(5, 64).bfloat16()
    seen: list[str] = []
    with torch.set_grad_enabled(trains):
        fused, _ = norm_linear(x, residual, norm, fc1, fused=True)
        block, _ = norm_mlp(x, residual, norm, fc1, fc2, "swiglu", fused=True)
        for linear in (fc1, fc2):  # observers make them run one by one
            linear.observer = lambda role, *_: seen.append(role)
        assert torch.equal(fused, norm_linear(x, residual, norm, fc1, fused=True)[0])
        assert torch.equal(block, norm_mlp(x, residual, norm, fc1, fc2, "swiglu", fused=True)[0])
    assert seen.count("input") == 3


def test_training_under_a_static_scale() -> None:
    linear = make_linear()
    x = torch.randn(32, 64, dtype=torch.bfloat16, requires_grad=True)
    linear(x).sum().backward()
    assert x.grad is not None and linear.weight is not None and linear.weight.grad is not None
    expected = x.detach().float().sum(dim=0).expand(96, 64)
    assert (linear.weight.grad.float() - expected).norm() < 0.1 * expected.norm()


def test_the_scale_is_no_parameter_and_moves_with_the_module() -> None:
    linear = make_linear(scale=0.0123)
    assert set(linear.state_dict()) == {"weight"}
    assert linear.to(torch.float32).input_scale == torch.tensor(0.0123)
    assert copy.deepcopy(linear.to(torch.bfloat16)).input_scale == torch.tensor(0.0123)


def test_a_layer_without_a_scale_is_refused() -> None:
    linear, plain = Linear(64, 64), torch.nn.Linear(64, 64, dtype=torch.bfloat16)
    linear.set_recipe(STATIC)
    assert_raises(RecipeError, "no input_scale", linear, torch.randn(4, 64).bfloat16())
    with octavo.autocast(recipe=STATIC), pytest.raises(RecipeError, match=r"torch\.nn\.Linear has none"):
        plain(torch.randn(4, 64).bfloat16())
    for bad in (torch.ones(2), torch.zeros(1), torch.tensor(-1.0), torch.tensor(float("inf"))):
        assert_raises(CheckpointError, "one positive finite number", linear.set_input_scale, bad)
