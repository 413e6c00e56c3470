# ruff: noqa: RUF005 -- triton reads no stars in lists
"""The kernel of paged attention: tiles of rows over their keys.

Legend: T tokens, B sequences, H query heads, KH kv heads, G = H / KH, D head_dim, R rows of a group.
"""

import triton
import triton.language as tl

from octavo.ops.attention.triton.split import attend_split, load_queries
from octavo.ops.quantize.triton.casts import round_to
from octavo.ops.quantize.triton.device import amax_over, decode_scale_of, quant_scale_of

# What differs from step to step and makes no kernel faster: a compilation for each of its kinds would stall a step.
_SIZES = ("table_stride", "num_splits", "B", "T")
_PLACES = ("page_tables", "cu_seqlens", "seq_lens", "work")


@triton.jit
def _find_sequence(cu_seqlens, index, B, G: tl.constexpr, R: tl.constexpr):
    """The sequence b of a token (R = 0), or of a tile: those before b take cu[b] * G // R + b tiles at most."""
    low = 0
    high = B
    while high - low > 1:
        middle = (low + high) // 2
        first = tl.load(cu_seqlens + middle)
        if R > 0:
            first = first * G // R + middle
        if first <= index:
            low = middle
        else:
            high = middle
    return low


@triton.jit
def _merge(maximum, total, acc, split_maximum, split_total, split_acc):
    """Add a later split to the earlier ones."""
    new_maximum = tl.maximum(maximum, split_maximum)
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    keep = tl.exp2(maximum - safe)
    add = tl.exp2(split_maximum - safe)
    total = total * keep + split_total * add
    acc = acc * tl.expand_dims(keep, -1) + split_acc * tl.expand_dims(add, -1)
    return new_maximum, total, acc


@triton.jit
def store_heads(
    out, out_scale, lse, maximum, total, acc, token, head, is_row, scale_stride, H,
    ROWS: tl.constexpr, D: tl.constexpr, LN_2: tl.constexpr, DTYPE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """Normalised rows [R, D] of tokens' heads, in DTYPE or, under a RULE, its codes; and logs of their sums.

    RULE: of blocks of 128, of which a head has a whole number; out_scale [H * D / 128, scale_stride].
    """
    row = token * H + head
    places = tl.expand_dims(row.to(tl.int64) * D, -1) + tl.arange(0, D)
    values = acc * tl.expand_dims(tl.div_rn(1.0, total), -1)
    if RULE is None:
        values = values.to(DTYPE)
    else:
        GROUPS: tl.constexpr = D // RULE[6]
        grouped = tl.reshape(round_to(values, DTYPE), ROWS + [GROUPS, RULE[6]])
        amax = amax_over(grouped, -1)  # [R, GROUPS]
        groups = tl.expand_dims(head * GROUPS, -1) + tl.arange(0, GROUPS)
        scale_places = groups.to(tl.int64) * scale_stride + tl.expand_dims(token, -1)
        tl.store(out_scale + scale_places, decode_scale_of(amax, RULE, 0), mask=tl.expand_dims(is_row, -1))
        codes = (grouped * tl.expand_dims(quant_scale_of(amax, RULE, 0), -1)).to(RULE[1])
        values = tl.reshape(codes, ROWS + [D])
    tl.store(out + places, values, mask=tl.expand_dims(is_row, -1))
    if lse is not None:
        tl.store(lse + row, (maximum + tl.log2(total)) * LN_2, mask=is_row)


@triton.jit(do_not_specialize=_SIZES, do_not_specialize_on_alignment=_PLACES)
def attend_tiles(
    out, out_scale, lse, part_acc, part_stats, arrivals, q, k_cache, v_cache, k_scale, v_scale, page_tables, cu_seqlens,
    seq_lens, work, scale, table_stride, num_splits, B, T, KH,
    G: tl.constexpr, D: tl.constexpr, GROUPS: tl.constexpr, R: tl.constexpr, PAGE: tl.constexpr,
    BLOCK: tl.constexpr, SPLIT: tl.constexpr, IS_ONE_SPLIT: tl.constexpr, SHIFT: tl.constexpr, LN_2: tl.constexpr,
    STAGES: tl.constexpr, COPIES: tl.constexpr, Q_RULE: tl.constexpr, P_RULE: tl.constexpr, OUT_RULE: tl.constexpr,
    IS_ONE_TOKEN: tl.constexpr,
):  # fmt: skip
    """One tile: one of its splits, left in part_* and merged by who comes last, or all of them.

    IS_ONE_TOKEN: every sequence has one new token, and one tile: nothing has to be found, load after load.
    work: None, or what each program takes, see mixed.py: splits where IS_ONE_SPLIT, else tiles.
    """
    tile = tl.num_programs(0) - 1 - tl.program_id(0)  # a sequence's last ones take longest and go first
    kv_head = tl.program_id(1)
    ROWS: tl.constexpr = [R] if GROUPS == 1 else [GROUPS, R]
    TILE: tl.constexpr = GROUPS * R
    split = tl.program_id(2)
    b = tile
    first_row = 0
    if work is not None:
        b = tl.load(work + 2 * tile)
        if b < 0:
            return
        if IS_ONE_SPLIT:
            split = tl.load(work + 2 * tile + 1)
        else:
            first_row = tl.load(work + 2 * tile + 1)
            if first_row % TILE != 0:
                return
    if IS_ONE_TOKEN:
        first_token = b
        num_tokens = 1
    else:
        if work is None:
            b = _find_sequence(cu_seqlens, tile, B, G, TILE)
        first_token = tl.load(cu_seqlens + b)
        num_tokens = tl.load(cu_seqlens + b + 1) - first_token
        if work is None:
            first_row = (tile - (first_token * G // TILE + b)) * TILE
        if first_row >= num_tokens * G:
            return
    seq_len = tl.load(seq_lens + b)
    row = first_row + tl.reshape(tl.arange(0, TILE), ROWS)
    token = row // G
    is_row = token < num_tokens
    # rows that do not exist see what the tile's last one sees, so that no softmax is empty
    positions = seq_len - num_tokens + tl.minimum(token, num_tokens - 1)
    end = tl.minimum(seq_len, seq_len - num_tokens + (first_row + TILE - 1) // G + 1)
    queries, unit = load_queries(q, first_token, kv_head, token, row % G, is_row, KH, G, D, Q_RULE)
    factor = unit * scale
    head = kv_head * G + row % G
    place = (first_token + token) * (KH * G) + head
    odd = queries
    if v_scale is not None:
        queries, odd = tl.split(tl.reshape(queries, ROWS + [D // 2, 2]))
        k_cache = k_cache.to(tl.pointer_type(tl.int16), bitcast=True)
        v_cache = v_cache.to(tl.pointer_type(tl.int16), bitcast=True)
    table = page_tables + b.to(tl.int64) * table_stride
    caches = (k_cache, v_cache, k_scale, v_scale, table, kv_head)
    is_part = tl.expand_dims(is_row, -1)
    if IS_ONE_SPLIT:
        if split * SPLIT < end:
            maximum, total, acc = attend_split(
                queries, odd, factor, *caches, split * SPLIT, tl.minimum(end, split * SPLIT + SPLIT), seq_len,
                positions, KH, ROWS, GROUPS, D, PAGE, BLOCK, SHIFT, STAGES, COPIES, P_RULE,
            )  # fmt: skip
            if work is None:
                parts = place.to(tl.int64) * num_splits
                next_part = 1
                arrival = arrivals + tile * KH + kv_head
            else:  # a sequence's splits stand one after the other in the list
                next_part = KH * G
                parts = (tile - split).to(tl.int64) * next_part + head
                arrival = arrivals + b * KH + kv_head
            own = parts + split * next_part
            d = tl.arange(0, D)
            tl.store(part_stats + own * 2, maximum, mask=is_row)
            tl.store(part_stats + own * 2 + 1, total, mask=is_row)
            tl.store(part_acc + tl.expand_dims(own * D, -1) + d, acc, mask=is_part)
            tl.debug_barrier()  # every thread's part is written before the program reports itself
            # The last of the tile's programs merges all splits in their order: the bits do not depend on who that is.
            if tl.atomic_add(arrival, 1, sem="acq_rel") == tl.cdiv(end, SPLIT) - 1:
                tl.debug_barrier()
                tl.store(arrival, 0)  # as the next call wants it
                maximum = tl.full(ROWS, float("-inf"), tl.float32)
                total = tl.zeros(ROWS, tl.float32)
                acc = tl.zeros(ROWS + [D], tl.float32)
                for part in tl.range(0, tl.cdiv(end, SPLIT), disable_licm=True):
                    place_of_part = parts + part * next_part
                    stats = part_stats + place_of_part * 2
                    of_part = part_acc + tl.expand_dims(place_of_part * D, -1) + d
                    maximum, total, acc = _merge(
                        maximum, total, acc,
                        tl.load(stats, mask=is_row, other=0.0, cache_modifier=".cg"),
                        tl.load(stats + 1, mask=is_row, other=1.0, cache_modifier=".cg"),
                        tl.load(of_part, mask=is_part, other=0.0, cache_modifier=".cg"),
                    )  # fmt: skip
                store_heads(
                    out, out_scale, lse, maximum, total, acc, first_token + token, head, is_row, T, KH * G,
                    ROWS, D, LN_2, q.dtype.element_ty, OUT_RULE,
                )  # fmt: skip
    else:
        maximum = tl.full(ROWS, float("-inf"), tl.float32)
        total = tl.zeros(ROWS, tl.float32)
        # what is merged so far waits in memory: beside a split's own output it would not fit into registers
        for first_key in tl.range(0, end, SPLIT, disable_licm=True):
            split_maximum, split_total, acc = attend_split(
                queries, odd, factor, *caches, first_key, tl.minimum(end, first_key + SPLIT), seq_len, positions, KH,
                ROWS, GROUPS, D, PAGE, BLOCK, SHIFT, STAGES, COPIES, P_RULE,
            )  # fmt: skip
            waiting = part_acc + tl.expand_dims(place.to(tl.int64) * D, -1) + tl.arange(0, D)
            merged = tl.load(waiting, mask=is_part & (first_key > 0), other=0.0)
            maximum, total, merged = _merge(maximum, total, merged, split_maximum, split_total, acc)
            if first_key + SPLIT >= end:
                store_heads(
                    out, out_scale, lse, maximum, total, merged, first_token + token, head, is_row, T, KH * G,
                    ROWS, D, LN_2, q.dtype.element_ty, OUT_RULE,
                )  # fmt: skip
            else:
                tl.store(waiting, merged, mask=is_part)
