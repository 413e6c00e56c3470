"""When the scales of delayed scaling change under update_every="step": once an optimizer step, of all linears together.

At the end of the step every rank is at the same place, whatever ran in its forwards, so one collective is safe there.
"""

import weakref
from typing import Any

import torch
from torch import nn

from octavo.distributed.amax import check_alike, has_ranks, reduce_rows
from octavo.nn.delayed import join_model
from octavo.nn.linear import Linear
from octavo.nn.weights.version import ModelState
from octavo.numerics.recipe import Recipe

_PLACE = "_octavo_scale_updates"
_agreed: weakref.WeakKeyDictionary[nn.Module, set[tuple[Any, bytes]]] = weakref.WeakKeyDictionary()


class ScaleUpdates(ModelState):
    """Updates a model's scales after each step of an optimizer that holds any of its parameters.

    It lies in the model's __dict__; a copy of the model, or one that was pickled, has one of its own.
    """

    def note_step(self, optimizer: torch.optim.Optimizer) -> None:
        """An optimizer has stepped. One that does so inside the backward (of a parameter, say) ends no step."""
        model = self._model()
        if model is not None and torch._C._current_graph_task_id() == -1 and self._is_of(optimizer):
            update_scales(model)

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["model"] is not None:
            super().__init__(state["model"])


def follow_steps(model: nn.Module) -> None:
    """Let a model's scales follow its optimizers' steps, and its linears be known to each other: what convert does."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    stateful = [linear for linear in linears if linear.recipe is not None and linear.recipe.has_state]
    if stateful:
        join_model(stateful)
    for module in model.modules():
        vars(module).pop(_PLACE, None)  # of a part that was converted by itself, which this one now updates
    if any(linear.recipe.updates_at_steps for linear in stateful if linear.recipe is not None):
        vars(model)[_PLACE] = ScaleUpdates(model)


@torch.no_grad()
def update_scales(model: nn.Module) -> None:
    """Make delayed scaling's next scales from what was staged since they were last made: the end of a training step.

    For linears whose recipe has update_every="step". torch's optimizers need no call: it follows the step of each that
    holds a parameter of the model that octavo.convert was given. Others do (an engine's own optimizer, a step inside
    the backward). A second call in a row changes nothing. Where torch.distributed runs, all ranks of a group call it.

    Args:
        model: any module with octavo's linears.
    Raises:
        ShapeError: ranks of a group have different linears.
    """
    linears = [
        (name, module, module.recipe)
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module.recipe is not None and module.recipe.updates_at_steps
    ]
    if has_ranks():
        _reduce(linears, _agreed.setdefault(model, set()))
    for _, linear, recipe in linears:
        linear.update_scales(recipe)


def _reduce(linears: list[tuple[str, Linear, Recipe]], agreed: set[tuple[Any, bytes]]) -> None:
    """One collective a group and device, which carries the linears that did not run as well."""
    rows: dict[tuple[Any, torch.device], dict[str, torch.Tensor]] = {}
    for name, linear, recipe in linears:
        assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
        if recipe.delayed.reduce_amax:
            row = linear.delayed_state(recipe).history[0]
            rows.setdefault((linear.source.group, row.device), {})[name] = row
    for (group, device), named in rows.items():
        check_alike([f"{name} {len(row)}" for name, row in named.items()], device, group, agreed)
        reduce_rows(list(named.values()), group)
