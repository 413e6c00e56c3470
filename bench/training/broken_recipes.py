"""Recipes with one mistake each, made on purpose, so that the convergence gate is seen to fail.

E5M2_FORWARD quantizes inputs and weights to two mantissa bits instead of three. WRONG_AXIS takes the scales of one GEMM
over the wrong axis: grad_weight sums over tokens, but its codes of grad_output are those that grad_input uses, with a
scale a token; a sum over tokens can apply no such scale, so their mean is applied after it. Both run, and both learn.
"""

import contextlib
import dataclasses
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch

from octavo.nn import linear_function
from octavo.numerics import QuantizedTensor, Recipe, get_recipe

E5M2_FORWARD, WRONG_AXIS = "e5m2-forward", "wrong-axis"
# What each is a broken version of.
ORIGINALS: dict[str, dict[str, Any]] = {
    E5M2_FORWARD: {"recipe": "blockwise", "fake_quant": True},  # Hopper multiplies no two E5M2 operands
    WRONG_AXIS: {"recipe": "rowwise"},
}
_USERS = ("linear_function", "norm_linear", "norm_mlp", "grouped_linear")  # of quantize_grad_output


@contextlib.contextmanager
def broken(name: str) -> Iterator[None]:
    """Make the mistake while the context is open, in this process; a name of no such recipe changes nothing."""
    with contextlib.ExitStack() as stack:
        if name == E5M2_FORWARD:
            stack.enter_context(mock.patch("octavo.train.config.get_recipe", _e5m2_forward))
        if name == WRONG_AXIS:
            for module in _USERS:
                stack.enter_context(mock.patch(f"octavo.nn.{module}.quantize_grad_output", _wrong_axis))
        yield


def _e5m2_forward(name: str, **fields: Any) -> Recipe:
    recipe = get_recipe(name, **fields)
    if recipe.input is None or recipe.weight is None:
        return recipe
    forward = [dataclasses.replace(scaling, dtype=torch.float8_e5m2) for scaling in (recipe.input, recipe.weight)]
    return dataclasses.replace(recipe, input=forward[0], weight=forward[1], input_for_grad_weight=None)


_RIGHT = linear_function.quantize_grad_output


def _wrong_axis(
    grad: torch.Tensor, layer: Any, recipe: Recipe, *, columns: bool, observe: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    rows, right = _RIGHT(grad, layer, recipe, columns=columns, observe=observe)
    if right is None:
        return rows, None
    codes = rows.qdata.view(torch.uint8).t().contiguous().view(rows.qdata.dtype)  # [N, T]
    return rows, QuantizedTensor(codes, rows.scale.mean().expand_as(right.scale).contiguous(), right.scaling)
