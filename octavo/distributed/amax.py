"""Delayed scaling over several ranks: the largest amaxes of all of them, in one collective a step.

A step's first linear asks; the staged amaxes of every linear of its group travel together. All ranks must have made
their linears in the same order, as copies of one model have.
"""

import weakref
from typing import Any, Protocol

import torch
import torch.distributed as dist

_IS_AVAILABLE = dist.is_available()


class StagedAmaxes(Protocol):
    """What stages amaxes in row 0 of its history.

    Attributes:
        history: [amax_history_len, n] fp32.
        is_reduced: nothing was staged since the last reduction.
    """

    history: torch.Tensor
    is_reduced: bool


_staged: dict[Any, list[weakref.ref[StagedAmaxes]]] = {}  # group -> what has ever staged for it, in order


def has_ranks() -> bool:
    """Whether this process is one of several that talk to each other."""
    return _IS_AVAILABLE and dist.is_initialized()


def reduce_staged(state: StagedAmaxes, group: Any = None) -> None:
    """Make row 0 of a history the largest of all ranks; others of the group that staged are reduced along.

    A layer that did not run on a rank staged zeros there, which change nothing.

    Args:
        group: a process group; None for all ranks.
    """
    if not (_IS_AVAILABLE and dist.is_initialized()):
        return
    if torch.compiler.is_compiling():  # in the graph, a linear at a time
        dist.all_reduce(state.history[0], dist.ReduceOp.MAX, group=group)
        return
    if state.is_reduced:
        return
    members = _members(state, group)
    rows = [member.history[0] for member in members]
    flat = torch.cat(rows)
    dist.all_reduce(flat, dist.ReduceOp.MAX, group=group)
    for member, row, reduced in zip(members, rows, flat.split([len(row) for row in rows]), strict=True):
        row.copy_(reduced)
        member.is_reduced = True


def reduce_largest(values: torch.Tensor, group: Any) -> None:
    """Make every element the largest of all ranks', in place; values without NaN, which backends treat differently."""
    dist.all_reduce(values, dist.ReduceOp.MAX, group=group)


def _members(state: StagedAmaxes, group: Any) -> list[StagedAmaxes]:
    """All on this state's device that ever staged for a group and still exist, this one included."""
    held = _staged.setdefault(group, [])
    members = [member for ref in held if (member := ref()) is not None]
    if not any(member is state for member in members):
        members.append(state)
    if len(members) != len(held):
        _staged[group] = [weakref.ref(member) for member in members]
    return [member for member in members if member.history.device == state.history.device]
