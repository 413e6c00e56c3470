"""Delayed scaling's state machine: from a history of amaxes to the next quant_scale. Pure functions over plain tensors.

History [amax_history_len, n] fp32: row 0 stages the current step's amax, the other rows hold the past, newest last.
Source:
    TransformerEngine's delayed scaling (its fused update), stated in docs/numerics.md.
"""

import torch

from octavo.numerics.recipe import Recipe

_FP32_MAX = torch.finfo(torch.float32).max


def stage_amax(history: torch.Tensor, slot: int, amax: torch.Tensor) -> None:
    """Fold an observed amax into the staging row, in place.

    Args:
        history: [len, n] fp32.
        slot: which of the n operands.
        amax: fp32 scalar; NaN is dropped.
    """
    history[0, slot] = torch.fmax(history[0, slot], amax.reshape(()))  # fmax drops NaN


def reduce_history(history: torch.Tensor, recipe: Recipe) -> torch.Tensor:
    """The amax that the next scale is made from.

    Returns:
        [n] fp32; NaN rows are ignored, infinity is kept.
    """
    assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
    algo = recipe.delayed.amax_compute_algo
    if callable(algo):
        return algo(history)
    rows = history if algo == "max" else history[:1]
    return torch.where(rows.isnan(), 0.0, rows).amax(dim=0)  # [n]


def next_quant_scale(
    amax: torch.Tensor, quant_scale: torch.Tensor, fp8_max: torch.Tensor, recipe: Recipe
) -> torch.Tensor:
    """(fp8_max * 2**-margin) / amax, capped at the largest finite fp32; the old value where amax is zero or not finite.

    Args:
        amax: [n] fp32.
        quant_scale: [n] fp32.
        fp8_max: [n] fp32.
    Returns:
        [n] fp32.
    """
    assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
    if recipe.delayed.scaling_factor_compute_algo is not None:
        return recipe.delayed.scaling_factor_compute_algo(amax, quant_scale, fp8_max, recipe)
    fresh = (fp8_max * 2.0**-recipe.delayed.margin) / amax
    fresh = torch.where(torch.isinf(fresh), _FP32_MAX, fresh)
    return torch.where((amax > 0) & torch.isfinite(amax), fresh, quant_scale)


def update_delayed(
    history: torch.Tensor, quant_scale: torch.Tensor, fp8_max: torch.Tensor, recipe: Recipe
) -> tuple[torch.Tensor, torch.Tensor]:
    """One step of the machine: scales from the history, then the history rolls and row 0 is cleared.

    A step in which every staged amax is zero (a skipped module) changes nothing, history included.

    Args:
        history: [len, n] fp32.
        quant_scale: [n] fp32.
        fp8_max: [n] fp32.
    Returns:
        (history, quant_scale), new tensors of the same shapes.
    """
    skipped = (history[0] == 0).all()
    amax = reduce_history(history, recipe)
    scale = next_quant_scale(amax, quant_scale, fp8_max, recipe)
    rolled = torch.roll(history, shifts=-1, dims=0)  # the staged row becomes the newest
    rolled[0] = 0.0
    return torch.where(skipped, history, rolled), torch.where(skipped, quant_scale, scale)
