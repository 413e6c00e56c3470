"""The step of delayed scaling in place: scales from the amax history, and the history rolled, in one launch."""

import functools

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.formats import format_of
from octavo.numerics.recipe import Recipe
from octavo.ops._runtime.registry import register
from octavo.ops.quantize.delayed import reference

__all__ = ["update_delayed_"]


@functools.cache
def _kernels():  # type: ignore[no-untyped-def]
    from octavo.ops.quantize.delayed import triton

    return triton


def _cuda(history, quant_scale, forward_max, grad_max, margin, most_recent):  # type: ignore[no-untyped-def]
    kernels = _kernels()
    reads_all = history.shape[0] > kernels.MAX_HISTORY or env.force_reference()
    run = reference.update if reads_all else kernels.update
    run(history, quant_scale, forward_max, grad_max, margin, most_recent)


_op = register(
    "update_delayed_(Tensor(a!) history, Tensor(b!) quant_scale, float forward_max, float grad_max, int margin, "
    "bool most_recent) -> ()",
    reference=reference.update,
    fake=lambda *_: None,
    cuda=_cuda,
    has_gradient=False,
)


def update_delayed_(history: torch.Tensor, quant_scale: torch.Tensor, recipe: Recipe) -> None:
    """Replace a linear's scales by those of its history, then roll the history: see numerics.delayed.update_delayed.

    Args:
        history: [amax_history_len, n] fp32, contiguous, changed in place.
        quant_scale: [n] fp32, changed in place. Slot 1 of n is the gradient's, the others are of forward operands.
        recipe: with delayed scaling; callables of its own run as torch code.
    Raises:
        ShapeError: history and quant_scale disagree.
    Exactness: bitwise, CPU and GPU.
    """
    assert recipe.delayed is not None and recipe.input is not None, f"recipe {recipe.name!r} has no amax history"
    if history.dim() != 2 or quant_scale.shape != history.shape[1:]:
        raise ShapeError(
            f"quant_scale must have shape ({history.shape[-1]},), one a column of the history, got "
            f"{tuple(quant_scale.shape)} and history {tuple(history.shape)}"
        )
    delayed = recipe.delayed
    forward_max = format_of(recipe.input.dtype).max
    grad_max = format_of((recipe.grad_output or recipe.input).dtype).max
    if callable(delayed.amax_compute_algo) or delayed.scaling_factor_compute_algo is not None:
        reference.update_with(recipe, history, quant_scale, forward_max, grad_max)
        return
    most_recent = delayed.amax_compute_algo == "most_recent"
    _op(history, quant_scale, forward_max, grad_max, delayed.margin, most_recent)
