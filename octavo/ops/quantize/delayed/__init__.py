"""The step of delayed scaling in place: scales from the amax history, and the history rolled, in one launch."""

import functools
from collections.abc import Callable, Sequence
from typing import Any

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.formats import format_of
from octavo.numerics.recipe import Recipe
from octavo.ops._runtime.registry import bypassing, define
from octavo.ops.quantize.delayed import reference

__all__ = ["Histories", "update_delayed_"]


@functools.cache
def _kernels():  # type: ignore[no-untyped-def]
    from octavo.ops.quantize.delayed import triton

    return triton


def _cuda(history, quant_scale, forward_max, grad_max, margin, most_recent):  # type: ignore[no-untyped-def]
    kernels = _kernels()
    reads_all = history.shape[0] > kernels.MAX_HISTORY or env.force_reference()
    run = reference.update if reads_all else kernels.update
    run(history, quant_scale, forward_max, grad_max, margin, most_recent)


def _once(run: Callable[..., None]) -> Callable[..., None]:
    """run, but nothing where compiled code repeats a forward in its backward: the state is a step further by then."""

    def first(*args: Any) -> None:
        node = torch._C._current_autograd_node()
        if node is None or node.name() != "CompiledFunctionBackward":
            run(*args)

    return first


_op = bypassing(
    "update_delayed_",
    define(
        "update_delayed_(Tensor(a!) history, Tensor(b!) quant_scale, float forward_max, float grad_max, int margin, "
        "bool most_recent) -> ()",
        reference=_once(reference.update),
        fake=lambda *_: None,
        cuda=_once(_cuda),
    ),
    reference=reference.update,
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
    if _is_own(recipe):
        reference.update_with(recipe, history, quant_scale, *_limits(recipe))
        return
    _op(history, quant_scale, *_limits(recipe), recipe.delayed.margin, _is_most_recent(recipe))


class Histories:
    """The state of several linears with one recipe on one device, for a step of all of them in one launch.

    Args:
        recipe: with delayed scaling.
        histories: as update_delayed_'s.
        quant_scales: as update_delayed_'s.
        staged: [n] fp32 for each, which its step takes for row 0 of its history; it may be that row.
    """

    def __init__(
        self,
        recipe: Recipe,
        histories: Sequence[torch.Tensor],
        quant_scales: Sequence[torch.Tensor],
        staged: Sequence[torch.Tensor],
    ) -> None:
        self._recipe = recipe
        self._each = list(zip(histories, quant_scales, staged, strict=True))
        self._table: Any = None

    def update_(self) -> None:
        """The step of each, in place; bits as update_delayed_'s."""
        recipe, longest = self._recipe, max(len(history) for history, *_ in self._each)
        assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
        is_one = self._each[0][0].is_cuda and not _is_own(recipe) and not env.force_reference()
        if is_one and longest <= _kernels().MAX_HISTORY:
            self._table = self._table or _kernels().Table(*zip(*self._each, strict=True))
            _kernels().update_many(self._table, *_limits(recipe), recipe.delayed.margin, _is_most_recent(recipe))
            return
        for history, quant_scale, staged in self._each:
            if staged.data_ptr() != history.data_ptr():
                history[0].copy_(staged)
            update_delayed_(history, quant_scale, recipe)


def _is_own(recipe: Recipe) -> bool:
    """Whether a rule is a callable of the user's."""
    assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
    return callable(recipe.delayed.amax_compute_algo) or recipe.delayed.scaling_factor_compute_algo is not None


def _is_most_recent(recipe: Recipe) -> bool:
    return recipe.delayed is not None and recipe.delayed.amax_compute_algo == "most_recent"


def _limits(recipe: Recipe) -> tuple[float, float]:
    """The largest value of a forward operand's format and of the gradient's."""
    assert recipe.input is not None, f"recipe {recipe.name!r} has no amax history"
    return format_of(recipe.input.dtype).max, format_of((recipe.grad_output or recipe.input).dtype).max
