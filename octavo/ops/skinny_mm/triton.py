"""Triton FP8 GEMM for few tokens: the weight's rows take the matrix instruction's long side, the tokens its short one.

A program owns BLOCK_N rows of the weight, all tokens (BLOCK_M) and one of SPLITS ranges of K; the last program of a
tile to arrive adds the ranges in their order, so that the bits do not depend on who was last. Every 128 of K are summed
by the matrix units and then added in fp32, with the blocks' scales where there are any.
Legend: M tokens, N out, K in; a [M, K] and b [N, K] E4M3 codes.
"""

import functools
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.language.extra.cuda import gdc_wait
from triton.language.target_info import cuda_capability_geq

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.launch.triton import launcher_of, on_device_of

BLOCK_K = 128
PAIRS = {("per_row", "per_row"), ("per_row", "per_tensor"), ("block_1x128", "block_128x128")}
PROGRAMS = 132  # one an SM, with enough loads under way; more ranges of K cost more than they gain


class Tile(NamedTuple):
    """A program's shape.

    Attributes:
        block_n: rows of the weight. num_warps. stages: of its loads, of `unroll` slabs of 128 each.
        ahead: slabs of the weight that a program asks into the L2 cache while the kernel before it, which makes the
            tokens' codes, still runs; 0 to begin when that has ended.
    """

    block_n: int
    num_warps: int
    stages: int
    unroll: int
    ahead: int


TILE = Tile(64, 8, 6, 2, 4)
WIDE_TILE = Tile(128, 8, 3, 2, 4)  # of weights with so many rows that tiles of 64 would come in waves of programs
WIDE_FROM = 2 * PROGRAMS * TILE.block_n + 1  # rows


def tile_of(rows: int) -> Tile:
    """The tile for a weight of so many rows; never by M."""
    return WIDE_TILE if rows >= WIDE_FROM else TILE


@triton.jit
def _prefetch(places):
    """Ask the memory at these places into the L2 cache."""
    tl.inline_asm_elementwise(
        "prefetch.global.L2 [$1]; // dummy $0", "=r,l", [places.to(tl.int64)], dtype=tl.int32, is_pure=False, pack=1
    )


@triton.jit
def skinny_tiles(
    out, parts, arrivals, a, b, a_scale, b_scale, bias, stride_a, stride_as, stride_bs, M, N, K, slabs_a_split,
    IS_BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr, SPLITS: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr, UNROLL: tl.constexpr, AHEAD: tl.constexpr,
):  # fmt: skip
    """One tile of out [M, N] over one range of K, and the sum of the ranges by whoever comes last."""
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
        gdc_wait()
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
        places = (tile * SPLITS + split).to(tl.int64) * (BLOCK_N * BLOCK_M)
        inside = tl.arange(0, BLOCK_N)[:, None] * BLOCK_M + m[None, :]
        tl.store(parts + places + inside, acc)
        tl.debug_barrier()  # every thread's part is written before the program reports itself
        if tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < SPLITS - 1:
            return
        tl.debug_barrier()
        tl.store(arrivals + tile, 0)  # as the next call wants it
        acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
        for other in range(SPLITS):
            places = (tile * SPLITS + other).to(tl.int64) * (BLOCK_N * BLOCK_M)
            acc += tl.load(parts + places + inside, cache_modifier=".cg")
    if not IS_BLOCK:
        token_scale = tl.load(a_scale + m, mask=m < M, other=0.0)
        if IS_TENSOR:
            weight_scale = tl.load(b_scale) + tl.zeros([BLOCK_N], tl.float32)
        else:
            weight_scale = tl.load(b_scale + n, mask=n < N, other=0.0)
        acc = acc * token_scale[None, :] * weight_scale[:, None]
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[:, None]
    places = out + m[None, :].to(tl.int64) * N + n[:, None]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(m < M)[None, :] & (n < N)[:, None])


def can_run(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether the kernel takes these."""
    is_known = (a.scaling.kind, b.scaling.kind) in PAIRS
    is_e4m3 = a.scaling.dtype == b.scaling.dtype == torch.float8_e4m3fn
    fits = a.shape[1] == b.shape[1] and a.shape[1] % BLOCK_K == 0 and 0 not in (*a.shape, *b.shape)
    return is_known and is_e4m3 and fits


def skinny_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """As octavo.ops.skinny_mm.skinny_mm, for what can_run accepts."""
    (M, K), N, device = a.shape, b.shape[0], a.device
    block_m = max(16, triton.next_power_of_2(M))
    tile = tile_of(N)
    tiles = triton.cdiv(N, tile.block_n)
    slabs = K // BLOCK_K
    unroll = tile.unroll if slabs % tile.unroll == 0 else 1
    splits, slabs_a_split = split_of(tiles, slabs, unroll)
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    parts = arrivals = None
    if splits > 1:
        parts = torch.empty(tiles * splits * tile.block_n * block_m, dtype=torch.float32, device=device)
        arrivals = _arrivals(device, tiles)
    ahead = tile.ahead if _can_begin_early(device) else 0
    is_block = a.scaling.kind == "block_1x128"
    a_scale = a.scale.t().contiguous() if is_block else a.scale  # [K / 128, M]: no copy, as quantize lays it out
    with on_device_of(a.qdata):
        launch = launcher_of(
            skinny_tiles, IS_BLOCK=is_block, IS_TENSOR=b.scaling.is_per_tensor, SPLITS=splits, BLOCK_M=block_m,
            BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K, STAGES=tile.stages, UNROLL=unroll,
            AHEAD=ahead, num_warps=tile.num_warps, launch_pdl=ahead > 0,
        )  # fmt: skip
        strides = (K, M if is_block else 0, b.scale.stride(0) if is_block else 0)
        operands = (a.qdata, b.qdata, a_scale, b.scale, bias)
        launch((tiles, splits), out, parts, arrivals, *operands, *strides, M, N, K, slabs_a_split)
    return out


@functools.cache
def _can_begin_early(device: torch.device) -> bool:
    """Whether launches on this device may overlap: from Hopper on. Without a GPU, what Hopper would get is compiled."""
    if triton.knobs.runtime.interpret:
        return False
    return device.type != "cuda" or torch.cuda.get_device_capability(device) >= (9, 0)


@functools.lru_cache(maxsize=1024)
def split_of(tiles: int, slabs: int, unroll: int) -> tuple[int, int]:
    """(ranges of K, slabs of 128 in each, a multiple of unroll): by the weight's shape alone, never by M."""
    wanted = max(1, min(slabs // unroll, PROGRAMS // tiles))
    each = -(-slabs // (wanted * unroll)) * unroll
    return -(-slabs // each), each


@functools.cache  # for good: a CUDA graph may hold their address
def _zeros(device: torch.device, count: int, stream: int) -> torch.Tensor:
    return torch.zeros(count, dtype=torch.int32, device=device)


def _arrivals(device: torch.device, tiles: int) -> torch.Tensor:
    """Counters that are 0 and that the kernel leaves at 0; of their own for every stream, whose launches overlap."""
    stream = torch.cuda.current_stream(device).cuda_stream if device.type == "cuda" else 0
    return _zeros(device, tiles, stream)
