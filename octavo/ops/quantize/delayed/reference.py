"""Ground truth of the in-place step of delayed scaling: numerics.delayed.update_delayed, written back."""

import torch

from octavo.numerics.delayed import update_delayed
from octavo.numerics.recipe import Recipe, get_recipe

GRAD_SLOT = 1


def update(
    history: torch.Tensor,
    quant_scale: torch.Tensor,
    forward_max: float,
    grad_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    """The step with one of the built-in rules; see octavo.ops.quantize.delayed.update_delayed_."""
    recipe = get_recipe("delayed", margin=margin, amax_compute_algo="most_recent" if most_recent else "max")
    update_with(recipe, history, quant_scale, forward_max, grad_max)


def update_with(
    recipe: Recipe, history: torch.Tensor, quant_scale: torch.Tensor, forward_max: float, grad_max: float
) -> None:
    """The step with a recipe's own rules."""
    fp8_max = torch.full_like(quant_scale, forward_max)
    fp8_max[GRAD_SLOT] = grad_max
    rolled, scale = update_delayed(history, quant_scale, fp8_max, recipe)
    history.copy_(rolled)
    quant_scale.copy_(scale)
