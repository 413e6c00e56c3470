"""What lies on this rank of a DTensor that is cut along dim 0, as torch's fully_shard cuts parameters.

A plain tensor is whole on every rank, and nothing of torch.distributed.tensor is imported for it.
"""

import sys
from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist

from octavo.errors import CheckpointError, ShapeError

_PLAIN_TYPES = (torch.Tensor, torch.nn.Parameter)


class Rows(NamedTuple):
    """The rows (slices along dim 0) that a rank holds.

    Attributes:
        first: the first one's number.
        num: how many; 0 for an empty shard.
        groups: the process groups over which they are cut, the outer one first; empty for what is whole.
    """

    first: int
    num: int
    groups: tuple[Any, ...]


def is_distributed(tensor: torch.Tensor) -> bool:
    """Whether it is a DTensor, cut or not."""
    if type(tensor) in _PLAIN_TYPES or "torch.distributed.tensor" not in sys.modules:  # without it there is none
        return False
    from torch.distributed.tensor import DTensor

    return isinstance(tensor, DTensor)


def local(tensor: torch.Tensor) -> torch.Tensor:
    """This rank's shard, sharing memory; a plain tensor itself."""
    if not is_distributed(tensor):
        return tensor
    with torch.no_grad():
        return tensor.to_local()  # type: ignore[attr-defined,no-any-return]


def rows_of(tensor: torch.Tensor) -> Rows:
    """Which rows of a tensor are on this rank.

    Raises:
        ShapeError: it is cut along another dim than 0, or a sum that is not added up yet.
    """
    num_rows = tensor.shape[0] if tensor.dim() else 1
    if not is_distributed(tensor):
        return Rows(0, num_rows, ())
    from torch.distributed.tensor import Shard

    mesh, first, groups = tensor.device_mesh, 0, []  # type: ignore[attr-defined]
    for axis, placement in enumerate(tensor.placements):  # type: ignore[attr-defined]
        if placement.is_replicate():
            continue
        if type(placement) is not Shard or placement.dim != 0:
            raise ShapeError(
                f"octavo's optimizers take parameters that are sharded along dim 0 or replicated, got {placement} of a "
                f"parameter {tuple(tensor.shape)}; use fully_shard without shard_placement_fn"
            )
        chunk = -(-num_rows // mesh.size(axis))  # as torch.chunk cuts
        begin = min(mesh.get_local_rank(axis) * chunk, num_rows)
        first, num_rows = first + begin, min(chunk, num_rows - begin)
        groups.append(mesh.get_group(axis))
    return Rows(first, num_rows, tuple(groups))


def global_offset(tensor: torch.Tensor) -> int:
    """The place of the shard's first element in the whole tensor, in memory order."""
    if not is_distributed(tensor):
        return 0
    return rows_of(tensor).first * tensor.shape[1:].numel()


def cut(whole: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """This rank's rows, as `like`'s lie, of a plain tensor with as many rows: a view."""
    if not is_distributed(like):
        return whole
    rows = rows_of(like)
    return whole[rows.first : rows.first + rows.num]


def shard_of(part: torch.Tensor, like: torch.Tensor, shape: Sequence[int], *, is_cut: bool = True) -> torch.Tensor:
    """The DTensor of a given whole shape whose rows on this rank are `part`; `part` itself where `like` is plain.

    Args:
        like: whose mesh and placements it takes.
        is_cut: False for what every rank holds whole.
    """
    if not is_distributed(like):
        return part
    from torch.distributed.tensor import DTensor, Replicate

    whole = torch.Size(shape)
    stride = torch.empty(whole, device="meta").stride()
    placements = like.placements if is_cut else [Replicate()] * like.device_mesh.ndim  # type: ignore[attr-defined]
    mesh = like.device_mesh  # type: ignore[attr-defined]
    return DTensor.from_local(part, mesh, placements, run_check=False, shape=whole, stride=stride)


def whole(parts: Sequence[torch.Tensor], like: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Put shards together: a collective, one all-reduce for all that are cut alike.

    Args:
        parts: this rank's rows of each, of fp32 or a float of 16 bits.
        like: how each is cut; of each the rows count, not the shape.
    Returns:
        Each whole, [rows, *] in its part's dtype, the same bits on every rank; a part of what is not cut itself.
    """
    found = list(parts)
    alike: dict[tuple[Any, ...], list[tuple[int, Rows]]] = {}
    for index, tensor in enumerate(like):
        rows = rows_of(tensor)
        if rows.groups:
            alike.setdefault((*rows.groups, parts[index].device), []).append((index, rows))
    for (*groups, _), members in alike.items():
        shapes = [torch.Size((like[index].shape[0], *parts[index].shape[1:])) for index, _ in members]
        flat = _in_zeros([(parts[index], rows, shape) for (index, rows), shape in zip(members, shapes, strict=True)])
        for group in groups:  # where one rank alone has a number, the sum has its bits
            dist.all_reduce(flat.view(torch.int32), group=group)
        pieces = flat.split([shape.numel() for shape in shapes])
        for (index, _), piece, shape in zip(members, pieces, shapes, strict=True):
            found[index] = piece.view(shape).to(parts[index].dtype)
    return found


def _in_zeros(members: list[tuple[torch.Tensor, Rows, torch.Size]]) -> torch.Tensor:
    """Shards at their places in tensors that are else zero, all in one: fp32."""
    zeros = members[0][0].new_zeros(max(shape.numel() for _, _, shape in members), dtype=torch.float32)
    pieces = []
    for part, rows, shape in members:
        size = shape[1:].numel()
        after = shape.numel() - (rows.first + rows.num) * size
        pieces += [zeros[: rows.first * size], part.detach().reshape(-1).float(), zeros[:after]]
    return torch.cat(pieces)


def check_fits(saved: torch.Tensor, like: torch.Tensor, what: str) -> None:
    """Refuse a saved DTensor that is cut otherwise; what is whole on every rank fits everywhere.

    Raises:
        CheckpointError: naming `what`.
    """
    if not is_distributed(saved) or not rows_of(saved).groups:
        return
    lies = (saved.device_mesh, tuple(saved.placements))  # type: ignore[attr-defined]
    if not is_distributed(like) or lies != (like.device_mesh, tuple(like.placements)):  # type: ignore[attr-defined]
        raise CheckpointError(
            f"{what} is a DTensor that is cut otherwise than in this run; load it with torch.distributed.checkpoint, "
            "which cuts it again, or pass its full_tensor()"
        )


def fill(target: torch.Tensor, saved: torch.Tensor) -> None:
    """Copy a saved tensor that check_fits into this rank's rows of target."""
    is_cut = is_distributed(saved) and bool(rows_of(saved).groups)
    local(target).copy_(local(saved) if is_cut else cut(local(saved), target))
