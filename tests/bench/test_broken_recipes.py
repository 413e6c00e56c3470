"""The mistakes that the convergence gate must see: they happen, in the process alone where they are made."""

import dataclasses

import pytest
import torch

from bench.training.broken_recipes import E5M2_FORWARD, WRONG_AXIS, broken
from bench.training.convergence import BROKEN, RECIPES, VARIANTS, Comparison, find_complaints
from octavo.nn import Linear
from octavo.numerics import get_recipe
from octavo.train.config import PrecisionSection


def gradients(name: str) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(output, input gradient, weight gradient) of one linear."""
    generator = torch.Generator().manual_seed(0)
    linear = Linear(256, 128, bias=False, dtype=torch.bfloat16)
    x = torch.randn(256, 256, generator=generator).bfloat16().requires_grad_()
    size = torch.logspace(-2, 1, 256)[:, None]  # tokens whose gradients differ
    with torch.no_grad():
        linear.weight.copy_(torch.randn(128, 256, generator=generator) / 16)
    with broken(name):
        linear.recipe = PrecisionSection(**VARIANTS[name]).make_recipe()
        out = linear(x)
        out.backward((torch.randn(256, 128, generator=generator) * size).bfloat16())
    assert x.grad is not None and linear.weight.grad is not None
    return out.detach(), x.grad, linear.weight.grad


def test_the_wrong_axis_is_that_of_one_gemm() -> None:
    right, wrong = gradients("rowwise"), gradients(WRONG_AXIS)
    assert torch.equal(right[0], wrong[0]) and torch.equal(right[1], wrong[1])
    assert 0.3 < (right[2] - wrong[2]).float().norm() / right[2].float().norm() < 2.0


def test_e5m2_is_the_forwards() -> None:
    exact = gradients("bf16")[0].float()
    errors = [(gradients(name)[0].float() - exact).norm() / exact.norm() for name in ("blockwise", E5M2_FORWARD)]
    assert 1.5 * errors[0] < errors[1] < 3 * errors[0]
    assert get_recipe("blockwise").input == PrecisionSection(recipe="blockwise").make_recipe().input  # undone


@pytest.mark.parametrize("variant", [BROKEN, E5M2_FORWARD, WRONG_AXIS])
def test_the_gate_complains_of_a_mistake_that_it_does_not_see(variant: str) -> None:
    seen = Comparison(variant, (0.26,), 3.0, 1.0)
    assert find_complaints([seen]) == []
    assert "the gate is blind" in "".join(find_complaints([dataclasses.replace(seen, differences=(0.25,))]))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_gate_is_a_quarter_of_a_percent(recipe: str) -> None:
    found = Comparison(recipe, (-0.26,), 3.0, 1.0)
    assert "differs from bf16 by -0.26 %" in "".join(find_complaints([found]))
    assert find_complaints([dataclasses.replace(found, differences=(-0.25,))]) == []
