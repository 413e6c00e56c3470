"""The state of FP8 recipes beside a model's state dict: save it, load it, reset it.

Delayed scaling is the only recipe with state. A model's own state dict has the framework's keys alone.
"""

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import nn

from octavo.distributed.amax import has_ranks, reduce_rows
from octavo.errors import CheckpointError
from octavo.nn.amax_watch import speak_again
from octavo.nn.autocast_linear import find_linear, held_linears
from octavo.nn.delayed import STATE_NAMES, DelayedLinear
from octavo.nn.linear import Linear


def fp8_state_dict(model: nn.Module) -> dict[str, torch.Tensor]:
    """Every tensor of delayed scaling's state, for a checkpoint; empty where there is none.

    Linears of octavo's and, after a forward under octavo.autocast, torch's own are in it. Small fp32 tensors, alike on
    every process of a data-parallel run, for safetensors, torch.distributed.checkpoint or torch.save.

    Args:
        model: the object whose state_dict() is saved beside it.
    Returns:
        "<module>.fp8_amax_history" [amax_history_len, n] and "<module>.fp8_quant_scale" [n] for each linear; the
        tensors themselves, no copies.
    """
    return {_join(name, key): tensor for name, linear in _linears(model) for key, tensor in linear.held_state().items()}


def load_fp8_state_dict(model: nn.Module, state: Mapping[str, torch.Tensor], *, strict: bool = True) -> None:
    """Take a state that fp8_state_dict gave; before or after convert, and before the first forward under autocast.

    Args:
        state: tensors by name, on any device; copied.
        strict: refuse names that the model does not have, and a state without some linear that has a recipe with state.
    Raises:
        CheckpointError: strict, and names are missing or left over; another architecture, or a history of another
            length. Nothing was changed then.
    """
    found: dict[str, dict[str, torch.Tensor]] = {}
    for key, tensor in state.items():
        name, _, last = key.rpartition(".")
        if last in STATE_NAMES:
            found.setdefault(name, {})[last] = tensor
    modules = dict(model.named_modules())
    linears = {name: linear for name in found if (linear := find_linear(modules, name)) is not None}
    if strict:
        unknown = [key for key in state if key.rpartition(".")[2] not in STATE_NAMES]
        unknown += [_join(name, key) for name in found if name not in linears for key in found[name]]
        _refuse("left over", unknown)
        _refuse("missing", [name for name, linear in _linears(model) if _needs_state(linear) and name not in linears])
    for name, linear in linears.items():
        linear.check_state(found[name], name)
    for name, linear in linears.items():
        linear.load_state(found[name])
        linear.full_name = name


@torch.no_grad()
def agree_on_staged_amaxes(model: nn.Module) -> None:
    """Make what each rank has staged the largest of all, as the next forward or step does: then one rank's state is
    that of all. Every rank of a group calls it; twice changes nothing.
    """
    staged: dict[Any, list[torch.Tensor]] = {}
    for _, linear in _linears(model):
        recipe = linear.recipe
        if has_ranks() and recipe is not None and recipe.delayed is not None and recipe.delayed.reduce_amax:
            staged.setdefault(linear.source.group, []).append(linear.delayed_state(recipe).history[0])
    for group, rows in staged.items():
        reduce_rows(rows, group)


def reset_amax_history(model: nn.Module) -> None:
    """Forget delayed scaling's past, as after a batch far out of range: the next scales are made from the last step's.

    Call it between two steps, the last of which was an ordinary one. A recipe with amax_compute_algo="most_recent" or
    a short amax_history_len forgets by itself.
    """
    for _, linear in _linears(model):
        linear.reset_history()
    speak_again()


def set_amax_reduction_group(model: nn.Module, group: Any) -> None:
    """Name the ranks that agree on delayed scaling's amaxes: those that hold the same layers, with other tokens.

    Args:
        model: its octavo linears, at any time. torch's own under octavo.autocast take autocast's group.
        group: a torch.distributed process group; None for all ranks.
    """
    for _, linear in _linears(model):
        linear.source.group = group


def _linears(model: nn.Module) -> Iterator[tuple[str, DelayedLinear]]:
    """Every linear that may have state, by the name that its tensors are saved under."""
    for name, module in model.named_modules():
        if isinstance(module, DelayedLinear):
            yield name, module
        for own, linear in held_linears(module):
            yield name if own == "weight" else _join(name, own), linear


def _needs_state(linear: DelayedLinear) -> bool:
    recipe = linear.recipe if isinstance(linear, Linear) else None
    return recipe is not None and recipe.has_state


def _join(name: str, last: str) -> str:
    return f"{name}.{last}" if name else last


def _refuse(what: str, names: list[str]) -> None:
    if names:
        more = f" and {len(names) - 4} more" if len(names) > 4 else ""
        raise CheckpointError(
            f"the FP8 state does not fit the model, {what}: {', '.join(names[:4])}{more}; load it into the model that "
            "it was saved from, or with strict=False"
        )
