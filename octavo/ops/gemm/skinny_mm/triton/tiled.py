"""The GEMM for some tokens, up to 256: tiles of 64 tokens, fetched by the tensor memory unit.

There the library's tiles of 128 x 128 leave most multiprocessors without work. A program owns BLOCK_M tokens, BLOCK_N
rows of the weight and one of num_splits ranges of K.
Legend: M tokens, N out, K in; a [M, K] and b [N, K] E4M3 codes.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.gemm.skinny_mm.limits import MAX_TOKENS
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

BLOCK_M, NUM_WARPS = 64, 4
LONG_SLABS = 64  # from so many slabs of K on two programs a multiprocessor gain more than adding their sums costs


class SkinnyTile(NamedTuple):
    """Rows of the weight that a program owns, and the stages of its loads."""

    block_n: int
    stages: int


# two of the first fit on a multiprocessor; of the others, from the left, one, two and three
TILE, WIDE_TILES = SkinnyTile(64, 6), (SkinnyTile(128, 6), SkinnyTile(128, 4), SkinnyTile(128, 3))


# What differs from step to step and makes no kernel faster: a compilation for each of its kinds would stall a step.
_SIZES = ("stride_as", "stride_bs", "M", "slabs", "slabs_a_split", "num_splits")


@triton.jit(do_not_specialize=_SIZES)
def token_tiles(
    out, parts, arrivals, a, b, a_scale, b_scale, bias, stride_as, stride_bs, M, N, slabs, slabs_a_split, num_splits,
    IS_BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr, IS_SPLIT: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of out [M, N] over one range of K, and the sum of the ranges by the last program."""
    tile = tl.program_id(0)
    split = tl.program_id(1)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    first_m = tile % num_tiles_m * BLOCK_M  # the tiles of all tokens follow each other: the weight is read once
    first_n = tile // num_tiles_m * BLOCK_N
    m = first_m + tl.arange(0, BLOCK_M)
    n = first_n + tl.arange(0, BLOCK_N)
    first = split * slabs_a_split
    last = tl.minimum(first + slabs_a_split, slabs)
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for slab in tl.range(first, last, num_stages=STAGES):
        tokens = a.load([first_m, slab * BLOCK_K])
        codes = b.load([first_n, slab * BLOCK_K])
        product = tl.dot(tokens, tl.trans(codes))
        if IS_BLOCK:
            token_scale = tl.load(a_scale + slab * stride_as + tl.minimum(m, M - 1))
            weight_scale = tl.load(b_scale + first_n // 128 * stride_bs + slab)
            # one factor an element; it is subnormal where the sum is next to nothing
            acc += product * (token_scale * weight_scale)[:, None]
        else:
            acc += product
    if IS_SPLIT:
        if leave_part(parts, arrivals, acc, tile, split, num_splits):
            return
        acc = add_parts(parts, arrivals, tile, num_splits, BLOCK_M, BLOCK_N)
    store_product(out, acc, a_scale, b_scale, bias, m[:, None], n[None, :], M, N, IS_BLOCK, IS_TENSOR)


def suits(M: int, N: int) -> bool:
    """Whether these tiles are quicker than the library's, as measured on an H200: where they leave few places free."""
    if M <= BLOCK_M:
        return True
    num_tiles = _num_tiles(M, N, tile_of(M, N))
    return M <= MAX_TOKENS and (num_tiles <= PROGRAMS or 2 * PROGRAMS < num_tiles <= 3 * PROGRAMS)


def tile_of(M: int, N: int, *, splits_k: bool = False) -> SkinnyTile:
    """The smaller tile as long as there is a multiprocessor for each; else a wide one, of which as many run at once.

    Args:
        splits_k: two programs a multiprocessor have ranges of K.
    """
    if _num_tiles(M, N, TILE) <= PROGRAMS:
        return TILE
    programs_each = -(-_num_tiles(M, N, WIDE_TILES[0]) // PROGRAMS)
    if programs_each == 1 and splits_k:
        programs_each = 2
    return WIDE_TILES[min(programs_each, 3 if M > BLOCK_M else 2) - 1]


def _num_tiles(M: int, N: int, tile: SkinnyTile) -> int:
    return -(-M // BLOCK_M) * -(-N // tile.block_n)


def tiled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    splits_k: bool = True,
) -> torch.Tensor:
    """As octavo.ops.gemm.skinny_mm.skinny_mm, for what can_run accepts.

    Args:
        splits_k: whether programs may share a sum over K, so that its order depends on the shape.
    """
    (M, K), N, device = a.shape, b.shape[0], a.device
    slabs = K // BLOCK_K
    is_long = splits_k and slabs >= LONG_SLABS
    tile = tile_of(M, N, splits_k=is_long)
    tiles = _num_tiles(M, N, tile)
    programs = 2 * PROGRAMS if is_long else PROGRAMS
    splits, slabs_a_split = split_of(programs // tiles if splits_k else 1, slabs, 1)
    out = torch.empty(M, N, dtype=out_dtype, device=device)
    parts, arrivals = new_parts(device, tiles, splits, BLOCK_M * tile.block_n)
    scales = Scales.of(a, b)
    tokens = TensorDescriptor(a.qdata, [M, K], [K, 1], [BLOCK_M, BLOCK_K])
    codes = TensorDescriptor(b.qdata, [N, K], [K, 1], [tile.block_n, BLOCK_K])
    with on_device_of(a.qdata):
        launch = launcher_of(
            token_tiles, **scales.kind, IS_SPLIT=splits > 1, BLOCK_M=BLOCK_M, BLOCK_N=tile.block_n, BLOCK_K=BLOCK_K,
            STAGES=tile.stages, num_warps=NUM_WARPS,
        )  # fmt: skip
        operands = (tokens, codes, *scales.tensors, bias)
        sizes = (*scales.strides, M, N, slabs, slabs_a_split, splits)
        launch((tiles, splits), out, parts, arrivals, *operands, *sizes)
    return out
