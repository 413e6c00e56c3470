"""Triton attention over the paged KV cache, one kernel for prefill and decode.

A program owns one tile of rows of one sequence and kv head: the query heads that share it, token by token, packed into
ROWS rows. It walks the keys from position 0 in blocks of one page; every SPLIT keys a new softmax begins, which is
merged into the earlier ones in order. Decode gives each split a program and merges in a second kernel, prefill does
both in one, by the same instructions: a row's bits depend on its sequence up to itself and on nothing else. All of it
rests on every call having the same ROWS, warps and block, and on enable_fp_fusion=False.

FP8 codes are decoded to fp16, which is exact: K's scale multiplies the scores, V's folds into the probabilities.
Legend: T tokens, B sequences, H query heads, KH kv heads, G = H / KH, D head_dim, R rows of a tile.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.ops.attention.cache import PAGE_SIZE, PagedKVLayer
from octavo.ops.launch.triton import launcher_of, on_device_of

SPLIT = 512  # keys of a softmax before it is merged; part of what the bits rest on
ROWS = 16  # one MMA instruction high
PROBABILITY_UNIT = 2.0**8  # keeps p * v_scale of small values out of fp16's subnormals; values up to 114,000 fit
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# New tokens of a sequence up to which splits run side by side: a tile of 16 rows has few programs otherwise.
MAX_DECODE_TOKENS = 8


class Tile(NamedTuple):
    """A program's shape. The first three decide bits: rows, keys a step, warps; the stages of its loads do not."""

    rows: int
    block: int
    num_warps: int
    decode_stages: int
    prefill_stages: int


# By format and head_dim. FP8 takes more instructions than bytes unless one warp owns the rows.
TILES = {
    ("fp8", 128): Tile(ROWS, 64, 1, 5, 3),
    ("fp8", 256): Tile(ROWS, 32, 2, 5, 3),
    ("16 bits", 128): Tile(ROWS, 64, 4, 5, 5),
    ("16 bits", 256): Tile(ROWS, 32, 4, 5, 5),
}


class Queries(NamedTuple):
    """Where the new tokens of a batch stand.

    Attributes:
        block_tables: [B, max_pages] int32. cu_seqlens: [B+1] int32, of new tokens. seq_lens: [B] int32, of all.
        max_query_len, max_seq_len: bounds of both, known on the host.
    """

    block_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int


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
def _load_queries(q, first_token, kv_head, token, group, is_row, KH, G: tl.constexpr, D: tl.constexpr):
    """Queries of the tile's rows [R, D] in fp16, each divided by a power of two so that it fits; and that unit [R]."""
    d = tl.arange(0, D)
    head = kv_head * G + group
    places = q + (first_token + token).to(tl.int64) * (KH * G * D) + head * D
    values = tl.load(places[:, None] + d[None, :], mask=is_row[:, None], other=0.0).to(tl.float32)
    size = tl.max(tl.abs(values), axis=1)
    exponent = size.to(tl.int32, bitcast=True) & 0x7F800000
    exponent = tl.maximum(exponent, 11 << 23)
    unit = (exponent - (10 << 23)).to(tl.float32, bitcast=True)  # the largest becomes 1024 to 2048
    inverse = (0x84000000 - exponent.to(tl.uint32)).to(tl.float32, bitcast=True)  # 264 << 23
    return (values * inverse[:, None]).to(tl.float16), unit


@triton.jit
def _attend_split(
    q, factor, k_cache, v_cache, k_scale, v_scale, table, kv_head, first_key, end_key, seq_len, positions, KH,
    R: tl.constexpr, D: tl.constexpr, PAGE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """One softmax over the keys [first_key, end_key): maximum [R], sum [R] and unnormalised output [R, D], fp32."""
    d = tl.arange(0, D)
    slot = tl.arange(0, BLOCK)
    maximum = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for start in tl.range(first_key, end_key, BLOCK, num_stages=STAGES):
        page = tl.load(table + start // PAGE).to(tl.int64)
        first_slot = (page * KH + kv_head) * PAGE + start % PAGE
        # a page's slots behind the sequence hold another's remains, which may be NaN
        is_key = slot < seq_len - start
        places = first_slot * D + slot[:, None] * D + d[None, :]
        k = tl.load(k_cache + places, mask=is_key[:, None], other=0.0)
        v = tl.load(v_cache + places, mask=is_key[:, None], other=0.0)
        if k_scale is not None:
            k = k.to(tl.float16)
            v = v.to(tl.float16)
        scores = tl.dot(q.to(k.dtype), tl.trans(k)) * factor[:, None]
        if k_scale is not None:
            scores *= tl.load(k_scale + first_slot + slot, mask=is_key, other=0.0)[None, :]
        is_seen = (start + slot)[None, :] <= positions[:, None]
        scores = tl.where(is_seen, scores, float("-inf"))
        new_maximum = tl.maximum(maximum, tl.max(scores, axis=1))
        safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
        p = tl.exp2(scores - safe[:, None])
        shrink = tl.exp2(maximum - safe)
        total = total * shrink + tl.sum(p, axis=1)
        if v_scale is not None:
            p *= (tl.load(v_scale + first_slot + slot, mask=is_key, other=0.0) * UNIT)[None, :]
        acc = tl.dot(p.to(v.dtype), v, acc * shrink[:, None])
        maximum = new_maximum
    return maximum, total, acc


@triton.jit
def _merge(maximum, total, acc, split_maximum, split_total, split_acc):
    """Add a later split to the earlier ones."""
    new_maximum = tl.maximum(maximum, split_maximum)
    safe = tl.where(new_maximum == float("-inf"), 0.0, new_maximum)
    keep = tl.exp2(maximum - safe)
    add = tl.exp2(split_maximum - safe)
    total = total * keep + split_total * add
    acc = acc * keep[:, None] + split_acc * add[:, None]
    return new_maximum, total, acc


@triton.jit
def _store_rows(out, lse, maximum, total, acc, row, is_row, D: tl.constexpr, UNIT: tl.constexpr, LN_2: tl.constexpr):
    """Normalised rows [R, D] and their log of the sum of exponentials, at row numbers token * H + head."""
    places = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    values = acc * tl.div_rn(1.0, total * UNIT)[:, None]
    tl.store(out + places, values.to(out.dtype.element_ty), mask=is_row[:, None])
    if lse is not None:
        tl.store(lse + row, (maximum + tl.log2(total)) * LN_2, mask=is_row)


@triton.jit
def attend_tiles(
    out, lse, part_acc, part_stats, q, k_cache, v_cache, k_scale, v_scale, block_tables, cu_seqlens, seq_lens, scale,
    table_stride, B, KH,
    G: tl.constexpr, D: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr,
    PAGE: tl.constexpr, BLOCK: tl.constexpr, UNIT: tl.constexpr, LN_2: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile: with MAX_SPLITS one of its splits, left in part_*; with 0 all of them, merged."""
    tile = tl.program_id(0)
    kv_head = tl.program_id(1)
    b = _find_sequence(cu_seqlens, tile, B, G, R)
    first_token = tl.load(cu_seqlens + b)
    num_tokens = tl.load(cu_seqlens + b + 1) - first_token
    first_row = (tile - (first_token * G // R + b)) * R
    if first_row >= num_tokens * G:
        return
    seq_len = tl.load(seq_lens + b)
    row = first_row + tl.arange(0, R)
    token = row // G
    is_row = token < num_tokens
    # rows that do not exist see what the tile's last one sees, so that no softmax is empty
    positions = seq_len - num_tokens + tl.minimum(token, num_tokens - 1)
    end = tl.minimum(seq_len, seq_len - num_tokens + (first_row + R - 1) // G + 1)
    queries, unit = _load_queries(q, first_token, kv_head, token, row % G, is_row, KH, G, D)
    factor = unit * scale
    place = (first_token + token) * (KH * G) + kv_head * G + row % G
    table = block_tables + b.to(tl.int64) * table_stride
    caches = (k_cache, v_cache, k_scale, v_scale, table, kv_head)
    if MAX_SPLITS > 0:
        split = tl.program_id(2)
        if split * SPLIT < end:
            maximum, total, acc = _attend_split(
                queries, factor, *caches, split * SPLIT, tl.minimum(end, split * SPLIT + SPLIT), seq_len, positions, KH,
                R, D, PAGE, BLOCK, UNIT, STAGES,
            )  # fmt: skip
            part = place.to(tl.int64) * MAX_SPLITS + split
            tl.store(part_stats + part * 2, maximum, mask=is_row)
            tl.store(part_stats + part * 2 + 1, total, mask=is_row)
            tl.store(part_acc + part[:, None] * D + tl.arange(0, D)[None, :], acc, mask=is_row[:, None])
    else:
        maximum = tl.full([R], float("-inf"), tl.float32)
        total = tl.zeros([R], tl.float32)
        # what is merged so far waits in memory: beside a split's own output it would not fit into registers
        for first_key in tl.range(0, end, SPLIT, disable_licm=True):
            split_maximum, split_total, acc = _attend_split(
                queries, factor, *caches, first_key, tl.minimum(end, first_key + SPLIT), seq_len, positions, KH,
                R, D, PAGE, BLOCK, UNIT, STAGES,
            )  # fmt: skip
            waiting = part_acc + place.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
            merged = tl.load(waiting, mask=is_row[:, None] & (first_key > 0), other=0.0)
            maximum, total, merged = _merge(maximum, total, merged, split_maximum, split_total, acc)
            if first_key + SPLIT >= end:
                _store_rows(out, lse, maximum, total, merged, place, is_row, D, UNIT, LN_2)
            else:
                tl.store(waiting, merged, mask=is_row[:, None])


@triton.jit
def merge_splits(
    out, lse, part_acc, part_stats, cu_seqlens, seq_lens, T, B, H,
    D: tl.constexpr, R: tl.constexpr, SPLIT: tl.constexpr, MAX_SPLITS: tl.constexpr, UNIT: tl.constexpr,
    LN_2: tl.constexpr,
):  # fmt: skip
    """Merge the splits of R rows (token * H + head) of one token, in their order."""
    tiles = tl.cdiv(H, R)
    token = tl.program_id(0) // tiles
    head = tl.program_id(0) % tiles * R + tl.arange(0, R)
    b = _find_sequence(cu_seqlens, token, B, 1, 0)
    num_visible = tl.load(seq_lens + b) - tl.load(cu_seqlens + b + 1) + token + 1
    is_row = head < H
    row = token * H + head
    maximum = tl.full([R], float("-inf"), tl.float32)
    total = tl.zeros([R], tl.float32)
    acc = tl.zeros([R, D], tl.float32)
    for split in range(tl.cdiv(num_visible, SPLIT)):
        part = row.to(tl.int64) * MAX_SPLITS + split
        split_maximum = tl.load(part_stats + part * 2, mask=is_row, other=0.0)
        split_total = tl.load(part_stats + part * 2 + 1, mask=is_row, other=1.0)
        places = part[:, None] * D + tl.arange(0, D)[None, :]
        split_acc = tl.load(part_acc + places, mask=is_row[:, None], other=0.0)
        maximum, total, acc = _merge(maximum, total, acc, split_maximum, split_total, split_acc)
    _store_rows(out, lse, maximum, total, acc, row, is_row, D, UNIT, LN_2)


def attention_paged(
    q: torch.Tensor, layer: PagedKVLayer, queries: Queries, softmax_scale: float, *, with_lse: bool = False
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Attention of new tokens over the pages, in which their own K and V already stand.

    Args:
        q: [T, H, D] bf16 or fp16, contiguous; T > 0. layer: FP8, or of q's dtype.
        with_lse: also the log of each row's sum of exponentials.
    Returns:
        (out [T, H, D] of q's dtype, lse [T, H] fp32 or None).
    """
    T, H, D = q.shape
    KH = layer.k.shape[1]
    out = torch.empty_like(q)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device) if with_lse else None
    num_splits = triton.cdiv(queries.max_seq_len, SPLIT)
    is_decode = queries.max_query_len <= MAX_DECODE_TOKENS and num_splits > 1
    num_parts = num_splits if is_decode else int(num_splits > 1)
    part_acc = torch.empty(T * H * num_parts, D, dtype=torch.float32, device=q.device)
    part_stats = torch.empty(T * H * num_splits, 2, dtype=torch.float32, device=q.device) if is_decode else None
    tables, cu_seqlens, seq_lens = queries.block_tables, queries.cu_seqlens, queries.seq_lens
    B = seq_lens.shape[0]
    rows, block, num_warps, *stages = tile_of(layer)
    shape = {"D": D, "R": rows, "SPLIT": SPLIT, "MAX_SPLITS": num_splits if is_decode else 0, "LN_2": LN_2}
    shape |= {"num_warps": num_warps, "enable_fp_fusion": False}
    shape["UNIT"] = PROBABILITY_UNIT if layer.is_fp8 else 1.0
    with on_device_of(q):
        launch = launcher_of(
            attend_tiles, G=H // KH, PAGE=PAGE_SIZE, BLOCK=block, STAGES=stages[0 if is_decode else 1], **shape
        )
        cache = (layer.k, layer.v, layer.k_scale, layer.v_scale)
        lengths = (tables, cu_seqlens, seq_lens, softmax_scale * LOG2_E, tables.stride(0), B, KH)
        grid = (T * (H // KH) // rows + B, KH, num_splits if is_decode else 1)
        launch(grid, out, lse, part_acc, part_stats, q, *cache, *lengths)
        if is_decode:
            launch = launcher_of(merge_splits, **shape)
            launch((T * triton.cdiv(H, rows),), out, lse, part_acc, part_stats, cu_seqlens, seq_lens, T, B, H)
    return out, lse


def tile_of(layer: PagedKVLayer) -> Tile:
    """A program's shape: by the cache's format and head_dim alone, never by the batch."""
    return TILES["fp8" if layer.is_fp8 else "16 bits", 128 if layer.k.shape[3] <= 128 else 256]
