"""Attention of ragged sequences with a gradient: the kernels of both ways."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.ops.attention.padding import VarlenBatch


class VarlenAttention(torch.autograd.Function):
    """attention_varlen of new sequences where its kernel runs: q [T, H, D], k and v [T, KH, D] -> [T, H, D]."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        batch: VarlenBatch,
        softmax_scale: float,
        has_gradient: bool,
    ) -> torch.Tensor:
        from octavo.ops.attention.varlen.triton import attention_varlen

        q, k, v = (_mappable(x) for x in (q, k, v))
        out = torch.empty_like(q)
        lse = torch.empty(q.shape[:2], dtype=torch.float32, device=q.device) if has_gradient else None
        attention_varlen(q, k, v, batch, softmax_scale, out, lse)
        if lse is not None:
            ctx.batch, ctx.softmax_scale = batch, softmax_scale
            ctx.save_for_backward(q, k, v, out, lse)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        from octavo.ops.attention.varlen.triton.backward import attend_backward

        q, k, v, out, lse = ctx.saved_tensors
        grads = attend_backward(_mappable(grad), q, k, v, out, lse, ctx.batch, ctx.softmax_scale)
        return (*grads, None, None, None)


def _mappable(x: torch.Tensor) -> torch.Tensor:
    """Contiguous, at an address that tensor maps take."""
    x = x.contiguous()
    return x.clone() if x.data_ptr() % 16 else x
