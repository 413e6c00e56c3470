"""The norm of all gradients together, in an order that the parameters' shapes fix: its bits do not know how many ranks
there are, nor which rows lie where.
"""

from collections.abc import Sequence

import torch

from octavo.distributed.shards import local, whole
from octavo.distributed.tensor_group import TensorGroup
from octavo.ops.piece_sums import row_sums


def global_norm(
    tensors: Sequence[torch.Tensor],
    like: Sequence[torch.Tensor] | None = None,
    *,
    slices: Sequence[bool] = (),
    group: TensorGroup | None = None,
) -> torch.Tensor:
    """The 2-norm of tensors as one vector: a collective of 4 bytes a row where some of them are sharded.

    A row (a slice along dim 0, which no shard cuts) is summed by the rank that has it. All ranks then have all rows'
    sums and add them up alike.

    Args:
        tensors: fp32, bf16 or fp16; plain, or DTensors sharded along dim 0. All ranks pass as many, in one order.
        like: DTensors that say how each of tensors is cut, where those are shards themselves.
        slices: of each, whether tensor-parallel ranks hold slices of it; the others are the same on all of them.
        group: these ranks; None for none.
    Returns:
        fp32 scalar on the first one's device, the same on every rank; inf or NaN where an element is.
    Exactness: bitwise the same on every layout of whole tensors and shards, on CPU and GPU; slices' sums are added by
        fp32 all-reduce, the same bits on all ranks.
    """
    if not tensors:
        return torch.zeros(())
    device = tensors[0].device
    sums = whole([_of_rows(local(tensor)) for tensor in tensors], tensors if like is None else like)
    sums = [of_rows.to(device) for of_rows in sums]
    if group is None or not any(slices):
        return _total(sums, device).sqrt()
    sliced, alike = ([x for x, is_slice in zip(sums, slices, strict=True) if is_slice is it] for it in (True, False))
    return (group.sum(_total(sliced, device)) + _total(alike, device)).sqrt()


def _total(sums: list[torch.Tensor], device: torch.device) -> torch.Tensor:
    """fp32 scalar."""
    flat = torch.cat(sums) if sums else torch.zeros(0, device=device)
    return row_sums(flat.view(1, -1), is_squared=False).view(()) if flat.numel() else flat.sum()


def _of_rows(part: torch.Tensor) -> torch.Tensor:
    """[rows] fp32 sums of squares."""
    num_rows = part.shape[0] if part.dim() else 1
    if part.numel() == 0:
        return part.new_zeros(num_rows, dtype=torch.float32)
    return row_sums(part.reshape(num_rows, -1), is_squared=True)
