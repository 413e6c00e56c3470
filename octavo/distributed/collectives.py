"""torch's collectives over one tensor, under the names that this torch does not warn of: 2.13 has new ones; and of
matrices of which each rank has rows or columns.
"""

from typing import Any

import torch
import torch.distributed as dist
from torch.nn.functional import pad


def all_gather_into(output: torch.Tensor, piece: torch.Tensor, *, group: Any = None, async_op: bool = False) -> Any:
    """Every rank's piece [n], by rank, in one tensor [ranks * n]."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(output, piece, group=group, async_op=async_op)


def reduce_scatter_into(output: torch.Tensor, pieces: torch.Tensor, op: Any = None, *, group: Any = None) -> Any:
    """This rank's piece [n] of what all ranks' tensors [ranks * n] add up to."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(output, pieces, dist.ReduceOp.SUM if op is None else op, group=group)


def side_by_side(own: torch.Tensor, dim: int, group: Any = None) -> torch.Tensor:
    """Every rank's matrix, by rank, along a dim; stored by rows or columns, as it is on all ranks."""
    if not own.is_contiguous() and own.t().is_contiguous():
        return side_by_side(own.t(), 1 - dim, group).t()
    world = dist.get_world_size(group)
    found = own.new_empty(world * own.shape[0], *own.shape[1:])  # no view: FSDP2 warns of a unit that returns one
    all_gather_into(found.view(-1), own.contiguous().view(-1), group=group)
    return found if dim == 0 else found.view(world, *own.shape).transpose(0, 1).flatten(1)


def by_owner(x: torch.Tensor, world: int) -> torch.Tensor:
    """A matrix [T, K] cut among so many ranks: [ranks, ceil(T / ranks), K], contiguous, zeros behind the last row."""
    missing = -x.shape[0] % world
    return (pad(x, (0, 0, 0, missing)) if missing else x.contiguous()).unflatten(0, (world, -1))


def exchange(pieces: torch.Tensor, group: Any = None) -> torch.Tensor:
    """Piece i [ranks, *] of every rank to rank i; those that came, by rank."""
    received = torch.empty_like(pieces)
    dist.all_to_all_single(received, pieces, group=group)
    return received


def exchange_parts(
    received: torch.Tensor, sent: torch.Tensor, received_sizes: list[int], sent_sizes: list[int], group: Any = None
) -> None:
    """Write what every rank has for this one into `received`; so many elements of each rank, and for each."""
    sizes = [[sent.itemsize * size for size in each] for each in (received_sizes, sent_sizes)]
    dist.all_to_all_single(received.view(torch.uint8), sent.view(torch.uint8), sizes[0], sizes[1], group=group)
