# ruff: noqa: RUF005 -- triton reads no stars in lists
"""One softmax over a span of keys, which decode, prefill and every tile have in common: all that decides bits.

A product of 16 rows is the same MMA instruction whichever warp runs it, a maximum does not depend on order, and sums of
probabilities are added two at a time in an order that is written down here. FP8 codes lie two to a word: words travel
through shared memory as 16-bit numbers do, and a register's two become four fp16 with three instructions. So the even
and the odd columns are products of their own.

FP8 attention (Q_RULE and P_RULE, else None) rounds queries and probabilities to E4M3, whose values fp16 holds exactly:
it runs in the same instructions, with one scale more a row and step.
"""

import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import IS_COMPILED  # the interpreter knows no PTX
from octavo.ops.quantize.triton.device import amax_over, quant_scale_of


@triton.jit
def load_queries(
    q, first_token, kv_head, token, group, is_row, KH, G: tl.constexpr, D: tl.constexpr, Q_RULE: tl.constexpr
):  # fmt: skip
    """Queries of the tile's rows [R, D] in fp16, each over a power of two, so that it fits, or its scale; and that."""
    head = kv_head * G + group
    places = (first_token + token).to(tl.int64) * (KH * G * D) + head * D
    places = tl.expand_dims(places, -1) + tl.arange(0, D)
    values = tl.load(q + places, mask=tl.expand_dims(is_row, -1), other=0.0).to(tl.float32)
    if Q_RULE is None:
        size = tl.max(tl.abs(values), axis=-1)
        exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
        exponent = tl.maximum(exponent, 11 << 23)
        unit = (exponent - (10 << 23)).to(tl.float32, bitcast=True)  # the largest becomes 1024 to 2048
        inverse = (0x84000000 - exponent.to(tl.uint32)).to(tl.float32, bitcast=True)  # 264 << 23
        values = (values * tl.expand_dims(inverse, -1)).to(tl.float16)
    else:
        values, unit = _round_rows(values, Q_RULE)
    return values, unit


@triton.jit
def _round_rows(values, RULE: tl.constexpr):
    """Rows [R, X] as E4M3's values in fp16, and their decode scales [R]."""
    quant_scale = quant_scale_of(amax_over(values, -1), RULE, 0)
    codes = (values * tl.expand_dims(quant_scale, -1)).to(tl.float8e4nv)
    return codes.to(tl.float16), tl.div_rn(1.0, quant_scale)


@triton.jit
def _decode_pairs(words):
    """Two E4M3 codes a word as two fp16 tensors, exactly: the low bytes and the high ones."""
    if not IS_COMPILED:
        low = (words & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
        high = ((words >> 8) & 0xFF).to(tl.uint8).to(tl.float8e4nv, bitcast=True).to(tl.float16)
    else:  # triton takes the bytes apart one by one
        low, high = tl.inline_asm_elementwise(
            """{
            .reg .b32 bytes; .reg .b16 first, second;
            prmt.b32 bytes, $2, 0, 0x3120;
            mov.b32 {first, second}, bytes;
            cvt.rn.f16x2.e4m3x2 $0, first;
            cvt.rn.f16x2.e4m3x2 $1, second;
            }""",
            "=r,=r,r",
            [words],
            dtype=(tl.float16, tl.float16),
            is_pure=True,
            pack=2,
        )
    return low, high


@triton.jit
def _for_each_group(x, GROUPS: tl.constexpr):
    """An operand that all groups of rows share, [..] or [1, ..] -> [GROUPS, ..]."""
    if GROUPS > 1:
        x = tl.broadcast_to(x, [GROUPS, x.shape[1], x.shape[2]])
    return x


@triton.jit
def _load_factors(places, is_key, BLOCK: tl.constexpr, COPIES: tl.constexpr):
    """Scales of keys and of values [BLOCK] in one load; in copies, where it has fewer numbers than the program threads.

    Triton takes such a load for cheap and lets every thread fetch all that it will need of it, number by number.
    """
    factors = tl.load(places, mask=is_key[:, None], other=0.0)
    if COPIES == 2:
        factors, _ = tl.split(tl.trans(tl.reshape(factors, [BLOCK, 2, 2]), 0, 2, 1))
    k_factor, v_factor = tl.split(factors)
    return k_factor, v_factor


@triton.jit
def _add_some(p, ROWS: tl.constexpr, BLOCK: tl.constexpr):
    """Sums of the keys that one thread holds whatever the warps, [R, BLOCK] -> [R, 16]: two numbers at a time."""
    pairs = tl.sum(tl.reshape(p, ROWS + [BLOCK // 32, 16, 2]), axis=-1)
    return tl.sum(pairs, axis=-2)


@triton.jit
def _add_all(sums, ROWS: tl.constexpr):
    """[R, 16] -> [R], two numbers at a time: no layout can change the order."""
    sums = tl.sum(tl.reshape(sums, ROWS + [8, 2]), axis=-1)
    sums = tl.sum(tl.reshape(sums, ROWS + [4, 2]), axis=-1)
    sums = tl.sum(tl.reshape(sums, ROWS + [2, 2]), axis=-1)
    return tl.sum(sums, axis=-1)


@triton.jit
def attend_split(
    q, q_odd, factor, k_cache, v_cache, k_scale, v_scale, table, kv_head, first_key, end_key, seq_len, positions, KH,
    ROWS: tl.constexpr, GROUPS: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr,
    SHIFT: tl.constexpr, STAGES: tl.constexpr, COPIES: tl.constexpr, P_RULE: tl.constexpr,
):  # fmt: skip
    """One softmax over the keys [first_key, end_key): maximum [R], sum [R] and unnormalised output [R, D], fp32."""
    slot = tl.arange(0, BLOCK)
    WORDS: tl.constexpr = D if v_scale is None else D // 2
    slots = slot[:, None] if GROUPS == 1 else slot[None, :, None]
    offsets = slots * WORDS + tl.arange(0, WORDS)
    if k_scale is not None:
        apart = (v_scale.to(tl.int64) - k_scale.to(tl.int64)) // 4
        scale_offsets = slot[:, None] + (tl.arange(0, 2 * COPIES) % 2)[None, :] * apart
    raw_maximum = tl.full(ROWS, float("-inf"), tl.float32)
    maximum = tl.full(ROWS, float("-inf"), tl.float32)
    sums = tl.zeros(ROWS + [16], tl.float32)
    acc = tl.zeros(ROWS + [WORDS], tl.float32)
    odd = tl.zeros(ROWS + [WORDS], tl.float32)
    # known an iteration ahead: a page looked up in its own would take stages of the pipeline from the keys
    page = tl.load(table + first_key // PAGE)
    for start in tl.range(first_key, end_key, BLOCK, num_stages=STAGES):
        first_slot = (page.to(tl.int64) * KH + kv_head) * PAGE + start % PAGE
        page = tl.load(table + tl.minimum(start + BLOCK, end_key - 1) // PAGE)
        k = tl.load(k_cache + first_slot * WORDS + offsets)
        # a page's slots behind the sequence hold another's remains, which may be NaN
        is_key = slot < seq_len - start
        is_value = is_key[:, None] if GROUPS == 1 else is_key[None, :, None]
        v = tl.load(v_cache + first_slot * WORDS + offsets, mask=is_value, other=0)
        k = tl.trans(k) if GROUPS == 1 else tl.trans(k, 0, 2, 1)
        if k_scale is not None:
            low, high = _decode_pairs(k)
            scores = tl.dot(q, _for_each_group(low, GROUPS))
            scores = tl.dot(q_odd, _for_each_group(high, GROUPS), scores)
            k_factor, v_factor = _load_factors(k_scale + first_slot + scale_offsets, is_key, BLOCK, COPIES)
            scores *= k_factor
        else:
            scores = tl.dot(q.to(k.dtype), _for_each_group(k, GROUPS))
        scores = tl.where(slot <= tl.expand_dims(positions - start, -1), scores, float("-inf"))
        raw_maximum = tl.maximum(raw_maximum, tl.max(scores, axis=-1))
        safe = tl.where(raw_maximum == float("-inf"), 0.0, raw_maximum) * factor - SHIFT
        p = tl.exp2(tl.fma(scores, tl.expand_dims(factor, -1), tl.expand_dims(-safe, -1)))
        shrink = tl.expand_dims(tl.exp2(maximum - safe), -1)
        sums = sums * shrink + _add_some(p, ROWS, BLOCK)
        if v_scale is not None:
            p *= v_factor
            low, high = _decode_pairs(v)
            if P_RULE is None:
                weights = p.to(tl.float16)
                acc = tl.dot(weights, _for_each_group(low, GROUPS), acc * shrink)
                odd = tl.dot(weights, _for_each_group(high, GROUPS), odd * shrink)
            else:
                weights, unit = _round_rows(p, P_RULE)  # of a row's 64 keys: what it does not see is zero
                unit = tl.expand_dims(unit, -1)
                acc = acc * shrink + tl.dot(weights, _for_each_group(low, GROUPS)) * unit
                odd = odd * shrink + tl.dot(weights, _for_each_group(high, GROUPS)) * unit
        else:
            acc = tl.dot(p.to(v.dtype), _for_each_group(v, GROUPS), acc * shrink)
        maximum = raw_maximum * factor - SHIFT
    if v_scale is not None:
        acc = tl.reshape(tl.join(acc, odd), ROWS + [D])
    return maximum, _add_all(sums, ROWS), acc
