"""Delayed scaling for torch's own linears under octavo.autocast: an octavo linear beside each holds the state.

It lies in the __dict__ of the module that owns the weight and is no submodule: state dicts, optimizers and hooks do not
see it, and it goes with the module.
"""

import sys
import types
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from octavo.nn.delayed import DelayedLinear
from octavo.nn.linear import Linear
from octavo.nn.transposed_linear import TransposedLinear, is_conv1d, linear_sizes
from octavo.nn.weights.cached import TransientWeight
from octavo.nn.weights.plain import may_be_gathered
from octavo.numerics.recipe import Recipe

_PLACE = "_octavo_fp8"  # parameter's name -> AutocastLinear, or its tensors in a copy that has not run yet
_MAX_FRAMES = 32


class AutocastLinear(Linear):
    """Computes for a weight of another module, whose copies and pickles take its tensors along as plain data."""

    def __init__(self, weight: nn.Parameter) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, device="meta")
        if may_be_gathered():
            self.source = TransientWeight(self.parts)
        self.weight = weight

    def __reduce_ex__(self, protocol: Any) -> tuple[type[dict[str, torch.Tensor]], tuple[dict[str, torch.Tensor]]]:
        return dict, (self.held_state(),)

    def follow(self, weight: nn.Parameter, training: bool) -> None:
        """Be what the module is now: its weight, where that lies, and its mode."""
        if self._parameters["weight"] is not weight:
            self.weight = weight
        self.training = training
        for name, buffer in self._buffers.items():
            if buffer is not None and buffer.device != weight.device:
                self._buffers[name] = buffer.to(weight.device)

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
        """x [T, K] -> [T, N]."""
        return self._forward_fp8(x, bias, recipe)


def find_owner(weight: nn.Parameter) -> AutocastLinear | None:
    """The linear for a weight that the code of its module multiplies by right now; None where no such module is found.

    A call of F.linear does not say whose it is, and one weight may be in two modules, each with inputs of its own. So
    the module is looked for where it is: it is the `self` of one of the functions that called.
    """
    frame = sys._getframe(1)
    for _ in range(_MAX_FRAMES):
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module):
            for name, parameter in owner._parameters.items():
                if parameter is weight:
                    held = _linear(owner, name, weight)
                    held.full_name = held.full_name or _full_name(owner, frame)
                    return held
        if frame.f_back is None:
            break
        frame = frame.f_back
    return None


def _full_name(module: nn.Module, frame: types.FrameType | None) -> str:
    """The module's name in the outermost module that is running."""
    root = module
    while frame is not None:
        caller = frame.f_locals.get("self")
        root, frame = caller if isinstance(caller, nn.Module) else root, frame.f_back
    names = {child: name for name, child in root.named_modules()}
    return names.get(module) or type(module).__name__


def held_linears(module: nn.Module) -> Iterator[tuple[str, AutocastLinear]]:
    """The linears that lie beside a module's weights, by the weights' names."""
    for name in vars(module).get(_PLACE, ()):
        weight = module._parameters.get(name)
        if weight is not None:
            yield name, _linear(module, name, weight)


def find_linear(modules: Mapping[str, nn.Module], name: str) -> DelayedLinear | None:
    """The linear whose state is saved under a name; made for a module of torch's that has none yet.

    Args:
        modules: of the model, by name.
        name: of an octavo linear, of a module with a weight, or of a weight.
    """
    module, own = modules.get(name), "weight"
    if isinstance(module, DelayedLinear):
        return module
    if module is None:
        parent, _, own = name.rpartition(".")
        module = modules.get(parent)
    weight = None if module is None else module._parameters.get(own)
    return None if module is None or weight is None or weight.dim() != 2 else _linear(module, own, weight)


def adopt(linear: nn.Module) -> Linear:
    """An octavo linear over the parameters of a torch one, with its hooks, its mode and the state of its autocast."""
    kind = TransposedLinear if is_conv1d(linear) else Linear
    ours = kind(*linear_sizes(linear), device="meta", dtype=torch.bfloat16)
    ours.weight, ours.bias = linear.weight, linear.bias  # type: ignore[assignment]
    ours.follows_autocast, ours.training = True, linear.training
    for name, value in vars(linear).items():
        if "_hooks" in name or name == "_is_full_backward_hook":
            setattr(ours, name, value)
    for name, held in held_linears(linear):
        if name == "weight" and (state := held.held_state()):
            ours.load_state(state)
    return ours


def _linear(module: nn.Module, name: str, weight: nn.Parameter) -> AutocastLinear:
    places = vars(module).setdefault(_PLACE, {})
    held = places.get(name)
    if not isinstance(held, AutocastLinear) or (held.out_features, held.in_features) != weight.shape:
        state = held if isinstance(held, dict) else {}
        held = places[name] = AutocastLinear(weight)
        if state:
            held.load_state(state)
    held.follow(weight, module.training)
    return held
