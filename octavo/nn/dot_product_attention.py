"""Attention without projections: softmax(q k^T) v over a batch or over packed sequences, in high precision."""

import torch
from torch import nn

from octavo.errors import ShapeError
from octavo.ops.attention import PackedLengths, attention_batch, attention_packed


class DotProductAttention(nn.Module):
    """Self-attention of grouped queries; no parameters.

    Args:
        num_heads: query heads.
        num_kv_heads: key and value heads, a divisor of num_heads.
        head_dim: D.
        causal: a token sees itself and earlier ones; else its whole sequence.
        softmax_scale: factor of the scores; None for head_dim**-0.5.
    Raises:
        ShapeError: if num_kv_heads does not divide num_heads.
    """

    def __init__(
        self,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        causal: bool = True,
        softmax_scale: float | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.causal = causal
        self.softmax_scale = head_dim**-0.5 if softmax_scale is None else softmax_scale

    def forward(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        cu_seqlens: torch.Tensor | PackedLengths | None = None,
    ) -> torch.Tensor:
        """Attend; differentiable.

        Args:
            q: [T, H, D], or a batch [B, S, H, D].
            k: as q, with KH heads.
            v: as k.
            cu_seqlens: [num_sequences + 1] int, cumulative lengths of the sequences that T tokens hold one after the
                other; None for one sequence. Read back from a GPU at every call; PackedLengths, made once, is not.
        Returns:
            q's shape and dtype.
        Raises:
            ShapeError: if shapes, heads and lengths do not fit together.
        """
        heads = (self.num_heads, self.num_kv_heads, self.num_kv_heads)
        for name, x, expected in zip("qkv", (q, k, v), heads, strict=True):
            if x.dim() not in (3, 4) or x.shape[-2:] != (expected, self.head_dim):
                raise ShapeError(f"{name} must end in [{expected}, {self.head_dim}], got {tuple(x.shape)}")
        if q.dim() == 4 and cu_seqlens is not None:
            raise ShapeError("cu_seqlens goes with packed q [T, H, D], got a batch [B, S, H, D]; leave it out")
        if cu_seqlens is not None:
            return attention_packed(q, k, v, cu_seqlens, softmax_scale=self.softmax_scale, causal=self.causal)[0]
        q4, k4, v4 = (x if x.dim() == 4 else x.unsqueeze(0) for x in (q, k, v))
        out = attention_batch(q4, k4, v4, softmax_scale=self.softmax_scale, causal=self.causal)
        return out if q.dim() == 4 else out.squeeze(0)

    def extra_repr(self) -> str:
        """For print(model)."""
        return f"heads={self.num_heads}, kv_heads={self.num_kv_heads}, head_dim={self.head_dim}, causal={self.causal}"
