"""Recipes of a user's own: one that can be made trains, and one whose product no GEMM computes cannot be made."""

import itertools

import pytest
import torch

import octavo
from octavo.errors import RecipeError
from octavo.numerics.recipe import DelayedConfig
from octavo.numerics.scaling import BLOCK_SIZES
from tests.assertions import assert_raises

KINDS = sorted(BLOCK_SIZES)


def scalings(*kinds):
    return dict(zip(("input", "weight", "grad_output"), map(octavo.Scaling.of_kind, kinds), strict=True))


def train(recipe):
    model = torch.nn.Sequential(torch.nn.Linear(128, 128), torch.nn.Linear(128, 128)).bfloat16()
    octavo.convert(model, recipe)
    model(torch.ones(16, 128, dtype=torch.bfloat16)).sum().backward()
    return model[0].weight.grad


@pytest.mark.parametrize("kind", KINDS)
def test_every_recipe_that_can_be_made_trains(kind):
    refused = 0
    for others in itertools.product(KINDS, repeat=2):
        try:
            recipe = octavo.Recipe("mine", **scalings(kind, *others))
        except RecipeError:
            refused += 1
            assert_raises(ValueError, "no GEMM takes", train, _unchecked(scalings(kind, *others)))
        else:
            assert torch.isfinite(train(recipe)).all()
    assert 0 < refused <= len(KINDS) ** 2


def _unchecked(fields):
    """A recipe that went past the check: what it would have come to."""
    recipe = octavo.get_recipe("tensorwise")
    for name, scaling in fields.items():
        object.__setattr__(recipe, name, scaling)
    return recipe


@pytest.mark.parametrize(
    ("gemm", "text", "kinds", "fields"),
    [
        ("output", "input in per_row x weight in block_128x128", ("per_row", "block_128x128", "per_row"), {}),
        ("grad_input", "grad_output in block_1x128 x weight in per_row", ("per_tensor", "per_row", "block_1x128"), {}),
        (
            "grad_weight",
            "grad_output in block_1x128 x input_for_grad_weight in per_row",
            ("block_1x128", "block_128x128", "block_1x128"),
            {"input_for_grad_weight": octavo.Scaling.per_row()},
        ),
    ],
)
def test_the_refusal_names_the_gemm_and_the_ways_out(gemm, text, kinds, fields):
    with pytest.raises(RecipeError, match=f"operands of {gemm}, {text}; use one of the pairs .* fake_quant=True"):
        octavo.Recipe("mine", **scalings(*kinds), **fields)
    octavo.Recipe("mine", **scalings(*kinds), **fields, fake_quant=True)
    if gemm == "grad_weight":
        octavo.Recipe("mine", **scalings(*kinds), **fields, high_precision_gemms=gemm)


def test_delayed_scaling_has_one_scale_a_tensor():
    rows = scalings("per_row", "per_row", "per_row")
    with pytest.raises(RecipeError, match="delayed scaling knows one scale a tensor, and input has per_row"):
        octavo.Recipe("mine", **rows, delayed=DelayedConfig())
