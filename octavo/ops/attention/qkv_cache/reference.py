"""The separate ops one after the other: the meaning of the fused kernel, on any device."""

from typing import NamedTuple

import torch

from octavo.ops.attention import PagedKVLayer, write_kv
from octavo.ops.attention.rope import apply_rope
from octavo.ops.norm.rms_norm import rms_norm


class Rotation(NamedTuple):
    """RoPE of a batch: positions [T] int64, cos and sin [P, R / 2] fp32, and whether neighbours are pairs (GPT-J)."""

    positions: torch.Tensor
    cos: torch.Tensor
    sin: torch.Tensor
    interleaved: bool = False


class HeadNorms(NamedTuple):
    """RMSNorm of each head of Q and K: weights [D], eps, and whether it is exact (rms_norm)."""

    q_weight: torch.Tensor
    k_weight: torch.Tensor
    eps: float
    exact: bool = False


def qkv_to_cache_reference(
    qkv: torch.Tensor,
    layer: PagedKVLayer,
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None = None,
) -> torch.Tensor:
    """As octavo.ops.attention.qkv_cache.qkv_to_cache."""
    kv_heads, dim = layer.k.shape[1], layer.k.shape[3]
    heads = qkv.view(qkv.shape[0], -1, dim)  # [T, H + 2 KH, D]
    q, k, v = heads.split([heads.shape[1] - 2 * kv_heads, kv_heads, kv_heads], dim=1)
    if norms is not None:
        q, k = (_norm(x, weight, norms) for x, weight in ((q, norms.q_weight), (k, norms.k_weight)))
    positions, cos, sin, interleaved = rotation
    q, k = (apply_rope(x, positions, cos, sin, interleaved=interleaved) for x in (q, k))
    write_kv(layer, k, v, slot_mapping)
    return q


def _norm(x: torch.Tensor, weight: torch.Tensor, norms: HeadNorms) -> torch.Tensor:
    return rms_norm(x.reshape(-1, x.shape[-1]), weight, eps=norms.eps, exact=norms.exact).view(x.shape)
