"""torch's collectives over one tensor, under the names that this torch does not warn of: 2.13 has new ones."""

from typing import Any

import torch
import torch.distributed as dist


def all_gather_into(output: torch.Tensor, piece: torch.Tensor, *, group: Any = None, async_op: bool = False) -> Any:
    """Every rank's piece [n], by rank, in one tensor [ranks * n]."""
    run = getattr(dist, "all_gather_single", None) or dist.all_gather_into_tensor
    return run(output, piece, group=group, async_op=async_op)


def reduce_scatter_into(output: torch.Tensor, pieces: torch.Tensor, op: Any = None, *, group: Any = None) -> Any:
    """This rank's piece [n] of what all ranks' tensors [ranks * n] add up to."""
    run = getattr(dist, "reduce_scatter_single", None) or dist.reduce_scatter_tensor
    return run(output, pieces, dist.ReduceOp.SUM if op is None else op, group=group)
