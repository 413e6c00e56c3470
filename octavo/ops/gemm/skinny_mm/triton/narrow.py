"""The GEMM for up to 32 tokens: the weight's rows take the matrix instruction's long side, the tokens its short one.

A program owns BLOCK_N rows of the weight, all tokens (BLOCK_M) and one of SPLITS ranges of K.
Legend: M tokens, N out, K in; a [M, K] and b [N, K] E4M3 codes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.target_info import cuda_capability_geq

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.launch.triton import can_begin_early, launcher_of, let_next_begin, on_device_of, wait_for_last
from octavo.ops.gemm.skinny_mm.triton.splits import (
    BLOCK_K,
    PROGRAMS,
    Scales,
    add_parts,
    leave_part,
    new_parts,
    split_of,
    store_product,
)


class NarrowTile(NamedTuple):
    """A program's shape.

    Attributes:
        block_n: rows of the weight. num_warps.
        stages: of its loads, of `unroll` slabs of 128 each.
        ahead: slabs of the weight that a program asks into the L2 cache while the kernel before it, which makes the
            tokens' codes, still runs; 0 to begin when that has ended.
    """

    block_n: int
    num_warps: int
    stages: int
    unroll: int
    ahead: int


TILE = NarrowTile(64, 8, 6, 2, 4)
WIDE_TILE = NarrowTile(128, 8, 3, 2, 4)  # of weights with so many rows that tiles of 64 would come in waves of programs
WIDE_FROM = PROGRAMS * TILE.block_n + 1  # rows


def tile_of(rows: int) -> NarrowTile:
    """The tile for a weight of so many rows; never by M."""
    return WIDE_TILE if rows >= WIDE_FROM else TILE


@triton.jit
def _prefetch(places):
    """Ask the memory at these places into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def narrow_tiles(
    out, parts, arrivals, a, b, a_scale, b_scale, bias, stride_a, stride_as, stride_bs, M, N, K, slabs_a_split,
    IS_BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of out [M, N] over one range of K, and the sum of the ranges by the last program."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    k = tl.arange(0, BLOCK_K)
    b_rows = b + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K + k[None, :]
    a_rows = a + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_a + k[None, :]
    first = split * slabs_a_split
    last = tl.minimum(first + slabs_a_split, K // BLOCK_K)
    if AHEAD > 0 and cuda_capability_geq(9):
        coming = tl.minimum(first + tl.arange(0, AHEAD), last - 1)
        rows = tl.minimum(n, N - 1).to(tl.int64)
        _prefetch(b + rows[:, None] * K + coming[None, :] * BLOCK_K)
        wait_for_last(True)
    let_next_begin()
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for first_slab in tl.range(first, last, UNROLL, num_stages=STAGES):
        for step in tl.static_range(UNROLL):
            slab = first_slab + step
            codes = tl.load(b_rows + slab * BLOCK_K)
            tokens = tl.load(a_rows + slab * BLOCK_K)
            product = tl.dot(codes, tl.trans(tokens))  # [BLOCK_N, BLOCK_M]
            if IS_BLOCK:
                token_scale = tl.load(a_scale + slab * stride_as + tl.minimum(m, M - 1))
                weight_scale = tl.load(b_scale + tile * BLOCK_N // 128 * stride_bs + slab)
                acc += product * token_scale[None, :] * weight_scale
            else:
                acc += product
    if SPLITS > 1:
        if leave_part(parts, arrivals, acc, tile, split, SPLITS):
            return
        acc = add_parts(parts, arrivals, tile, SPLITS, BLOCK_N, BLOCK_M)
    store_product(out, acc, a_scale, b_scale, bias, m[None, :], n[:, None], M, N, IS_BLOCK, IS_TENSOR)


def narrow_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """As octavo.ops.gemm.skinny_mm.skinny_mm, for up to FEW_TOKENS tokens of what can_run accepts."""
    (M, K), N, device = a.shape, b.shape[0], a.device
    block_m = max(16, triton.next_power_of_2(M))
    tile = tile_of(N)
    tiles = triton.cdiv(N, tile.block_n)
    slabs = K // BLOCK_K
    unroll = tile.unroll if slabs % tile.unroll == 0 else 1
    splits, slabs_a_split = split_of(PROGRAMS // tiles, slabs, unroll)  # by the weight's shape alone, never by M
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    parts, arrivals = new_parts(device, tiles, splits, tile.block_n * block_m)
    ahead = tile.ahead if can_begin_early(device) else 0
    scales = Scales.of(a, b)
    with on_device_of(a.qdata):
        launch = launcher_of(
            narrow_tiles, **scales.kind, SPLITS=splits, BLOCK_M=block_m,
            BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K, STAGES=tile.stages, UNROLL=unroll,
            AHEAD=ahead, num_warps=tile.num_warps, launch_pdl=ahead > 0,
        )  # fmt: skip
        operands = (a.qdata, b.qdata, *scales.tensors, bias)
        launch((tiles, splits), out, parts, arrivals, *operands, K, *scales.strides, M, N, K, slabs_a_split)
    return out
