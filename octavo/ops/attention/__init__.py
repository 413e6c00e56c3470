"""Attention with grouped queries: over packed sequences (training, scoring) and over the paged KV cache.

Legend: T tokens, B sequences, H query heads, KH kv heads, D head_dim.
"""

import torch

from octavo import env
from octavo.deprecation import former_keywords
from octavo.errors import BackendError, DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.attention import reference
from octavo.ops.attention.cache import (
    KV_SCALING,
    PAGE_SIZE,
    KVRounding,
    PagedKVLayer,
    allocate_kv_layer,
    as_pages,
    check_attention_dtype,
    quantize_kv,
    round_kv,
    write_kv,
)
from octavo.ops.attention.kv_scales import KVScaleTable, LayerKVScales, LayerShares
from octavo.ops.attention.library import attend_batch, attend_library, attend_packed
from octavo.ops.attention.mixed import ANY_ROWS, MixedBatch
from octavo.ops.attention.padding import PackedLengths, PaddedLayout
from octavo.ops.attention.varlen import attend_varlen, takes_pack
from octavo.ops.quantize import quantize

__all__ = [
    "KV_SCALING",
    "PAGE_SIZE",
    "KVRounding",
    "KVScaleTable",
    "LayerKVScales",
    "LayerShares",
    "MixedBatch",
    "PackedLengths",
    "PaddedLayout",
    "PagedKVLayer",
    "allocate_kv_layer",
    "attention_batch",
    "attention_mixed",
    "attention_packed",
    "attention_packed_backward",
    "attention_paged",
    "has_kernel",
    "mixed_tile_rows",
    "quantize_kv",
    "round_kv",
    "write_kv",
]


def attention_batch(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, *, softmax_scale: float, causal: bool = True
) -> torch.Tensor:
    """Attention of a batch of equally long sequences through torch's SDPA; differentiable.

    Args:
        q: [B, S, H, D].
        k: [B, S, KH, D], same dtype; H a multiple of KH.
        v: as k.
    Returns:
        [B, S, H, D] of q's dtype.
    Raises:
        ShapeError: if heads and lengths do not fit together.
        DtypeError: q, k and v of several dtypes.
    """
    _check_heads(q, k, v, 4)
    return attend_batch(q, k, v, softmax_scale, causal) if q.numel() else _of_no_tokens(q, k, v)


def attention_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    cu_seqlens: torch.Tensor | PackedLengths,
    *,
    softmax_scale: float,
    kv_cache_dtype: str = "bf16",
    exact: bool = False,
    causal: bool = True,
    attention_dtype: str = "bf16",
    known: LayerKVScales | None = None,
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Variable-length attention over sequences that lie one after the other.

    Args:
        q: [T, H, D] bf16 or fp32.
        k: [T, KH, D], same dtype; H a multiple of KH.
        v: as k.
        cu_seqlens: [B+1] int, cumulative lengths from 0 to T, which on a GPU is waited for; or PackedLengths, made
            once for all layers.
        softmax_scale: factor of the scores, usually D**-0.5.
        kv_cache_dtype: "fp8" quantizes K and V per token and head first, as the cache does; "bf16" does not.
        exact: the bits that attention_paged(exact=True) gives for the same tokens; not differentiable by autograd
            (attention_packed_backward is its gradient). Otherwise torch's kernels, and for ragged sequences octavo's on
            Hopper; differentiable for "bf16".
        causal: a token sees itself and earlier ones; else its whole sequence.
        attention_dtype: "fp8" quantizes queries per token and head, and a row's probabilities, times V's scales, per
            64 keys (docs/numerics.md). It is computed one way, exact or not.
        known: with kv_cache_dtype="fp8", the layer's scales of K and V; None makes one a token and head.
    Returns:
        (out [T, H, D] of q's dtype, lse [T, H] fp32 where exact or in FP8, else None).
    Raises:
        ShapeError: if heads, tokens and lengths do not fit together.
        BackendError: exact or FP8 without causal.
        DtypeError: q, k and v of several dtypes; FP8 attention without FP8 keys and values.
    """
    _check_heads(q, k, v, 3)
    check_attention_dtype(attention_dtype, kv_cache_dtype)
    is_fp8 = attention_dtype == "fp8"
    exact = exact or is_fp8
    if exact and not causal:
        kind = "FP8" if is_fp8 else "exact"
        other = "attention_dtype='bf16'" if is_fp8 else "exact=False"
        raise BackendError(f"{kind} attention is causal, got causal=False; use {other}")
    lengths = _measure(cu_seqlens, q.shape[0])
    if q.shape[0] == 0:
        return _of_no_tokens(q, k, v), q.new_zeros(q.shape[:2], dtype=torch.float32) if exact else None
    is_coded = kv_cache_dtype == "fp8"
    (k, k_scale), (v, v_scale) = (quantize_kv(x, known, i) if is_coded else (x, None) for i, x in enumerate((k, v)))
    if not exact:
        k, v = (_decode(x, s, q.dtype) for x, s in ((k, k_scale), (v, v_scale)))
        if causal and softmax_scale > 0 and takes_pack(q, k, v, lengths):
            return attend_varlen(q, k, v, lengths, softmax_scale), None
        return attend_packed(q, k, v, lengths, softmax_scale, causal), None
    if _has_kernel(q):
        cache = (k, v, k_scale, v_scale)
        return _packed_by_pages(q, cache, lengths, softmax_scale, attention_dtype)
    layout = lengths.padded
    fixed = [reference.as_fixed_rows(x, s) for x, s in ((k, k_scale), (v, v_scale))]
    (k, k_scale), (v, v_scale) = ((layout.pad(x).transpose(1, 2), layout.pad(s).transpose(1, 2)) for x, s in fixed)
    visible = layout.pad(layout.offset + 1)  # [B, L]
    return _attend_exactly(q, layout, (k, v, k_scale, v_scale), visible, softmax_scale, is_fp8=is_fp8)


def attention_packed_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    out: torch.Tensor,
    lse: torch.Tensor,
    cu_seqlens: torch.Tensor | PackedLengths,
    *,
    softmax_scale: float,
    q_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of attention_packed(exact=True), straight-through for the quantization of Q, K, V and probabilities.

    Args:
        grad_out: [T, H, D].
        q: [T, H, D].
        out: [T, H, D].
        k: [T, KH, D] codes (with scales [T, KH]) or high precision.
        v: as k.
        lse: [T, H] fp32.
        q_scale: [T, H] where q is codes (attention_dtype="fp8"), else None.
    Returns:
        (grad_q [T, H, D], grad_k, grad_v [T, KH, D]) of out's dtype.
    """
    lengths = _measure(cu_seqlens, q.shape[0])
    if q.shape[0] == 0:
        return torch.zeros_like(out), torch.zeros_like(k, dtype=out.dtype), torch.zeros_like(v, dtype=out.dtype)
    if _has_kernel(out):
        from octavo.ops.attention.triton.backward import attend_backward

        q = q if q_scale is None else _decode(q, q_scale, out.dtype)
        return attend_backward(grad_out, q, (k, v, k_scale, v_scale), out, lse, lengths, softmax_scale)
    layout = lengths.padded
    q = q if q_scale is None else _decode(q, q_scale, torch.float32)
    k, v = (_decode(x, s, torch.float32) for x, s in ((k, k_scale), (v, v_scale)))
    visible = layout.pad(layout.offset + 1)
    grads = reference.attend_backward(
        layout.pad(grad_out),
        layout.pad(q),
        layout.pad(k),
        layout.pad(v),
        layout.pad(out),
        layout.pad(lse),
        visible,
        softmax_scale,
    )
    return tuple(layout.unpad(g).to(out.dtype) for g in grads)  # type: ignore[return-value]


@former_keywords(block_tables="page_tables")
def attention_paged(
    q: torch.Tensor,
    cache: PagedKVLayer,
    page_tables: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    seq_lens: torch.Tensor,
    *,
    softmax_scale: float,
    exact: bool = False,
    max_query_len: int | None = None,
    max_seq_len: int | None = None,
    out_scaling: Scaling | None = None,
) -> torch.Tensor | QuantizedTensor:
    """Attention of new tokens over the paged cache, in which their own K and V already stand (write_kv).

    Prefill, chunks of a prefill and decode in one call: a sequence's new tokens are its last ones.

    Args:
        q: [T, H, D], the new tokens of B sequences one after the other.
        cache: one layer's pages. Its attention_dtype "fp8" is as in attention_packed, exact or not.
        page_tables: [B, max_pages] int32, pages in order; entries beyond a sequence's pages may be anything valid.
        cu_seqlens_q: [B+1] int, cumulative counts of new tokens.
        seq_lens: [B] int, tokens in all, new ones included.
        exact: bits depend on the sequence alone; else torch's SDPA over the decoded cache. On a GPU, for 16-bit q and
            a head_dim of 32, 64, 128 or 256, one kernel serves both; not exact, it takes faster tiles for
            many new tokens, and one softmax for all keys of long sequences where they are not split over programs.
        max_query_len: bound of a sequence's new tokens; without it a GPU is waited for. It changes no bit.
        max_seq_len: bound of a sequence's length; likewise.
    Returns:
        [T, H, D] of q's dtype.
    """
    if q.shape[0] == 0:
        return torch.zeros_like(q)
    is_fp8 = cache.attention_dtype == "fp8"
    if _has_kernel(q):
        from octavo.ops.attention import triton

        if max_query_len is None:
            max_query_len = int((cu_seqlens_q[1:] - cu_seqlens_q[:-1]).max())
        if max_seq_len is None:
            max_seq_len = int(seq_lens.max())
        tables, starts, lens = (x.to(torch.int32) for x in (page_tables, cu_seqlens_q, seq_lens))
        queries = triton.Queries(tables.contiguous(), starts, lens, max_query_len, max_seq_len)
        fused = out_scaling
        if out_scaling is not None and not triton.can_quantize(out_scaling, q.shape[2], queries):
            fused = None
        out, _ = triton.attention_paged(q.contiguous(), cache, queries, softmax_scale, exact=exact, out_scaling=fused)
        return _quantized(out, out_scaling) if isinstance(out, torch.Tensor) else out
    layout = PaddedLayout.from_cu_seqlens(cu_seqlens_q, q.shape[0])
    lengths = (cu_seqlens_q[1:] - cu_seqlens_q[:-1]).long()
    first_position = seq_lens.long() - lengths  # [B]
    visible = layout.pad(first_position[layout.sequence] + layout.offset + 1)  # [B, Lq]
    num_pages = -(-int(seq_lens.max()) // PAGE_SIZE)
    pages = page_tables[:, :num_pages].long()
    # slots behind a sequence's end may hold another's remains: they must not even be multiplied by zero
    is_empty = torch.arange(num_pages * PAGE_SIZE, device=q.device) >= seq_lens[:, None]  # [B, Lk]
    k, v = (_gather(x, pages, is_empty) for x in (cache.k, cache.v))  # [B, KH, Lk, D]
    k_scale, v_scale = (None if s is None else _gather(s, pages, is_empty) for s in (cache.k_scale, cache.v_scale))
    if not exact and not is_fp8:
        k, v = (_decode(x, s, q.dtype) for x, s in ((k, k_scale), (v, v_scale)))
        return _quantized(layout.unpad(attend_library(layout.pad(q), k, v, visible, softmax_scale)), out_scaling)
    (k, k_scale), (v, v_scale) = (reference.as_fixed_rows(x, s) for x, s in ((k, k_scale), (v, v_scale)))
    out, _ = _attend_exactly(q, layout, (k, v, k_scale, v_scale), visible, softmax_scale, is_fp8=is_fp8)
    return _quantized(out, out_scaling)


def attention_mixed(
    q: torch.Tensor,
    cache: PagedKVLayer,
    batch: MixedBatch,
    out: torch.Tensor,
    *,
    softmax_scale: float,
    exact: bool = False,
) -> None:
    """attention_paged of a step whose distribution over sequences only the device needs to know.

    With a kernel (see has_kernel) it can be captured in a CUDA graph; the reference waits for the device.

    Args:
        q: [T, H, D].
        cache: one layer's pages, in which the new tokens' keys and values stand.
        out: [T, H, D] of q's dtype; padding tokens' rows stay as they are.
        exact: the bits of attention_paged(exact=True).
    """
    if has_kernel(q.dtype, q.shape[2], q.device):
        from octavo.ops.attention import triton

        triton.attention_mixed(q.contiguous(), cache, batch, softmax_scale, out, exact=exact)
        return
    n = int((batch.seq_lens > 0).sum())
    starts = batch.cu_seqlens[: n + 1]
    end = int(starts[-1])
    tables, lens = batch.page_tables[:n], batch.seq_lens[:n]
    found = attention_paged(q[:end], cache, tables, starts, lens, softmax_scale=softmax_scale, exact=exact)
    assert isinstance(found, torch.Tensor), "no codes were asked for"
    out[:end] = found


def mixed_tile_rows(layers: list[PagedKVLayer], *, exact: bool) -> int:
    """Rows of a tile in attention_mixed's lists for a cache: of a layer's smallest."""
    if layers[0].k.device.type == "cpu":
        return ANY_ROWS
    from octavo.ops.attention import triton

    return min(triton.mixed_tile_rows(layer, exact=exact) for layer in layers)


def _quantized(out: torch.Tensor, scaling: Scaling | None) -> torch.Tensor | QuantizedTensor:
    """The output [T, H, D], or its codes [T, H * D]."""
    return out if scaling is None else quantize(out.reshape(out.shape[0], -1), scaling)


def has_kernel(dtype: torch.dtype, head_dim: int, device: torch.device) -> bool:
    """Whether the Triton kernel takes such queries."""
    fits = dtype.itemsize == 2 and head_dim in (32, 64, 128, 256)
    return device.type == "cuda" and fits and not env.force_reference()


def _has_kernel(q: torch.Tensor) -> bool:
    return has_kernel(q.dtype, q.shape[-1], q.device)


def _attend_exactly(
    q: torch.Tensor,
    layout: PaddedLayout,
    kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    softmax_scale: float,
    *,
    is_fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """The reference over packed queries [T, H, D] and padded keys and values: (out of q's dtype, lse [T, H])."""
    rows, q_scale = q, None
    if is_fp8:
        rows, scale = reference.as_fixed_rows(*quantize_kv(q))
        q_scale = layout.pad(scale)
    out, lse = reference.attend(layout.pad(rows), *kv, visible, softmax_scale, q_scale)
    return layout.unpad(out).to(q.dtype), layout.unpad(lse)


def _packed_by_pages(
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    lengths: PackedLengths,
    softmax_scale: float,
    attention_dtype: str,
) -> tuple[torch.Tensor, torch.Tensor]:
    """attention_packed(exact=True) on a GPU: the packed keys and values as pages, so that the sampler's kernel runs."""
    from octavo.ops.attention import triton

    layer, tables = as_pages(kv, lengths, attention_dtype)
    starts = lengths.cu_seqlens
    queries = triton.Queries(tables, starts, starts[1:] - starts[:-1], lengths.max_len, lengths.max_len)
    out, lse = triton.attention_paged(q.contiguous(), layer, queries, softmax_scale, with_lse=True)
    assert isinstance(out, torch.Tensor) and lse is not None, "they were asked for"
    return out, lse


def _gather(cache: torch.Tensor, pages: torch.Tensor, is_empty: torch.Tensor) -> torch.Tensor:
    """[pages, KH, PAGE, ...] at [B, P] -> [B, KH, P*PAGE, ...], zero where is_empty [B, P*PAGE].

    Codes travel as bytes: float8 has no gather on a CPU.
    """
    is_code = cache.dtype == KV_SCALING.dtype
    picked = (cache.view(torch.uint8) if is_code else cache)[pages]  # [B, P, KH, PAGE, ...]
    picked = picked.transpose(1, 2)
    picked = picked.reshape(picked.shape[0], picked.shape[1], -1, *picked.shape[4:])
    picked.transpose(1, 2)[is_empty] = 0
    return picked.view(cache.dtype) if is_code else picked


def _decode(x: torch.Tensor, scale: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor:
    return x.to(dtype) if scale is None else (x.float() * scale[..., None]).to(dtype)


def _of_no_tokens(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> torch.Tensor:
    """The empty output, which hands empty gradients on, so that the projections' weights get zeros and not None."""
    return q + (k.sum() + v.sum())


def _measure(cu_seqlens: torch.Tensor | PackedLengths, num_tokens: int) -> PackedLengths:
    lengths = PackedLengths.of(cu_seqlens)
    lengths.check(num_tokens)
    return lengths


def _check_heads(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, dims: int) -> None:
    fits = q.dim() == k.dim() == dims and k.shape == v.shape
    if not fits or q.shape[:-2] != k.shape[:-2] or q.shape[-1] != k.shape[-1] or q.shape[-2] % k.shape[-2]:
        tokens = "T" if dims == 3 else "B, S"
        raise ShapeError(
            f"attention takes q [{tokens}, H, D] and k, v [{tokens}, KH, D] with H a multiple of KH, got "
            f"{tuple(q.shape)}, {tuple(k.shape)}, {tuple(v.shape)}"
        )
    if not q.dtype == k.dtype == v.dtype:
        raise DtypeError(f"attention takes q, k and v of one dtype, got {q.dtype}, {k.dtype} and {v.dtype}")
