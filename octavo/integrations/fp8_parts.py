"""Delayed scaling's state as an item of the checkpoints that torch.distributed.checkpoint writes for a trainer."""

from collections.abc import Sequence

import torch
from torch import nn

import octavo.nn
from octavo.nn.fp8_state import agree_on_staged_amaxes

_WRAPPERS = ("_checkpoint_wrapped_module.", "_orig_mod.")  # which torch adds to names, and trainers take out


class FP8PartsState:
    """The state of a model's parts, under the names that its linears had before they were wrapped."""

    def __init__(self, parts: Sequence[nn.Module]) -> None:
        self._parts = parts

    def state_dict(self) -> dict[str, torch.Tensor]:
        """All ranks call it, to save and, for the tensors to be filled, to load."""
        found: dict[str, torch.Tensor] = {}
        for part in self._parts:
            for linear in linears_with_state(part):
                assert linear.recipe is not None, "it has state"
                linear.delayed_state(linear.recipe)  # before the first forward there is none yet
            agree_on_staged_amaxes(part)  # a checkpoint has one rank's
            found |= {_plain(name): tensor for name, tensor in octavo.nn.fp8_state_dict(part).items()}
        return found

    def load_state_dict(self, state: dict[str, torch.Tensor]) -> None:
        """Take state_dict's."""
        for part in self._parts:
            names = octavo.nn.fp8_state_dict(part)
            octavo.nn.load_fp8_state_dict(part, {name: state[_plain(name)] for name in names})


def linears_with_state(model: nn.Module) -> list[octavo.nn.Linear]:
    """octavo's linears under recipes that have state."""
    linears = (module for module in model.modules() if isinstance(module, octavo.nn.Linear))
    return [linear for linear in linears if linear.recipe is not None and linear.recipe.has_state]


def _plain(name: str) -> str:
    for wrapper in _WRAPPERS:
        name = name.replace(wrapper, "")
    return name
