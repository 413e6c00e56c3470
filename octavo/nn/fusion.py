"""Fusion by plan: which layers run steps that span several of their modules, decided when a model is built.

A fused step does not call the modules that it stands for. So a layer is planned to run "fused" only over octavo's own
modules as they are, and `convert` plans again: what is hooked, subclassed or wrapped by then runs module by module.
"""

import dataclasses
import warnings
from collections.abc import Callable, Iterator
from typing import Any, TypeVar

from torch import nn

T = TypeVar("T", bound=nn.Module)
_HOOKS = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
_has_warned: set[tuple[type[nn.Module], type[nn.Module], str]] = set()


@dataclasses.dataclass(frozen=True)
class FusionPlan:
    """Whether a layer runs fused steps.

    Attributes:
        is_fused: it does, where the recipe allows.
        reason: why it does not.
        is_explicit: set_fusion said so: hooks on the modules are then not asked for, and not called where it is fused.
    """

    is_fused: bool = True
    reason: str = ""
    is_explicit: bool = False


def fusable(kind: type[T]) -> type[T]:
    """Class decorator: fused steps may stand for modules of this very type, not of its subclasses."""
    kind.fusable_type = kind  # type: ignore[attr-defined]
    return kind


class FusedLayer(nn.Module):
    """A layer with steps that span several of its modules.

    Attributes:
        fusion: its plan; that of a new layer is to fuse.
    """

    fusion = FusionPlan()

    def fused_modules(self) -> list[nn.Module]:
        """The modules that fused steps stand for."""
        return list(self.children())

    def fuses(self, *children: nn.Module | None) -> bool:
        """Whether a step over these modules runs fused, by the plan.

        A hook or a wrapper that came after the plan has its module called, and a warning says so once.
        """
        plan = self.fusion
        if not plan.is_fused:
            return False
        for child in children:
            if child is not None and (found := _obstacle(child, plan.is_explicit)) is not None:
                _warn(self, child, found)
                return False
        return True


def plan_fusion(model: nn.Module) -> dict[str, FusionPlan]:
    """Plan every layer of a model by what its modules are now; what set_fusion said stays.

    Called by convert and by what distributes a model. Call it after you have added or removed hooks or wrappers of your
    own, if the layers are to fuse again or to stop warning.

    Returns:
        Each layer's plan, by its name.
    """
    plans = {}
    for name, layer in _layers(model):
        if not layer.fusion.is_explicit:
            layer.fusion = _plan(layer)
        plans[name] = layer.fusion
    return plans


def set_fusion(model: nn.Module, fused: bool | None) -> None:
    """Say whether the layers of a model run fused steps, whatever hooks there are.

    Args:
        model: a model or a layer.
        fused: False: module by module, with the same bits forward. True: fused over octavo's modules even where they
            have hooks, which are not called then. None: by plan_fusion again.
    """
    for _, layer in _layers(model):
        layer.fusion = FusionPlan(fused, "" if fused else "set_fusion", True) if fused is not None else _plan(layer)


def describe_fusion(model: nn.Module) -> str:
    """One line for reports: how many layers run fused, and why others do not; empty for a model without such layers."""
    plans = [layer.fusion for _, layer in _layers(model)]
    if not plans:
        return ""
    reasons = sorted({plan.reason for plan in plans if not plan.is_fused})
    line = f"{sum(plan.is_fused for plan in plans)} of {len(plans)} layers planned to run fused"
    return f"{line}; the others by modules: {', '.join(reasons)}" if reasons else line


def _layers(model: nn.Module) -> Iterator[tuple[str, FusedLayer]]:
    return ((name, module) for name, module in model.named_modules() if isinstance(module, FusedLayer))


def _plan(layer: FusedLayer) -> FusionPlan:
    for child in layer.fused_modules():
        if (found := _obstacle(child, False)) is not None:
            return FusionPlan(False, f"{type(child).__name__} {found[0]}")
    return FusionPlan()


def _obstacle(module: nn.Module, ignores_hooks: bool) -> tuple[str, str] | None:
    """What keeps a module from being fused, and where that comes from; None for nothing."""
    if not ignores_hooks:
        for kind in _HOOKS:
            if hooks := getattr(module, kind):
                origin = _origin(next(iter(hooks.values())))
                return f"has a hook of {origin}", origin
    if "forward" in module.__dict__:
        return "has a forward of its own", _origin(module.forward)
    if getattr(module, "fusable_type", None) is not type(module):
        return "has a forward of its own", f"{type(module).__module__}.{type(module).__name__}"
    return None


def _origin(hook: Callable[..., Any]) -> str:
    """The module and name of a hook."""
    hook = getattr(hook, "func", hook)  # of functools.partial
    name = getattr(hook, "__qualname__", type(hook).__qualname__)
    return f"{getattr(hook, '__module__', None) or type(hook).__module__}.{name}"


def _warn(layer: FusedLayer, child: nn.Module, found: tuple[str, str]) -> None:
    """Say once of each kind of obstacle that it costs the fusion; octavo's own hooks mean it."""
    what, origin = found
    case = (type(layer), type(child), origin)
    if origin.startswith("octavo.") or case in _has_warned:
        return
    _has_warned.add(case)
    names = (f"{type(layer).__name__}.{name}".rstrip(".") for name, module in layer.named_modules() if module is child)
    name = next(names, type(child).__name__)
    warnings.warn(
        f"{name} {what}, which came after the layer was planned to run fused: it runs module by "
        "module instead, with the same bits forward. Call octavo.nn.plan_fusion(model) after the last hook, or "
        "octavo.nn.set_fusion(model, True) to fuse without calling hooks. Said once for each",
        stacklevel=4,
    )
