"""From attention's projection to its heads in one step, differentiable: QK-norm, RoPE, and the FP8 cache's rounding."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.ops.attention import KVRounding
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.qkv_heads import qkv_heads, qkv_heads_backward


def split_heads(
    qkv: torch.Tensor,
    num_kv_heads: int,
    head_dim: int,
    rotation: Rotation,
    norms: HeadNorms | None,
    rounding: KVRounding | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Queries, keys and values of a projection, with the bits of the modules one after the other; arguments as in
    ops.qkv_heads.

    Returns:
        (q [T, H, D], k [T, KH, D], v [T, KH, D]); the gradients of rounded K and V pass straight through.
    """
    weights = (None, None) if norms is None else norms[:2]
    heads: tuple[torch.Tensor, torch.Tensor, torch.Tensor] = SplitHeads.apply(
        qkv, *weights, num_kv_heads, head_dim, rotation, None if norms is None else norms[2:], rounding
    )
    return heads


class SplitHeads(torch.autograd.Function):
    """Saves the projection where norms need it, and two small tensors."""

    @staticmethod
    def forward(
        ctx: Any,
        qkv: torch.Tensor,
        q_weight: torch.Tensor | None,
        k_weight: torch.Tensor | None,
        num_kv_heads: int,
        head_dim: int,
        rotation: Rotation,
        how: tuple[float, bool] | None,
        rounding: KVRounding | None,
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """qkv [T, (H + 2 KH) * D] -> q [T, H, D], k and v [T, KH, D]."""
        norms = None
        if q_weight is not None and k_weight is not None and how is not None:
            norms = HeadNorms(q_weight, k_weight, *how)
        q, k, v, rstd = qkv_heads(qkv, num_kv_heads, head_dim, rotation, norms, rounding)
        ctx.save_for_backward(None if norms is None else qkv, rstd, q_weight, k_weight, *rotation[:3])
        ctx.interleaved = rotation.interleaved
        return q, k, v

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad_q: torch.Tensor, grad_k: torch.Tensor, grad_v: torch.Tensor
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (qkv, q_weight, k_weight)."""
        qkv, rstd, q_weight, k_weight, positions, cos, sin = ctx.saved_tensors
        weights = None if q_weight is None else (q_weight, k_weight)
        rotation = Rotation(positions, cos, sin, ctx.interleaved)
        grads = qkv_heads_backward(grad_q, grad_k, grad_v, qkv, rstd, weights, rotation)
        return (*grads, None, None, None, None, None)
