"""TransformerLayer: one pre-norm decoder layer of fused modules, for models of the user's own."""

import torch
from torch import nn

from octavo.errors import ShapeError
from octavo.nn.dot_product_attention import DotProductAttention
from octavo.nn.layer_norm_linear import LayerNormLinear
from octavo.nn.layer_norm_mlp import LayerNormMLP
from octavo.nn.linear import Linear
from octavo.nn.rope import RotaryEmbedding


class TransformerLayer(nn.Module):
    """y = x + attention(norm(x)); y + mlp(norm(y)).

    Args:
        hidden_size: model width.
        ffn_hidden_size: width between the feed-forward linears.
        num_attention_heads: query heads.
        num_gqa_groups: key and value heads; None for as many.
        head_dim: None for hidden_size / num_attention_heads.
        normalization: "RMSNorm" or "LayerNorm".
        activation: "swiglu" or "gelu".
        bias: biases in every linear.
        causal: attend to earlier tokens only.
        rope: rotary embedding of queries and keys, None for none.
        dtype: of the parameters, bf16 or fp32.
    """

    def __init__(
        self,
        hidden_size: int,
        ffn_hidden_size: int,
        num_attention_heads: int,
        num_gqa_groups: int | None = None,
        *,
        head_dim: int | None = None,
        normalization: str = "RMSNorm",
        activation: str = "swiglu",
        bias: bool = False,
        eps: float = 1e-5,
        causal: bool = True,
        rope: RotaryEmbedding | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        groups = num_gqa_groups or num_attention_heads
        if num_attention_heads % groups:
            raise ShapeError(f"num_attention_heads={num_attention_heads} must be a multiple of num_gqa_groups={groups}")
        self.num_heads, self.num_groups = num_attention_heads, groups
        self.head_dim = head_dim or hidden_size // num_attention_heads
        self.rope = rope
        shared = {"bias": bias, "dtype": dtype, "device": device}
        norm = {"eps": eps, "normalization": normalization}
        parts = (self.num_heads * self.head_dim, groups * self.head_dim, groups * self.head_dim)
        self.layernorm_qkv = LayerNormLinear(hidden_size, sum(parts), parts=parts, **norm, **shared)  # type: ignore[arg-type]
        self.core_attention = DotProductAttention(self.num_heads, groups, self.head_dim, causal=causal)
        self.proj = Linear(self.num_heads * self.head_dim, hidden_size, **shared)  # type: ignore[arg-type]
        self.proj.saves_input = True  # attention saves its output
        self.layernorm_mlp = LayerNormMLP(hidden_size, ffn_hidden_size, activation=activation, **norm, **shared)  # type: ignore[arg-type]

    def forward(
        self, x: torch.Tensor, *, cu_seqlens: torch.Tensor | None = None, positions: torch.Tensor | None = None
    ) -> torch.Tensor:
        """One layer.

        Args:
            x: [B, S, hidden_size], or packed sequences [T, hidden_size].
            cu_seqlens: [num_sequences + 1] cumulative lengths of packed sequences; goes with a 2-D x.
            positions: [T] or [B, S] int64 for rope; None counts from the start of each sequence of a 3-D x.
        Returns:
            x's shape and dtype.
        Raises:
            ShapeError: x and cu_seqlens do not go together, or rope lacks positions.
        """
        if (x.dim() == 2) != (cu_seqlens is not None) or x.dim() not in (2, 3):
            raise ShapeError(f"x must be [B, S, hidden] alone or [T, hidden] with cu_seqlens, got {tuple(x.shape)}")
        qkv, stream = self.layernorm_qkv.forward_residual(x, None)
        q, k, v = self._heads(qkv, positions)
        attended = self.core_attention(q, k, v, cu_seqlens=cu_seqlens)
        out = self.proj(attended.reshape(*x.shape[:-1], self.num_heads * self.head_dim))
        out, stream = self.layernorm_mlp.forward_residual(stream, out)
        return stream + out

    def _heads(
        self, qkv: torch.Tensor, positions: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """[..., (H + 2 G) * D] -> q [..., H, D], k and v [..., G, D], rotated where there is a rope."""
        q, k, v = qkv.split(self.layernorm_qkv.linear.parts, dim=-1)
        q = q.unflatten(-1, (self.num_heads, self.head_dim))
        k, v = (y.unflatten(-1, (self.num_groups, self.head_dim)) for y in (k, v))
        if self.rope is None:
            return q, k, v
        if positions is None:
            if qkv.dim() == 2:
                raise ShapeError("rope over packed sequences needs positions [T], each token's place in its sequence")
            positions = torch.arange(qkv.shape[1], device=qkv.device).expand(qkv.shape[:2])
        flat = positions.reshape(-1)
        q, k = (self.rope(y.reshape(-1, *y.shape[-2:]), flat).view(y.shape) for y in (q, k))
        return q, k, v
