"""Work that every rank does a part of and that counts only if all parts are done: one small collective says so."""

from collections.abc import Callable
from typing import Any, TypeVar

import torch.distributed as dist

from octavo import errors

Value = TypeVar("Value")
_Failure = tuple[str, int | None, str]  # class, errno, text


def everyone() -> Any:
    """The process group of all ranks; None for one process."""
    return dist.group.WORLD if dist.is_initialized() else None


def is_first(group: Any) -> bool:
    """Whether this rank acts for all of a group; one process (None) does."""
    return group is None or dist.get_rank(group) == 0


def place_in(group: Any) -> tuple[int, int]:
    """(rank, ranks) of a group; one process is rank 0 of 1."""
    return (0, 1) if group is None else (dist.get_rank(group), dist.get_world_size(group))


def together(group: Any, work: Callable[[], Value]) -> list[Value]:
    """Do this rank's part; a collective. Where a part fails on any rank, all ranks raise the same error.

    Args:
        group: a process group; None for one process, which just works.
        work: no collective itself, for a rank that fails would leave it; returns what pickle takes.
    Returns:
        The values of all ranks, in their order.
    Raises:
        OctavoError: of the first rank that failed, in its class, "rank 1: " before its text.
        OSError: the same.
        RuntimeError: the first that failed did so with another error, which the text names.
    """
    if group is None:
        return [work()]
    mine: tuple[Any, _Failure | None] = (None, None)
    own_error = None
    try:
        mine = (work(), None)
    except Exception as error:
        own_error = error
        mine = (None, (type(error).__name__, getattr(error, "errno", None), str(error)))
    parts: list[Any] = [None] * dist.get_world_size(group)
    dist.all_gather_object(parts, mine, group=group)
    for rank, (_, failure) in enumerate(parts):
        if failure is not None:
            raise _error_of(rank, *failure) from own_error
    return [value for value, _ in parts]


def all_do(group: Any, work: Callable[[], Value]) -> Value:
    """As together, of work that every rank does for itself: this rank's value, which no other gets."""
    found: list[Value] = []
    together(group, lambda: found.append(work()))
    return found[0]


def _error_of(rank: int, kind: str, number: int | None, text: str) -> Exception:
    """The error of a rank, as every rank raises it."""
    found = getattr(errors, kind, None)
    if number is not None:
        return (found or OSError)(number, f"rank {rank}: {text}")
    if found is not None:
        return found(f"rank {rank}: {text}")
    return RuntimeError(f"rank {rank}: {kind}: {text}")
