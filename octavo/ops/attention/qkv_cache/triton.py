"""Triton: QK-norm, RoPE and the quantizing cache write in one launch, bit-equal to the separate kernels.

A program owns R heads of one kind. Legend: T tokens, H query heads, KH kv heads, D head_dim.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention import KV_SCALING, PAGE_SIZE, PagedKVLayer
from octavo.ops.attention.kv_scales import FLUSH_BOUND, FP8_MAX
from octavo.ops.attention.qkv_cache.reference import HeadNorms, Rotation
from octavo.ops.attention.qkv_heads.triton import turned_rows
from octavo.ops.attention.rope.triton import store_pairs
from octavo.ops.quantize.triton.device import amax_over, quant_scale_of
from octavo.ops.quantize.triton.plan import rule_of_rows

ELEMENTS = 1024  # of a program, which is one warp
LARGEST, FLUSHED = tl.constexpr(FP8_MAX), tl.constexpr(FLUSH_BOUND)


@triton.jit
def _count(counts, before, after, is_in):
    """Add what clips and what is flushed among numbers before and after their scaling."""
    clipped = tl.sum((tl.abs(after) > LARGEST).to(tl.int32), axis=1)
    flushed = tl.sum(((tl.abs(after) <= FLUSHED) & (before != 0.0)).to(tl.int32), axis=1)
    for i in tl.static_range(2):
        number = tl.sum(tl.where(is_in, clipped if i == 0 else flushed, 0))
        # both are rare, so that hardly a program has anything to add
        tl.atomic_add(counts + i, number.to(tl.int64), mask=number > 0, sem="relaxed")


@triton.jit
def _cache_rows(
    cache, scales, counts, qkv, positions, slots, cos, sin, weight, known, known_quant, tile, stride, eps, T, KH,
    first_head, ROLE: tl.constexpr, RULE: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads of K (ROLE 0) or of V (1) into the cache, quantized where it has scales."""
    row, token, is_in, first, second = turned_rows(
        None, qkv, positions, cos, sin, weight, tile, stride, eps, T, KH, first_head, HALF, TURNED, INTERLEAVED, R
    )
    slot = tl.load(slots + token, mask=is_in, other=-1)
    place = (slot // PAGE * KH + row % KH) * PAGE + slot % PAGE
    is_in &= slot >= 0
    if scales is not None:
        if known is not None:
            quant_scale = tl.zeros([R], tl.float32) + tl.load(known_quant + ROLE)
            scale = tl.zeros([R], tl.float32) + tl.load(known + ROLE)
            _count(counts + 2 * ROLE, first, first * quant_scale[:, None], is_in)
            _count(counts + 2 * ROLE, second, second * quant_scale[:, None], is_in)
        else:
            amax = tl.maximum(amax_over(first, 1), amax_over(second, 1))
            quant_scale = quant_scale_of(amax, RULE, 0)
            scale = tl.div_rn(1.0, quant_scale)
        tl.store(scales + place, scale, mask=is_in)
        first *= quant_scale[:, None]
        second *= quant_scale[:, None]
    store_pairs(cache + place * 2 * HALF, first, second, is_in, R, HALF, INTERLEAVED)


@triton.jit(do_not_specialize=("T",))
def qkv_rows(
    q_out, k_cache, v_cache, k_scale, v_scale, counts, qkv, positions, slots, cos, sin, q_weight, k_weight, known,
    known_quant, stride, eps, T, H, KH,
    RULE: tl.constexpr, PAGE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr,
    R: tl.constexpr,
):  # fmt: skip
    """R heads of Q, of K or of V: the programs' order.

    known, known_quant: [2] fp32 decode scales of K and of V and their reciprocals, counts: [2, 2] int64 (clipped and
    flushed of K, of V); None where every row of K and V makes its own scale.
    """
    pid = tl.program_id(0)
    num_q, num_k = tl.cdiv(T * H, R), tl.cdiv(T * KH, R)
    if pid < num_q:
        row, _, is_in, first, second = turned_rows(
            None, qkv, positions, cos, sin, q_weight, pid, stride, eps, T, H, 0, HALF, TURNED, INTERLEAVED, R
        )
        store_pairs(q_out + row.to(tl.int64) * 2 * HALF, first, second, is_in, R, HALF, INTERLEAVED)
    elif pid < num_q + num_k:
        _cache_rows(
            k_cache, k_scale, counts, qkv, positions, slots, cos, sin, k_weight, known, known_quant, pid - num_q,
            stride, eps, T, KH, H, 0, RULE, PAGE, HALF, TURNED, INTERLEAVED, R,
        )  # fmt: skip
    else:
        _cache_rows(
            v_cache, v_scale, counts, qkv, positions, slots, None, None, None, known, known_quant,
            pid - num_q - num_k, stride, eps, T, KH, H + KH, 1, RULE, PAGE, HALF, TURNED, INTERLEAVED, R,
        )  # fmt: skip


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
        grid = (triton.cdiv(tokens * num_heads, rows) + 2 * triton.cdiv(tokens * kv_heads, rows),)
        launch(grid, q, *cache, qkv, *tables, qkv.stride(0), eps, tokens, num_heads, kv_heads)
    return q
