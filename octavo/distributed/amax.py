"""Delayed scaling over several ranks: the largest amaxes of all of them, in one collective for all linears of a group.

Ranks must name the same linears in the same order. A model that convert has seen does, whichever of them ran; the other
linears come in the order of their first forward.
"""

import hashlib
import weakref
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch
import torch.distributed as dist

from octavo.errors import ShapeError

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


def reduce_staged(
    state: StagedAmaxes, group: Any = None, peers: Callable[[], Sequence[StagedAmaxes]] | None = None
) -> None:
    """Make row 0 of a history the largest of all ranks; others of the group are reduced along, once a forward.

    A layer that did not run on a rank staged zeros there, which change nothing.

    Args:
        group: a process group; None for all ranks.
        peers: what is reduced along, this one included, in an order that all ranks have; None for all that ever staged.
    """
    if not (_IS_AVAILABLE and dist.is_initialized()):
        return
    if torch.compiler.is_compiling():  # in the graph, a linear at a time
        dist.all_reduce(state.history[0], dist.ReduceOp.MAX, group=group)
        return
    if state.is_reduced:
        return
    members = _members(state, group) if peers is None else peers()
    reduce_rows([member.history[0] for member in members], group)
    for member in members:
        member.is_reduced = True


def reduce_rows(rows: Sequence[torch.Tensor], group: Any = None) -> None:
    """Make vectors the largest of all ranks, element by element, in place: one all-reduce for all of them."""
    flat = torch.cat(list(rows))
    reduce_largest(flat, group)
    torch._foreach_copy_(list(rows), list(flat.split([len(row) for row in rows])))


def check_alike(names: Sequence[str], device: torch.device, group: Any, agreed: set[tuple[Any, bytes]]) -> None:
    """Refuse to go on where ranks of a group have different linears.

    Args:
        names: of the linears and the sizes of their rows, in order.
        device: of the rows.
        group: a process group; None for all ranks.
        agreed: what was found alike before, which is not asked again; grows.
    Raises:
        ShapeError: on every rank of the group.
    """
    digest = hashlib.sha256("\n".join(names).encode()).digest()[:3]
    if (group, digest) in agreed:
        return
    own = [float(len(names)), float(int.from_bytes(digest, "big"))]  # whole numbers that fp32 holds
    seen = torch.tensor([*own, *(-x for x in own)], device=device)
    dist.all_reduce(seen, dist.ReduceOp.MAX, group=group)
    most, last, least, first = seen.tolist()
    if (most, last) != (-least, -first):
        counts = f"{int(-least)} on one and {int(most)} on another" if most != -least else "with other names or parts"
        raise ShapeError(
            f"ranks that agree on delayed scaling's amaxes must have the same linears, got {counts} (this rank has "
            f"{len(names)}, the first is {names[0]!r}); convert the same model alike on every rank, or name the ranks "
            "that hold the same layers by octavo.nn.set_amax_reduction_group(model, group)"
        )
    agreed.add((group, digest))


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
