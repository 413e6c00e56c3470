"""Self-attention with grouped queries: projections, optional QK-norm, RoPE; the context does the attending."""

import functools
from collections.abc import Callable

import torch

from octavo.distributed.tensor_group import PartialRows, whole
from octavo.errors import ShapeError
from octavo.nn.attention_context import AttentionContext, CachingContext, RoundingContext
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.linear import quantize_input
from octavo.nn.functional.norm_linear import can_infer
from octavo.nn.functional.split_heads import split_heads
from octavo.nn.fusion import FusedLayer, fusable
from octavo.nn.linear import Linear
from octavo.nn.rms_norm import RMSNorm, shared
from octavo.nn.rope import RotaryEmbedding
from octavo.numerics.recipe import Recipe
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation


@fusable
class Attention(FusedLayer):
    """Causal self-attention over whatever context it is given.

    Args:
        hidden_size: model width.
        num_heads: H query heads, a multiple of num_kv_heads.
        num_kv_heads: KH key and value heads.
        head_dim: D of each head.
        layer_index: which layer of the KV cache is this one's.
        rope: the model's shared tables.
        qkv_bias: a bias of the projection to Q, K and V.
        out_bias: a bias of the output projection.
        qk_norm_eps: eps of an RMSNorm over each head of Q and K before RoPE (Qwen3); None for none.
    """

    def __init__(
        self,
        hidden_size: int,
        num_heads: int,
        num_kv_heads: int,
        head_dim: int,
        *,
        layer_index: int,
        rope: RotaryEmbedding,
        qkv_bias: bool = False,
        out_bias: bool = False,
        qk_norm_eps: float | None = None,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        if num_heads % num_kv_heads:
            raise ShapeError(f"num_heads={num_heads} must be a multiple of num_kv_heads={num_kv_heads}")
        self.num_heads, self.num_kv_heads, self.head_dim = num_heads, num_kv_heads, head_dim
        self.layer_index, self.rope = layer_index, rope
        parts = (num_heads * head_dim, num_kv_heads * head_dim, num_kv_heads * head_dim)
        self.qkv_proj = Linear(hidden_size, sum(parts), qkv_bias, parts=parts, dtype=dtype, device=device)
        self.o_proj = Linear(num_heads * head_dim, hidden_size, out_bias, dtype=dtype, device=device)
        has_norm = qk_norm_eps is not None
        self.q_norm = RMSNorm(head_dim, qk_norm_eps or 0.0, dtype=dtype, device=device) if has_norm else None
        self.k_norm = RMSNorm(head_dim, qk_norm_eps or 0.0, dtype=dtype, device=device) if has_norm else None

    def forward(self, x: torch.Tensor, context: AttentionContext) -> torch.Tensor:
        """x [T, hidden_size] -> [T, hidden_size]."""
        return whole(self.attend(self.qkv_proj(x), context))

    def attend(self, qkv: torch.Tensor, context: AttentionContext) -> torch.Tensor | PartialRows:
        """What follows the projection: qkv [T, sum of its parts] -> [T, hidden_size], or this rank's part of it."""
        is_fused = self.fuses(self.rope, *self._norms())
        if is_fused and isinstance(context, CachingContext):
            return self._attend_cached(qkv, context)
        attend: Callable[..., torch.Tensor] = context.attend
        if is_fused:
            rounding = context.kv_rounding(self.layer_index) if isinstance(context, RoundingContext) else None
            how = (self._rotation(context), self._head_norms(), rounding)
            heads = split_heads(qkv, self.num_kv_heads, self.head_dim, *how)
            attend = attend if rounding is None else functools.partial(attend, kv_is_rounded=True)
        else:
            heads = self._heads_by_modules(qkv, context.positions)
        out = attend(self.layer_index, *heads, softmax_scale=self.head_dim**-0.5)
        return self.o_proj(out.reshape(-1, self.num_heads * self.head_dim))

    def _attend_cached(self, qkv: torch.Tensor, context: CachingContext) -> torch.Tensor | PartialRows:
        """The same where the context norms, rotates and caches."""
        recipe = effective_recipe(self.o_proj.recipe)
        out = context.attend_qkv(
            self.layer_index, qkv, self._rotation(context), self._head_norms(),
            softmax_scale=self.head_dim**-0.5, out_scaling=recipe.input if self._takes_codes(recipe) else None,
        )  # fmt: skip
        if isinstance(out, torch.Tensor):
            out = out.view(qkv.shape[0], self.num_heads * self.head_dim)
            if not self._takes_codes(recipe):
                return self.o_proj(out)
            out = quantize_input(out, self.o_proj.begin(recipe), columns=False, observe=False)[0]
        return self.o_proj.infer_parts(out, self.o_proj.plan_for(recipe), qkv.dtype)

    def _heads_by_modules(
        self, qkv: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Split, norms and RoPE one after the other, each with its hooks: what split_heads does at once."""
        q, k, v = qkv.split(self.qkv_proj.parts, dim=-1)
        q, k, v = (y.reshape(qkv.shape[0], y.shape[1] // self.head_dim, self.head_dim) for y in (q, k, v))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        return self.rope(q, positions), self.rope(k, positions), v

    def _takes_codes(self, recipe: Recipe) -> bool:
        """Whether o_proj would make codes of its input by itself alone: no scale is known, no hook looks at it."""
        has_known_scale = recipe.delayed is not None or recipe.static_input
        is_own = not self.o_proj.exact or recipe == self.o_proj.recipe  # which o_proj refuses otherwise
        return is_own and not has_known_scale and self.fuses(self.o_proj) and can_infer(recipe, None, self.o_proj)

    def _rotation(self, context: AttentionContext) -> Rotation:
        return Rotation(context.positions, self.rope.cos, self.rope.sin, self.rope.interleaved)

    def _norms(self) -> list[RMSNorm]:
        return [norm for norm in (self.q_norm, self.k_norm) if norm is not None]

    def _head_norms(self) -> HeadNorms | None:
        if self.q_norm is None or self.k_norm is None:
            return None
        q_weight, k_weight = (shared(norm.weight, norm.tensor_group) for norm in (self.q_norm, self.k_norm))
        return HeadNorms(q_weight, k_weight, self.q_norm.eps, self.q_norm.exact)
