"""When the scales of delayed scaling change under update_every="step": once an optimizer step, of all linears together.

At the end of the step every rank is at the same place, whatever ran in its forwards, so one collective is safe there.
"""

import itertools
import weakref
from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from octavo.distributed.amax import check_alike, has_ranks, reduce_largest
from octavo.nn.delayed import join_model
from octavo.nn.linear import Linear
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.version import ModelState
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize.delayed import Histories

_PLACE = "_octavo_scale_updates"
Stateful = tuple[str, Linear, Recipe, DelayedState]


class ScaleUpdates(ModelState):
    """Updates a model's scales after each step of an optimizer that holds any of its parameters.

    It lies in the model's __dict__; a copy of the model, or one that was pickled, has one of its own.
    """

    @classmethod
    def end_step(cls, stepped: "Sequence[ModelState]") -> None:
        """Models that one step was of, all together. One inside the backward (of a parameter, say) ends no step."""
        if torch._C._current_graph_task_id() == -1:
            _update([model for state in stepped if (model := state._model()) is not None])

    def __getstate__(self) -> dict[str, Any]:
        return {"model": self._model()}

    def __setstate__(self, state: dict[str, Any]) -> None:
        if state["model"] is not None:
            super().__init__(state["model"])


def follow_steps(model: nn.Module) -> None:
    """Let a model's scales follow its optimizers' steps, and its linears be known to each other: what convert does."""
    linears = [module for module in model.modules() if isinstance(module, Linear)]
    join_model(linears)  # all: set_recipe may give one of them state later
    for module in model.modules():
        vars(module).pop(_PLACE, None)  # of a part that was converted by itself, which this one now updates
    if any(linear.recipe is not None and linear.recipe.updates_at_steps for linear in linears):
        vars(model)[_PLACE] = ScaleUpdates(model)


def update_scales(model: nn.Module) -> None:
    """Make delayed scaling's next scales from what was staged since they were last made: the end of a training step.

    For linears whose recipe has update_every="step". torch's optimizers need no call: it follows the step of each that
    holds a parameter of the model that octavo.convert was given. Others do (an engine's own optimizer, a step inside
    the backward). A second call in a row changes nothing. Where torch.distributed runs, all ranks of a group call it.

    Args:
        model: any module with octavo's linears.
    Raises:
        ShapeError: ranks of a group have different linears, at the first call; later ones expect the same linears.
    """
    _update([model])


class _Plan:
    """Linears of some models, where their staged amaxes meet those of other ranks, and how they are updated.

    Args:
        linears: with update_every="step", in an order that all ranks have.
        key: what it was made for.
        agreed: digests of linears that were found alike on all ranks; grows.
    """

    def __init__(self, linears: Sequence[Stateful], key: object, agreed: set[tuple[Any, bytes]]) -> None:
        self.key, self.agreed = key, agreed
        self._reduced: list[tuple[list[torch.Tensor], torch.Tensor, Any]] = []
        staged = {id(state): state.history[0] for *_, state in linears}
        for (group, device), of_group in _grouped(linears, _group_of).items():
            names = [f"{name} {state.history.shape[1]}" for name, _, _, state in of_group]
            check_alike(names, device, group, agreed)
            rows = [staged[id(state)] for *_, state in of_group]
            flat = torch.cat(rows)
            self._reduced.append((rows, flat, group))
            pieces = flat.split([len(row) for row in rows])
            staged |= {id(state): piece for (*_, state), piece in zip(of_group, pieces, strict=True)}
        self._histories = [
            Histories(
                recipe,
                [state.history for *_, state in alike],
                [state.quant_scale for *_, state in alike],
                [staged[id(state)] for *_, state in alike],
            )
            for (recipe, _), alike in _grouped(linears, lambda one: (one[2], one[3].history.device)).items()
        ]

    def run(self) -> None:
        """One collective a group and device, which carries the linears that did not run as well; then new scales."""
        for rows, flat, group in self._reduced:
            torch.cat(rows, out=flat)
            reduce_largest(flat, group)
        for histories in self._histories:
            histories.update_()


_plans: weakref.WeakKeyDictionary[nn.Module, _Plan] = weakref.WeakKeyDictionary()  # by the first of the models


@torch.inference_mode(False)  # what is kept for later steps
@torch.no_grad()
def _update(models: Sequence[nn.Module]) -> None:
    named = itertools.chain.from_iterable(model.named_modules() for model in models)
    linears = [
        (name, module, module.recipe, module.delayed_state(module.recipe))
        for name, module in named
        if isinstance(module, Linear) and module.recipe is not None and module.recipe.updates_at_steps
    ]
    if not linears:
        return
    key = (has_ranks(), [_key_of(*one) for one in linears])
    plan = _plans.get(models[0])
    if plan is None or plan.key != key:
        plan = _plans[models[0]] = _Plan(linears, key, set() if plan is None else plan.agreed)
    plan.run()
    for _, linear, recipe, state in linears:
        linear.note_new_scales(state, recipe)


def _key_of(name: str, linear: Linear, recipe: Recipe, state: DelayedState) -> tuple[Any, ...]:
    places = state.history.data_ptr(), state.history.shape, state.quant_scale.data_ptr()
    return name, linear.source.group, recipe, *places


def _group_of(one: Stateful) -> Any:
    """(group, device) of the ranks that agree on a linear's amaxes; None where none do."""
    _, linear, recipe, state = one
    assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
    return (linear.source.group, state.history.device) if has_ranks() and recipe.delayed.reduce_amax else None


def _grouped(linears: Sequence[Stateful], key: Any) -> dict[Any, list[Stateful]]:
    """In their order; those whose key is None are left out."""
    found: dict[Any, list[Stateful]] = {}
    for one in linears:
        if (group := key(one)) is not None:
            found.setdefault(group, []).append(one)
    return found
