"""Triton attention over the paged KV cache, one kernel for prefill and decode: its host side.

A program owns one tile of rows of one sequence and kv head: the query heads that share it, token by token, packed into
rows. It walks the keys from position 0; every SPLIT keys a new softmax begins, which is merged into the earlier ones in
order. Decode gives each split a program, of which the last one merges, prefill does all in one, by the same
instructions: a row's bits depend on its sequence up to itself and on nothing else. All of it rests on split.py, on the
same block of keys in every call, and on enable_fp_fusion=False.

FP8 codes are decoded to fp16, which is exact: K's scale multiplies the scores, V's folds into the probabilities.

So are FP8 attention's codes of queries and probabilities: its numerics, at the speed of fp16. For Hopper Triton makes
an FP8 product of FP8 operands from 64 rows on (wgmma), which decode does not have, and turns V round for it by bytes;
below it widens them to fp16 itself, and exact mode takes one instruction for both.
"""

from typing import Any, NamedTuple

import torch
import triton

from octavo.errors import BackendError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.arrivals import arrivals_of
from octavo.ops._runtime.launch.triton import Launcher, launcher_of, on_device_of
from octavo.ops.attention.cache import KV_SCALING, PAGE_SIZE, PagedKVLayer
from octavo.ops.attention.mixed import DECODE_ROWS, SPLIT, MixedBatch
from octavo.ops.attention.reference import P_BLOCK, P_SCALING
from octavo.ops.attention.triton.kernels import attend_tiles
from octavo.ops.attention.triton.tiles import Tile, tiles_of
from octavo.ops.quantize.triton.plan import Output, rule_of_rows

__all__ = ["MAX_DECODE_TOKENS", "SPLIT", "Queries", "attend_tiles", "attention_mixed", "attention_paged"]

PROBABILITY_SHIFT = 8  # a power of two that keeps p * v_scale of small values out of fp16's subnormals
WARP = 32
LOG2_E = 1.4426950408889634
LN_2 = 0.6931471805599453
# New tokens of a sequence up to which splits run side by side: their tiles are too few otherwise.
MAX_DECODE_TOKENS = 8
# Tiles up to which they do; so many keep a GPU busy whose programs walk all their splits, which writes no parts. Of
# two splits fewer do, and half of these where one softmax spares the walk its merges: sequences cannot differ so much
# that many programs wait for the longest.
MAX_SPLIT_TILES, MAX_HALVED_TILES = 2048, 512
ANY_LENGTH = 1 << 30


class Queries(NamedTuple):
    """Where the new tokens of a batch stand.

    Attributes:
        page_tables: [B, max_pages] int32.
        cu_seqlens: [B+1] int32, of new tokens.
        seq_lens: [B] int32, of all.
        max_query_len: bound of a sequence's new tokens, known on the host.
        max_seq_len: bound of seq_lens, known on the host.
    """

    page_tables: torch.Tensor
    cu_seqlens: torch.Tensor
    seq_lens: torch.Tensor
    max_query_len: int
    max_seq_len: int

    @property
    def is_decode(self) -> bool:
        return self.max_query_len <= MAX_DECODE_TOKENS


def attention_paged(
    q: torch.Tensor,
    layer: PagedKVLayer,
    queries: Queries,
    softmax_scale: float,
    *,
    exact: bool = True,
    with_lse: bool = False,
    out_scaling: Scaling | None = None,
) -> tuple[torch.Tensor | QuantizedTensor, torch.Tensor | None]:
    """Attention of new tokens over the pages, in which their own K and V already stand.

    Args:
        q: [T, H, D] bf16 or fp16, contiguous; T > 0.
        layer: FP8, or of q's dtype.
        softmax_scale: more than 0.
        exact: False lets many new tokens have tiles, and long sequences one softmax, that give other bits.
        with_lse: also the log of each row's sum of exponentials.
        out_scaling: quantize what can_quantize says.
    Returns:
        (out [T, H, D] of q's dtype or codes [T, H * D], lse [T, H] fp32 or None).
    Raises:
        BackendError: if softmax_scale is not positive.
    """
    if not softmax_scale > 0:
        raise BackendError(f"paged attention takes a softmax_scale above 0, got {softmax_scale}; negate q instead")
    T, H, D = q.shape
    codes = None if out_scaling is None else Output.of(T, H * D, out_scaling).allocate(q.device, False)
    out, out_scale = (torch.empty_like(q), None) if codes is None else (codes.qdata, codes.scale)
    lse = torch.empty(T, H, dtype=torch.float32, device=q.device) if with_lse else None
    num_splits = triton.cdiv(queries.max_seq_len, SPLIT)
    B, KH = queries.seq_lens.shape[0], layer.k.shape[1]
    tiles = tiles_of(layer)
    tile = tiles.decode if queries.is_decode else tiles.prefill if exact else tiles.fast
    is_one_token = queries.max_query_len == 1 and B == T and tile.groups * tile.rows >= H // KH
    num_tiles = B if is_one_token else T * (H // KH) // (tile.groups * tile.rows) + B
    most_tiles = MAX_SPLIT_TILES if num_splits != 2 else MAX_HALVED_TILES if exact else MAX_HALVED_TILES // 2
    is_split = queries.is_decode and num_splits > 1 and num_tiles * KH <= most_tiles
    split = _split_of(layer, exact=exact, is_split=is_split)
    num_parts = num_splits if is_split else int(queries.max_seq_len > split)
    part_acc = torch.empty(T * H * num_parts, D, dtype=torch.float32, device=q.device)
    part_stats = torch.empty(T * H * num_splits, 2, dtype=torch.float32, device=q.device) if is_split else None
    with on_device_of(q):
        launch = _launcher(q, layer, tile, out_scaling, is_split=is_split, is_one_token=is_one_token, split=split)
        tables = queries.page_tables
        cache = (layer.k, layer.v, layer.k_scale, layer.v_scale, tables)
        sizes = (softmax_scale * LOG2_E, tables.stride(0), num_splits, B, T, KH)
        arrivals = arrivals_of(q.device, MAX_SPLIT_TILES) if is_split else None
        results = (out, out_scale, lse, part_acc, part_stats, arrivals)
        grid = (num_tiles, KH, num_splits if is_split else 1)
        launch(grid, *results, q, *cache, queries.cu_seqlens, queries.seq_lens, None, *sizes)
    return out if codes is None else codes, lse


def attention_mixed(
    q: torch.Tensor,
    layer: PagedKVLayer,
    batch: MixedBatch,
    softmax_scale: float,
    out: torch.Tensor,
    *,
    exact: bool = True,
) -> None:
    """Attention of a step whose distribution over sequences is known on the device alone.

    Two launches whose grids are the lengths of batch's lists; programs without work return at once. A row's bits are
    those of attention_paged, for all tiles where exact, else of single tokens up to SPLIT keys.

    Args:
        q: [T, H, D] bf16 or fp16, contiguous.
        layer: FP8, or of q's dtype.
        softmax_scale: more than 0.
        out: [T, H, D] of q's dtype, of which the rows are written whose tokens are in a list.
        exact: as in attention_paged.
    Raises:
        BackendError: if softmax_scale is not positive.
    """
    if not softmax_scale > 0:
        raise BackendError(f"paged attention takes a softmax_scale above 0, got {softmax_scale}; negate q instead")
    T, H, D = q.shape
    KH, (B, max_pages), tiles = layer.k.shape[1], batch.page_tables.shape, tiles_of(layer)
    num_splits = triton.cdiv(max_pages * PAGE_SIZE, SPLIT)
    tables = batch.page_tables
    cache = (layer.k, layer.v, layer.k_scale, layer.v_scale, tables)
    sizes = (softmax_scale * LOG2_E, tables.stride(0), num_splits, B, T, KH)
    with on_device_of(q):
        for work, is_split in ((batch.splits, True), (batch.tiles, False)):
            if work.shape[0] == 0:
                continue
            tile = tiles.decode if is_split else tiles.prefill if exact else tiles.fast
            assert not is_split or tile.groups * tile.rows == DECODE_ROWS, "one tile holds a token's heads"
            split = _split_of(layer, exact=exact, is_split=is_split)
            num_parts = H * work.shape[0] if is_split else T * H * int(max_pages * PAGE_SIZE > split)
            part_acc = torch.empty(num_parts, D, dtype=torch.float32, device=q.device)
            part_stats = torch.empty(num_parts, 2, dtype=torch.float32, device=q.device) if is_split else None
            arrivals = arrivals_of(q.device, max(MAX_SPLIT_TILES, B * KH)) if is_split else None
            results = (out, None, None, part_acc, part_stats, arrivals)
            launch = _launcher(q, layer, tile, None, is_split=is_split, is_one_token=is_split, split=split)
            launch((work.shape[0], KH, 1), *results, q, *cache, batch.cu_seqlens, batch.seq_lens, work, *sizes)


def _split_of(layer: PagedKVLayer, *, exact: bool, is_split: bool) -> int:
    """Keys of a softmax: where no bit rests on them a program that walks all has one, since merges take it 5 us."""
    return SPLIT if exact or is_split or layer.attention_dtype == "fp8" else ANY_LENGTH


def _launcher(
    q: torch.Tensor,
    layer: PagedKVLayer,
    tile: Tile,
    out_scaling: Scaling | None,
    *,
    is_split: bool,
    is_one_token: bool,
    split: int,
) -> Launcher:
    return launcher_of(
        attend_tiles, G=q.shape[1] // layer.k.shape[1], IS_ONE_SPLIT=is_split, IS_ONE_TOKEN=is_one_token,
        SHIFT=PROBABILITY_SHIFT if layer.is_fp8 else 0,
        OUT_RULE=None if out_scaling is None else rule_of_rows(out_scaling, q.dtype),
        D=q.shape[2], SPLIT=split, LN_2=LN_2, enable_fp_fusion=False,
        **_constants_of(tile), **_rules_of(layer, q.dtype, tile.block),
    )  # fmt: skip


def mixed_tile_rows(layer: PagedKVLayer, *, exact: bool) -> int:
    """Rows of attention_mixed's tiles of several tokens."""
    tile = tiles_of(layer).prefill if exact else tiles_of(layer).fast
    return tile.groups * tile.rows


def can_quantize(out_scaling: Scaling, D: int, queries: Queries) -> bool:
    """Whether the output can leave as codes: where a head is whole blocks, in decoding, which has its own kernels."""
    return out_scaling.kind == "block_1x128" and D % out_scaling.block_size[1] == 0 and queries.is_decode


def _rules_of(layer: PagedKVLayer, dtype: torch.dtype, block: int) -> dict[str, Any]:
    """How queries and probabilities are quantized, or None."""
    if layer.attention_dtype != "fp8":
        return {"Q_RULE": None, "P_RULE": None}
    assert block == P_BLOCK, "a step over the keys is what shares a scale"
    # probabilities are fp32 when they are quantized
    return {"Q_RULE": rule_of_rows(KV_SCALING, dtype), "P_RULE": rule_of_rows(P_SCALING, torch.float32)}


def _constants_of(tile: Tile) -> dict[str, Any]:
    shape = {"GROUPS": tile.groups, "R": tile.rows, "BLOCK": tile.block, "STAGES": tile.stages}
    copies = 1 if 2 * tile.block >= WARP * tile.num_warps else 2
    return {**shape, "PAGE": PAGE_SIZE, "COPIES": copies, "num_warps": tile.num_warps}
