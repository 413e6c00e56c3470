"""Triton: QK-norm, RoPE and the quantizing cache write in one launch, bit-equal to the separate kernels.

A program owns R heads of one token. Legend: T tokens, H query heads, KH kv heads, D head_dim.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention import KV_SCALING, PAGE_SIZE, PagedKVLayer
from octavo.ops.attention.kv_scales import FLUSH_BOUND, FP8_MAX
from octavo.ops.attention.qkv_cache.reference import HeadNorms, Rotation
from octavo.ops.attention.rope.triton import split_pairs, store_pairs, turn_pairs
from octavo.ops.norm.triton import inverse_root, tree_sum
from octavo.ops.quantize.triton.casts import round_to, widen
from octavo.ops.quantize.triton.device import amax_over, quant_scale_of
from octavo.ops.quantize.triton.plan import rule_of_rows

ELEMENTS = 1024  # of a program, which is one warp
LARGEST, FLUSHED = tl.constexpr(FP8_MAX), tl.constexpr(FLUSH_BOUND)


@triton.jit
def _count(counts, before, after, is_k, is_v):
    """Add what clips and what is flushed among numbers before and after their scaling, of K and of V."""
    clipped = tl.sum((tl.abs(after) > LARGEST).to(tl.int32), axis=1)
    flushed = tl.sum(((tl.abs(after) <= FLUSHED) & (before != 0.0)).to(tl.int32), axis=1)
    for i in tl.static_range(2):
        found = clipped if i == 0 else flushed
        of_k, of_v = tl.sum(tl.where(is_k, found, 0)), tl.sum(tl.where(is_v, found, 0))
        # both are rare, so that hardly a program has anything to add
        tl.atomic_add(counts + i, of_k.to(tl.int64), mask=of_k > 0, sem="relaxed")
        tl.atomic_add(counts + 2 + i, of_v.to(tl.int64), mask=of_v > 0, sem="relaxed")


@triton.jit
def qkv_rows(
    q_out, k_cache, v_cache, k_scale, v_scale, counts, qkv, positions, slots, cos, sin, q_weight, k_weight, known,
    known_quant, stride, eps, H, KH,
    RULE: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """R heads of one token.

    known, known_quant: [2] fp32 decode scales of K and of V and their reciprocals, counts: [2, 2] int64 (clipped and
    flushed of K, of V); None where every row of K and V makes its own scale.
    """
    D: tl.constexpr = 2 * HALF
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    num_heads = H + 2 * KH
    num_parts = tl.cdiv(num_heads, R)
    token = (tl.program_id(0) // num_parts).to(tl.int64)
    head = tl.program_id(0) % num_parts * R + tl.arange(0, R)
    is_row = head < num_heads
    is_v = head >= H + KH
    is_k = (head >= H) & (head < H + KH)
    d = tl.arange(0, D)[None, :]
    values = widen(tl.load(qkv + token * stride + head[:, None] * D + d, mask=is_row[:, None], other=0.0))
    if q_weight is not None:
        rstd = inverse_root(tree_sum(values * values), D, eps)
        gamma = tl.where(is_k[:, None], widen(tl.load(k_weight + d)), widen(tl.load(q_weight + d)))
        values = tl.where(is_v[:, None], values, round_to(values * rstd[:, None] * gamma, DTYPE))
    position = tl.load(positions + token)
    first, second = split_pairs(values, R, HALF, INTERLEAVED)
    turned_first, turned_second = turn_pairs(
        first, second, position, cos, sin, R, HALF, TURNED, INTERLEAVED, DTYPE, False
    )
    q_places = q_out + token * H * D + head * D
    store_pairs(q_places, turned_first, turned_second, head < H, R, HALF, INTERLEAVED)
    first = tl.where(is_v[:, None], first, turned_first)
    second = tl.where(is_v[:, None], second, turned_second)
    slot = tl.load(slots + token)
    place = (slot // PAGE * KH + (head - H) % KH) * PAGE + slot % PAGE
    is_k &= slot >= 0
    is_v &= is_row & (slot >= 0)
    if k_scale is not None:
        if known is not None:
            quant_scale = tl.where(is_v, tl.load(known_quant + 1), tl.load(known_quant))
            scale = tl.where(is_v, tl.load(known + 1), tl.load(known))
            _count(counts, first, first * quant_scale[:, None], is_k, is_v)
            _count(counts, second, second * quant_scale[:, None], is_k, is_v)
        else:
            amax = tl.maximum(amax_over(tl.abs(first), 1), amax_over(tl.abs(second), 1))
            quant_scale = quant_scale_of(amax, RULE, 0)
            scale = tl.div_rn(1.0, quant_scale)
        tl.store(k_scale + place, scale, mask=is_k)
        tl.store(v_scale + place, scale, mask=is_v)
        first *= quant_scale[:, None]
        second *= quant_scale[:, None]
    store_pairs(k_cache + place * D, first, second, is_k, R, HALF, INTERLEAVED)
    store_pairs(v_cache + place * D, first, second, is_v, R, HALF, INTERLEAVED)


def can_fuse(qkv: torch.Tensor, layer: PagedKVLayer, rotation: Rotation) -> bool:
    """Whether the kernel takes these: 16 bits, heads of a power of two that turn whole by halves, or by neighbours."""
    dim = layer.k.shape[3]
    is_known = qkv.element_size() == 2 and (layer.is_fp8 or layer.k.dtype == qkv.dtype)
    fits = rotation.interleaved or 2 * rotation.cos.shape[1] == dim
    if layer.known is not None and layer.known.is_calibrating:
        return False  # the scales come from all rows, before any is written
    return is_known and fits and dim & (dim - 1) == 0 and 16 <= dim <= ELEMENTS


def qkv_to_cache(
    qkv: torch.Tensor,
    layer: PagedKVLayer,
    slot_mapping: torch.Tensor,
    rotation: Rotation,
    norms: HeadNorms | None,
) -> torch.Tensor:
    """As octavo.ops.attention.qkv_cache.qkv_to_cache, for what can_fuse accepts."""
    qkv = qkv if qkv.stride(1) == 1 else qkv.contiguous()
    _, kv_heads, _, dim = layer.k.shape
    tokens, num_heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    q = torch.empty(tokens, num_heads, dim, dtype=qkv.dtype, device=qkv.device)
    if not tokens:
        return q
    q_weight, k_weight, eps, _ = norms or (None, None, 0.0, False)
    rows = ELEMENTS // dim
    with on_device_of(qkv):
        # no contraction: the separate ops round every product
        launch = launcher_of(
            qkv_rows, RULE=rule_of_rows(KV_SCALING, qkv.dtype), PAGE=PAGE_SIZE, HALF=dim // 2,
            TURNED=rotation.cos.shape[1], INTERLEAVED=rotation.interleaved, R=rows, num_warps=1, enable_fp_fusion=False,
        )  # fmt: skip
        known = layer.known
        scale, quant_scale, counts = (
            (None, None, None) if known is None else (known.scale, known.quant_scale, known.counts)
        )
        cache = (layer.k, layer.v, layer.k_scale, layer.v_scale, counts)
        tables = (rotation.positions, slot_mapping, rotation.cos, rotation.sin, q_weight, k_weight, scale, quant_scale)
        grid = (tokens * triton.cdiv(num_heads + 2 * kv_heads, rows),)
        launch(grid, q, *cache, qkv, *tables, qkv.stride(0), eps, num_heads, kv_heads)
    return q
