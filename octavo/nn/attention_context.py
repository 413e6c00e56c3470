"""What attention runs over: the protocol that trainer and engine share, and the trainer's packed sequences."""

from typing import Any, Protocol, runtime_checkable

import torch
from torch.autograd.function import once_differentiable

from octavo.errors import RecipeError
from octavo.numerics.contract import Numerics
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.attention import (
    KVRounding,
    KVScaleTable,
    LayerKVScales,
    PackedLengths,
    attention_packed,
    attention_packed_backward,
    quantize_kv,
    round_kv,
)
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation


class AttentionContext(Protocol):
    """Where a batch's tokens stand, and how their queries meet keys and values.

    Attributes:
        positions: [T] int64, each token's position in its sequence.
    """

    positions: torch.Tensor

    def attend(
        self, layer_index: int, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float
    ) -> torch.Tensor:
        """q [T, H, D], k and v [T, KH, D] of the batch's new tokens -> [T, H, D]."""
        ...


@runtime_checkable
class CachingContext(AttentionContext, Protocol):
    """A context that takes a projection whole: it norms, rotates and caches in one launch; not differentiable."""

    def attend_qkv(
        self,
        layer_index: int,
        qkv: torch.Tensor,
        rotation: Rotation,
        norms: HeadNorms | None,
        *,
        softmax_scale: float,
        out_scaling: Scaling | None = None,
    ) -> torch.Tensor | QuantizedTensor:
        """qkv [T, (H + 2 KH) * D] of the batch's new tokens -> [T, H, D]; rotation and norms as in ops.qkv_cache.

        Args:
            out_scaling: how what comes next will quantize the result; the context may return these codes [T, H * D].
        """
        ...


@runtime_checkable
class RoundingContext(AttentionContext, Protocol):
    """A context whose keys and values may come rounded as its FP8 cache rounds them, by what has them in hand."""

    def kv_rounding(self, layer_index: int) -> KVRounding | None:
        """How they are to be rounded before attend, which is then told so; None: it takes them as they are."""
        ...

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        kv_is_rounded: bool = False,
    ) -> torch.Tensor:
        """See AttentionContext.attend."""
        ...


class PackedContext:
    """Whole sequences, one after the other: training and scoring. Differentiable.

    Args:
        cu_seqlens: [B+1] int64, cumulative lengths from 0; on a GPU it is waited for, once. Or PackedLengths.
        kv_cache_dtype: "fp8" rounds K and V as the cache does, straight-through in the backward; "bf16" leaves them.
        exact: the bits that the sampler gets for the same tokens.
        attention_dtype: "fp8" multiplies codes, straight-through too; see octavo.Numerics.
        kv_table: the model's scales of K and V where they are not one a token and head; layers that it keeps in high
            precision have neither codes nor FP8 attention.
    """

    def __init__(
        self,
        cu_seqlens: torch.Tensor | PackedLengths,
        *,
        kv_cache_dtype: str = "bf16",
        exact: bool = False,
        attention_dtype: str = "bf16",
        kv_table: KVScaleTable | None = None,
    ) -> None:
        self.lengths = PackedLengths.of(cu_seqlens)
        self.kv_table = kv_table
        self.kv_cache_dtype, self.exact, self.attention_dtype = kv_cache_dtype, exact, attention_dtype
        starts = self.lengths.cu_seqlens.long()
        per_token = torch.repeat_interleave(starts[:-1], torch.diff(starts), output_size=self.lengths.num_tokens)  # [T]
        self.positions = torch.arange(self.lengths.num_tokens, device=starts.device) - per_token

    @classmethod
    def from_lengths(
        cls,
        lengths: list[int],
        numerics: Numerics | None = None,
        device: torch.device | str = "cpu",
        kv_table: KVScaleTable | None = None,
    ) -> "PackedContext":
        """Context of sequences of these lengths under a model's numerics; waits for no device."""
        return cls.of_numerics(PackedLengths.from_lengths(lengths, device), numerics or Numerics(), kv_table)

    @classmethod
    def of_numerics(
        cls, cu_seqlens: torch.Tensor | PackedLengths, numerics: Numerics, kv_table: KVScaleTable | None = None
    ) -> "PackedContext":
        """Context of sequences of these cumulative lengths under a model's numerics.

        Raises:
            RecipeError: numerics that ask for known scales of K and V, without a table of them.
        """
        if numerics.has_known_kv_scales and kv_table is None:
            raise RecipeError(
                f"kv_scales={numerics.kv_scales!r} needs the model's table of KV scales; pass model.kv_table, or use "
                "kv_scales='per_token_head'"
            )
        return cls(
            cu_seqlens,
            kv_cache_dtype=numerics.kv_cache_dtype,
            exact=numerics.exact,
            attention_dtype=numerics.attention_dtype,
            kv_table=kv_table,
        )

    def kv_rounding(self, layer_index: int) -> KVRounding | None:
        """See RoundingContext; None too where attention itself makes codes of them."""
        return self._rounding(*self._numerics(layer_index))

    def attend(
        self,
        layer_index: int,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        *,
        softmax_scale: float,
        kv_is_rounded: bool = False,
    ) -> torch.Tensor:
        """See RoundingContext.attend."""
        dtypes, known = self._numerics(layer_index)
        if self.exact or dtypes[1] == "fp8":
            return _ExactAttention.apply(q, k, v, self.lengths, softmax_scale, dtypes, known)
        rounding = self._rounding(dtypes, known)
        if rounding is not None and not kv_is_rounded:
            k, v = (_RoundKV.apply(x, rounding, i) for i, x in enumerate((k, v)))
        return attention_packed(q, k, v, self.lengths, softmax_scale=softmax_scale)[0]

    def _numerics(self, layer_index: int) -> tuple[tuple[str, str], LayerKVScales | None]:
        """The dtypes of a layer's cache and attention, and the known scales of its K and V."""
        dtypes = (self.kv_cache_dtype, self.attention_dtype)
        if self.kv_table is None:
            return dtypes, None
        known = self.kv_table.layer(layer_index)
        return dtypes if known is not None else ("bf16", "bf16"), known

    def _rounding(self, dtypes: tuple[str, str], known: LayerKVScales | None) -> KVRounding | None:
        if self.exact or dtypes != ("fp8", "bf16"):
            return None
        return KVRounding() if known is None else KVRounding(known.scale, known.quant_scale)


class _RoundKV(torch.autograd.Function):
    """K or V as the FP8 cache would return it; the gradient passes straight through."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, rounding: KVRounding, role: int) -> torch.Tensor:
        return round_kv(x, rounding, role)

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:
        return grad, None, None


class _ExactAttention(torch.autograd.Function):
    """The sampler's attention with a straight-through gradient over the decoded keys, values and queries."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        lengths: PackedLengths,
        softmax_scale: float,
        dtypes: tuple[str, str],
        known: LayerKVScales | None,
    ) -> torch.Tensor:
        kv_cache_dtype, attention_dtype = dtypes
        out, lse = attention_packed(
            q,
            k,
            v,
            lengths,
            softmax_scale=softmax_scale,
            kv_cache_dtype=kv_cache_dtype,
            exact=True,
            attention_dtype=attention_dtype,
            known=known,
        )
        q_scale = k_scale = v_scale = None
        if kv_cache_dtype == "fp8":  # codes are saved, not their high-precision sources
            (k, k_scale), (v, v_scale) = quantize_kv(k, known, 0), quantize_kv(v, known, 1)
        if attention_dtype == "fp8":
            q, q_scale = quantize_kv(q)
        ctx.softmax_scale, ctx.lengths = softmax_scale, lengths
        ctx.save_for_backward(q, k, v, k_scale, v_scale, out, lse, q_scale)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        q, k, v, k_scale, v_scale, out, lse, q_scale = ctx.saved_tensors
        grads = attention_packed_backward(
            grad,
            q,
            k,
            v,
            k_scale,
            v_scale,
            out,
            lse,
            ctx.lengths,
            softmax_scale=ctx.softmax_scale,
            q_scale=q_scale,
        )
        return (*grads, None, None, None, None)
