"""FusedExperts: what convert makes of transformers' fused experts, whose weights are 3-D parameters.

The module stays what it was, with its parameters, keys and gate; its forward runs two grouped GEMMs under a recipe. No
framework is imported: a module's own attributes are read.
"""

from collections.abc import Callable
from typing import Any

import torch
from torch import nn

from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.grouped import GroupedLinearFunction
from octavo.nn.grouped_linear import row_alignment
from octavo.nn.moe import CombineFunction, DispatchFunction
from octavo.nn.weights.experts import ExpertShapes, ExpertWeight
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.recipe import Recipe
from octavo.ops.moe import moe_routing

_PLACE = "_octavo_experts"  # parameter's name -> _Experts


_classes: dict[type[nn.Module], type[nn.Module]] = {}  # a framework's class -> the one that its modules get


class _Experts:
    """One 3-D parameter's recipe, and the owner of its codes."""

    def __init__(self, source: ExpertWeight) -> None:
        self.source = source
        self.recipe: Recipe | None = None


class FusedExperts(nn.Module):
    """The class that a module of experts gets beside its own; see set_experts_recipe."""

    # Attributes that transformers' decorator of experts gives them.
    has_gate: bool
    has_bias: bool
    is_transposed: bool
    num_experts: int
    _apply_gate: Callable[[torch.Tensor], torch.Tensor]
    act_fn: Callable[[torch.Tensor], torch.Tensor]

    def forward(self, hidden_states: torch.Tensor, *routed: torch.Tensor) -> torch.Tensor:
        """hidden_states [T, H], experts of each token [T, S] int64 and their weights [T, S] -> [T, H]."""
        names = up_name(self), "down_proj"
        held = [vars(self)[_PLACE][name] for name in names]
        recipes = [effective_recipe(experts.recipe) for experts in held]
        if not any(recipe.is_fp8 for recipe in recipes):
            return super().forward(hidden_states, *routed)  # type: ignore[no-any-return, misc]
        experts, weights = routed
        device, is_training = hidden_states.device, torch.is_grad_enabled()
        rows = max(row_alignment(recipe, device, training=is_training) for recipe in recipes)
        blank = torch.zeros(len(hidden_states), self.num_experts, device=device)
        routing = moe_routing(blank, experts.shape[1], normalize=False, alignment=rows, experts=experts.long())
        routing = routing._replace(weights=weights.detach().float())
        is_used = (routing.slots < experts.numel())[:, None]  # others only pad
        x = DispatchFunction.apply(hidden_states, routing)
        for name, owner, recipe in zip(names, held, recipes, strict=True):
            plan = LinearPlan(recipe, stages=self.training)
            x = GroupedLinearFunction.apply(
                x, stacked_weight(self, name), routing.offsets, owner.source, plan, is_training
            )  # [R, N]
            if self.has_bias:
                of_row = torch.searchsorted(routing.offsets, torch.arange(len(x), device=device), right=True)
                x = x + getattr(self, f"{name}_bias")[of_row.clamp_max(self.num_experts - 1)].to(x.dtype)
            if name != "down_proj":
                x = torch.where(is_used, x, 0.0)
                act = self._apply_gate if self.has_gate else self.act_fn
                x = torch.where(is_used, act(x), 0.0)
        return CombineFunction.apply(x, weights.float(), routing)

    def __reduce_ex__(self, protocol: Any) -> tuple[Any, ...]:
        return _revive, (type(self).__bases__[1],), vars(self)


def why_not_experts(module: nn.Module, recipe: Recipe) -> str:
    """Why a module with 3-D weights stays in high precision; "" where set_experts_recipe takes it."""
    layer = type(module).__name__
    known = all(hasattr(module, name) for name in ("has_gate", "has_bias", "is_transposed", "is_concatenated"))
    if not known or "down_proj" not in module._parameters or up_name(module) not in module._parameters:
        return f"a weight of {layer}, which convert does not take"
    if getattr(module, "has_post_expert_norm", False) or getattr(module, "_is_expert_parallel", False):
        return f"{layer} has norms between its experts and their sum, or holds some of the experts alone"
    if recipe.has_state:
        return f"fused experts hold no state, which recipe {recipe.name!r} has"
    return f"fused experts do not run under recipe {recipe.name!r}" if recipe.is_emulated else ""


def set_experts_recipe(module: nn.Module, name: str, recipe: Recipe | None) -> None:
    """Give one 3-D parameter of a module of experts, changed in place, a recipe, or None for high precision.

    Args:
        module: one that why_not_experts has nothing against, or that was converted before.
        name: of the parameter.
    """
    if not isinstance(module, FusedExperts):
        if recipe is None:
            return
        vars(module)[_PLACE] = {each: _Experts(_make_source(module, each)) for each in (up_name(module), "down_proj")}
        module.__class__ = _class_of(type(module))
    vars(module)[_PLACE][name].recipe = recipe


def experts_recipes(model: nn.Module) -> dict[tuple[nn.Module, str], Recipe]:
    """The recipes of a model's fused experts in FP8, by module and parameter."""
    return {
        (module, name): experts.recipe
        for module in model.modules()
        if isinstance(module, FusedExperts)
        for name, experts in vars(module)[_PLACE].items()
        if experts.recipe is not None
    }


def up_name(module: nn.Module) -> str:
    """The parameter that the hidden states are multiplied by."""
    return "gate_up_proj" if getattr(module, "has_gate", True) else "up_proj"


def _make_source(module: nn.Module, name: str) -> ExpertWeight:
    num, *sizes = module._parameters[name].shape  # type: ignore[union-attr]
    rows, columns = reversed(sizes) if module.is_transposed else sizes
    is_pair = name == "gate_up_proj" and module.is_concatenated
    return ExpertWeight(ExpertShapes(num, columns, (rows // 2, rows // 2) if is_pair else (rows,)))


def stacked_weight(module: nn.Module, name: str) -> torch.Tensor:
    """A 3-D parameter as [E * N, K], expert after expert: a view, or a copy of one that is stored as [E, K, N]."""
    weight: torch.Tensor = getattr(module, name)
    return (weight.transpose(1, 2) if module.is_transposed else weight).flatten(0, 1)


def _class_of(base: type[nn.Module]) -> type[nn.Module]:
    if base not in _classes:
        _classes[base] = type(base.__name__, (FusedExperts, base), {"__module__": base.__module__})
    return _classes[base]


def _revive(base: type[nn.Module]) -> nn.Module:
    made = _class_of(base)
    return made.__new__(made)
