"""From a fused projection to attention: heads split, Q and K normed and rotated, K and V written into the cache."""

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.ops.attention import PagedKVLayer
from octavo.ops.attention.qkv_cache.reference import HeadNorms, Rotation, qkv_to_cache_reference

__all__ = ["HeadNorms", "Rotation", "qkv_to_cache", "qkv_to_cache_reference"]


def qkv_to_cache(
    qkv: torch.Tensor,
    layer: PagedKVLayer,
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """Split a projection into heads, norm Q and K, rotate them, write K and V into their slots.

    Args:
        qkv: [T, (H + 2 KH) * D]: all heads of Q, then K, then V. KH and D are the layer's.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset; a negative one (a token that only fills up a batch) is not
            written.
        rotation: each token's position, and the tables.
        norms: RMSNorm of each head of Q and K before the rotation, or None.
    Returns:
        Q [T, H, D] of qkv's dtype.
    Raises:
        ShapeError: a width that is no such projection.
    Exactness: bitwise equal to rms_norm, apply_rope and write_kv one after the other on the same device.
    """
    kv_heads, dim = layer.k.shape[1], layer.k.shape[3]
    num_heads, rest = divmod(qkv.shape[1], dim)
    if rest or num_heads <= 2 * kv_heads:
        raise ShapeError(
            f"qkv must be [T, (H + 2 * {kv_heads}) * {dim}] for this layer's {kv_heads} kv heads of {dim}, got "
            f"{tuple(qkv.shape)}"
        )
    if qkv.is_cuda and not env.force_reference():
        from octavo.ops.attention.qkv_cache import triton

        if triton.can_fuse(qkv, layer, rotation):
            return triton.qkv_to_cache(qkv, layer, slot_mapping, rotation, norms)
    return qkv_to_cache_reference(qkv, layer, slot_mapping, rotation, norms)
