"""Keys and values out of the paged cache, decoded: attention through a library wants them packed beside its queries."""

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.ops.attention import PagedKVLayer
from octavo.ops.attention.kv_read.reference import read_kv_reference

__all__ = ["read_kv", "read_kv_reference"]


def read_kv(layer: PagedKVLayer, slot_mapping: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """What the cache holds of these tokens.

    Args:
        layer: FP8, or 16 bits or more.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset of each token, none negative.
        dtype: of the results.
    Returns:
        (k, v), each [T, KH, D] of dtype: a code times its scale in fp32, rounded once.
    Raises:
        ShapeError: slot_mapping is no vector.
    Exactness: bitwise on every device.
    """
    if slot_mapping.dim() != 1:
        raise ShapeError(f"slot_mapping must be [T], got shape {tuple(slot_mapping.shape)}")
    if layer.k.is_cuda and not env.force_reference():
        from octavo.ops.attention.kv_read import triton

        if triton.can_run(layer):
            return triton.read_kv(layer, slot_mapping, dtype)
    return read_kv_reference(layer, slot_mapping, dtype)
