"""Triton grouped GEMMs: of FP8 codes with the scalings that torch has none for, and the exact one of 16-bit operands.

Groups are found on the device. Every tile has the rows of one group and walks its sum in one order, by one kind of
matrix instruction, so that a row's bits depend on that row and its group's weight alone, as exact mode asks.
Legend: E groups, R rows of all groups, N out, K in; a [R, K], b [E * N, K], out [R, N]; for the weights' gradients
a [N, R], b [K, R], out [E, N, K].
"""

import functools
from collections.abc import Sequence
from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.gemm.hp_mm import triton as hp_mm

BLOCK_N, WARPS = 128, 4
LEAST_GROUPS = 32  # searched at once, one a lane: what finds its group among fewer spills with few registers
TURNED_GROUP = 16  # rows a group on average: up to here tiles of 32 rows are quicker, also where some groups have many
LARGE_GROUP = 128  # rows: where groups have as many on average, the exact 16-bit GEMM takes tiles of 128
FEW_ROWS = 32  # a group on average: up to here our tiles read weights faster than the library's
MANY_ROWS = 128  # a group on average: from here on row_pairs is taken
PAIR_M, PAIR_STAGES = 64, 3  # two programs fit on a processor
SMALL_HP = hp_mm.SMALL._replace(stages=4)  # two programs fit on a processor
SLAB = 128  # what is summed between two applications of block scales
ALIGNMENT = 16  # of the summed dimension: narrower loads spill
CLEAR_ROWS, CLEAR_COLUMNS, CLEAR_WARPS = 16, 1024, 4
GRAD_WARPS, GRAD_STAGES = 8, 4  # 128 x 128 tiles


@triton.jit
def place_of(offsets, tile, R, E, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """A tile's group, its first row and where the group's rows end; a tile without rows begins at or past that end.

    Where no group can have a row on average, a tile may begin at every row, and does where its group's next BLOCK_M
    rows begin. Else group g's tiles begin with the number start // BLOCK_M + g: each group before has room for one
    that is not full. So a tile knows its group from one comparison with every group. Rows of no group are group E's.
    """
    index = tl.arange(0, GROUPS)
    ends = tl.load(offsets + index, mask=index < E, other=0)
    next_tiles = tl.where(R < E, ends, ends // BLOCK_M + index + 1)
    group = tl.sum(((next_tiles <= tile) & (index < E)).to(tl.int32), 0)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0)
    end = tl.load(offsets + group, mask=group < E, other=R)
    if R < E:
        first = tl.where((tile - start) % BLOCK_M == 0, tile, end)
    else:
        first = start + (tile - start // BLOCK_M - group) * BLOCK_M
    return group, first, end


@triton.jit
def store_rows(out, acc, first, end, column, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """A tile of out, up to the row `end`."""
    m, n = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N)
    places = out + first.to(tl.int64) * N + column + (m[:, None] * N + n[None, :])
    is_inside = (m < end - first)[:, None] & (n < N - column)[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=is_inside)


@triton.jit
def clear_tile(out, first, end, column, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in a tile of out, up to the row `end`."""
    store_rows(out, tl.zeros([BLOCK_M, BLOCK_N], tl.float32), first, end, column, N, BLOCK_M, BLOCK_N)


@triton.jit
def rows_of_tile(
    a, a_scale, slots, stride_sa, first, end, K, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, SLAB: tl.constexpr
):  # fmt: skip
    """Where the first slab of a tile's rows is, and the first of their scales.

    Where there are slots, row r of the batch is a's row slots[r] // SLOTS. Rows past the group's end are its last one:
    their results are not stored. Offsets inside a tile fit 32 bits, which leaves registers for the sums.
    """
    rows, k = tl.minimum(tl.arange(0, BLOCK_M), end - 1 - first), tl.arange(0, SLAB)
    if slots is None:
        a_tile = a + first.to(tl.int64) * K + (rows[:, None] * K + k[None, :])
        a_scales = a_scale + (first + rows) * stride_sa
    else:
        sources = tl.load(slots + first + rows) // SLOTS
        a_tile = a + (sources[:, None] * K + k[None, :])
        a_scales = a_scale + sources * stride_sa
    return a_tile, a_scales


@triton.jit(do_not_specialize=("stride_sa_slab", "R"))  # which differ from step to step
def row_tiles(
    out, a, a_scale, b, b_scale, offsets, slots, stride_sa, stride_sa_slab, R, N, K, E,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLAB: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of out: the rows of one group times its weight. Programs past the last group's tiles clear the tail.

    The matrix instruction has 64 rows on its first side and as few as 8 on its second. A tile of fewer than 64 rows is
    turned: the weight is on the first side, so that a group of few rows is padded less. Either way an element is the
    sum of the same products in the same order and has the same bits, as tests on a card check: exact mode, which
    decodes by turned tiles and trains by the others, rests on that.
    """
    TURNED: tl.constexpr = BLOCK_M < 64
    # A tile's columns follow each other, so that a group's rows and weight are read once and then found in the cache.
    num_columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    column = tl.program_id(0) % num_columns * BLOCK_N
    group, first, end = place_of(offsets, tile, R, E, GROUPS, BLOCK_M)
    if (group < E) & (first < end):
        m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, SLAB)
        a_tile, a_scales = rows_of_tile(a, a_scale, slots, stride_sa, first, end, K, SLOTS, BLOCK_M, SLAB)
        columns = tl.minimum(n, N - 1 - column)
        b_tile = b + (group.to(tl.int64) * N + column) * K + (columns[:, None] * K + k[None, :])
        slabs = tl.cdiv(K, SLAB)
        b_scales = b_scale + (group.to(tl.int64) * num_columns + column // SLAB) * slabs  # a block is a tile's width
        acc = tl.zeros([BLOCK_N, BLOCK_M] if TURNED else [BLOCK_M, BLOCK_N], tl.float32)
        for slab in tl.range(0, slabs, num_stages=STAGES):
            is_k = (k < K - slab * SLAB)[None, :]
            # where most rows are no group's, not asking the cache for them is worth a mask
            is_x = is_k & (m < end - first)[:, None] if TURNED else is_k
            x = tl.load(a_tile + slab * SLAB, mask=is_x, other=0.0)
            w = tl.load(b_tile + slab * SLAB, mask=is_k, other=0.0)
            if HAS_BLOCKS:
                of_rows = tl.load(a_scales + slab * stride_sa_slab)
                if TURNED:
                    of_slab = tl.dot(w, tl.trans(x)) * of_rows[None, :]
                else:
                    of_slab = tl.dot(x, tl.trans(w)) * of_rows[:, None]
                acc = tl.fma(of_slab, tl.load(b_scales + slab), acc)
            elif TURNED:
                acc = tl.dot(w, tl.trans(x), acc)
            else:
                acc = tl.dot(x, tl.trans(w), acc)
        if TURNED:
            acc = tl.trans(acc)
        if not HAS_BLOCKS:
            of_columns = tl.load(b_scale + group.to(tl.int64) * N + column + columns)
            acc = acc * (tl.load(a_scales)[:, None] * of_columns[None, :])
        store_rows(out, acc, first, end, column, N, BLOCK_M, BLOCK_N)
    else:
        clear_tile(out, first, end, column, N, BLOCK_M, BLOCK_N)


@triton.jit
def half_of(
    a, a_scale, slots, first, end, stride_sa, K, SLOTS: tl.constexpr, BLOCK_M: tl.constexpr, SLAB: tl.constexpr
):  # fmt: skip
    """Where the codes and scales of BLOCK_M rows are. Those past the group's end have any codes, and no use."""
    rows = tl.minimum(first + tl.arange(0, BLOCK_M), end - 1)
    if slots is None:
        codes = first
    else:
        rows = tl.load(slots + rows) // SLOTS
        codes = a + (rows[:, None] * K + tl.arange(0, SLAB)[None, :])
    return codes, a_scale + rows * stride_sa


@triton.jit
def add_slab(
    acc, a, slots, codes, scales, w, of_block, start, K, SLAB: tl.constexpr, HAS_BLOCKS: tl.constexpr
):  # fmt: skip
    """What row_tiles adds for one slab: the same operations in the same order."""
    if slots is None:
        x = a.load([codes, start])
    else:
        x = tl.load(codes + start, mask=(tl.arange(0, SLAB) < K - start)[None, :], other=0.0)
    if HAS_BLOCKS:
        of_slab = tl.dot(x, tl.trans(w)) * tl.load(scales)[:, None]
        acc = tl.fma(of_slab, tl.load(of_block), acc)
    else:
        acc = tl.dot(x, tl.trans(w), acc)
    return acc


@triton.jit
def sum_pair(
    a, b, slots, upper, upper_scales, lower, lower_scales, weight, b_scales, stride_sa_slab, K, HAS_LOWER: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLAB: tl.constexpr, HAS_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """The sums of both tiles of row_pairs, of which the lower one may have no rows."""
    above = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    below = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for slab in tl.range(0, tl.cdiv(K, SLAB), num_stages=STAGES):
        start, at = slab * SLAB, slab * stride_sa_slab
        w = b.load([weight, start])
        above = add_slab(above, a, slots, upper, upper_scales + at, w, b_scales + slab, start, K, SLAB, HAS_BLOCKS)
        if HAS_LOWER:
            below = add_slab(below, a, slots, lower, lower_scales + at, w, b_scales + slab, start, K, SLAB, HAS_BLOCKS)
    return above, below


@triton.jit(do_not_specialize=("stride_sa_slab", "R"))
def row_pairs(
    out, a, a_scale, b, b_scale, offsets, slots, stride_sa, stride_sa_slab, R, N, K, E,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, SLAB: tl.constexpr,
    HAS_BLOCKS: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As row_tiles, with its bits, for many rows a group: two tiles of BLOCK_M rows, which share what they read of b.

    The tensor memory unit fetches b, and a where there are no slots. Two programs of four warps share a processor, so
    that one applies scales while the other multiplies: more warps of one program would wait for each other.
    """
    num_columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    column = tl.program_id(0) % num_columns * BLOCK_N
    group, first, end = place_of(offsets, tile, R, E, GROUPS, 2 * BLOCK_M)
    if (group < E) & (first < end):
        upper, upper_scales = half_of(a, a_scale, slots, first, end, stride_sa, K, SLOTS, BLOCK_M, SLAB)
        lower, lower_scales = half_of(a, a_scale, slots, first + BLOCK_M, end, stride_sa, K, SLOTS, BLOCK_M, SLAB)
        weight = group * N + column
        b_scales = b_scale + (group.to(tl.int64) * num_columns + column // SLAB) * tl.cdiv(K, SLAB)
        if end - first > BLOCK_M:
            above, below = sum_pair(
                a, b, slots, upper, upper_scales, lower, lower_scales, weight, b_scales, stride_sa_slab, K, True,
                BLOCK_M, BLOCK_N, SLAB, HAS_BLOCKS, STAGES,
            )  # fmt: skip
        else:
            above, below = sum_pair(
                a, b, slots, upper, upper_scales, lower, lower_scales, weight, b_scales, stride_sa_slab, K, False,
                BLOCK_M, BLOCK_N, SLAB, HAS_BLOCKS, STAGES,
            )  # fmt: skip
        if not HAS_BLOCKS:
            columns = tl.minimum(column + tl.arange(0, BLOCK_N), N - 1)
            of_columns = tl.load(b_scale + group.to(tl.int64) * N + columns)[None, :]
            above = above * (tl.load(upper_scales)[:, None] * of_columns)
            below = below * (tl.load(lower_scales)[:, None] * of_columns)
        store_rows(out, above, first, end, column, N, BLOCK_M, BLOCK_N)
        store_rows(out, below, first + BLOCK_M, end, column, N, BLOCK_M, BLOCK_N)
    else:
        clear_tile(out, first, end, column, N, 2 * BLOCK_M, BLOCK_N)


@triton.jit(do_not_specialize=("R",))
def hp_row_tiles(
    out, x, weights, offsets, R, N, K, E,
    GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """As row_tiles, of 16-bit operands, with the sums of hp_mm.mm_tiles: its tiles, its steps, its instruction."""
    num_columns = tl.cdiv(N, BLOCK_N)
    tile = tl.program_id(0) // num_columns
    column = tl.program_id(0) % num_columns * BLOCK_N
    group, first, end = place_of(offsets, tile, R, E, GROUPS, BLOCK_M)
    if (group < E) & (first < end):
        m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_N), tl.arange(0, BLOCK_K)
        rows, columns = tl.minimum(m, end - 1 - first), tl.minimum(n, N - 1 - column)
        x_tile = x + first.to(tl.int64) * K + (rows[:, None] * K + k[None, :])
        w_tile = weights + (group.to(tl.int64) * N + column) * K + (columns[:, None] * K + k[None, :])
        acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
            is_k = (k < K - start)[None, :]
            a = tl.load(x_tile + start, mask=is_k, other=0.0)
            b = tl.load(w_tile + start, mask=is_k, other=0.0)
            acc = tl.dot(a, tl.trans(b), acc)
        store_rows(out, acc, first, end, column, N, BLOCK_M, BLOCK_N)
    else:
        clear_tile(out, first, end, column, N, BLOCK_M, BLOCK_N)


@triton.jit
def clear_rows(out, offsets, stride, R, N, E, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """Zeros in a tile's rows of no group."""
    first = tl.program_id(0) * BLOCK_M
    end = tl.load(offsets + E - 1)
    if first + BLOCK_M > end:
        row = first + tl.arange(0, BLOCK_M)
        n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
        zeros = tl.zeros([BLOCK_M, BLOCK_N], out.dtype.element_ty)
        is_tail = (row >= end) & (row < R)
        tl.store(out + row.to(tl.int64)[:, None] * stride + n[None, :], zeros, mask=is_tail[:, None] & (n < N)[None, :])


@triton.jit
def gradient_tiles(
    out, a, a_scale, b, b_scale, offsets, stride_sa, stride_sa_slab, stride_sb, stride_sb_slab, R, N, K,
    SLAB: tl.constexpr, B_IS_SQUARE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One SLAB x SLAB tile of one group's gradient, summed over its rows; it begins and ends with a block."""
    group = tl.program_id(2)
    first_n, first_k = tl.program_id(0) * SLAB, tl.program_id(1) * SLAB
    index = tl.arange(0, SLAB)
    start = tl.load(offsets + group - 1, mask=group > 0, other=0) // SLAB
    end = tl.load(offsets + group) // SLAB
    n, k = tl.minimum(index, N - 1 - first_n), tl.minimum(index, K - 1 - first_k)
    a_tile = a + first_n.to(tl.int64) * R + (n.to(tl.int64)[:, None] * R + index[None, :])
    b_tile = b + first_k.to(tl.int64) * R + (k.to(tl.int64)[:, None] * R + index[None, :])
    a_scales = a_scale + (first_n + n) * stride_sa
    b_scales = b_scale + (tl.program_id(1) if B_IS_SQUARE else first_k + k) * stride_sb
    acc = tl.zeros([SLAB, SLAB], tl.float32)
    for slab in tl.range(start, end, num_stages=STAGES):
        x, y = tl.load(a_tile + slab * SLAB), tl.load(b_tile + slab * SLAB)
        p = tl.dot(x, tl.trans(y)) * tl.load(a_scales + slab * stride_sa_slab)[:, None]
        of_b = tl.load(b_scales + slab * stride_sb_slab)
        acc = tl.fma(p, of_b if B_IS_SQUARE else of_b[None, :], acc)
    places = out + (group.to(tl.int64) * N + first_n) * K + first_k + (index[:, None] * K + index[None, :])
    is_inside = (index < N - first_n)[:, None] & (index < K - first_k)[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=is_inside)


def can_multiply(a: QuantizedTensor, whole: QuantizedTensor, num_groups: int) -> bool:
    """Whether scaled_grouped_mm takes a [R, K] and one operand [E * N, K] of all groups, stacked ones too."""
    kinds = (a.scaling.kind, whole.scaling.kind)
    blocks_end = whole.scale.shape[0] == num_groups * triton.cdiv(whole.shape[0] // num_groups, SLAB)
    fits = kinds == ("per_row", "per_row") or (kinds == ("block_1x128", "block_128x128") and blocks_end)
    return fits and a.shape[1] % ALIGNMENT == 0 and 0 not in (*a.shape, *whole.shape)


def stack(weights: Sequence[QuantizedTensor]) -> QuantizedTensor:
    """One operand [E * N, K] of E weights [N, K], whose scales follow each other: the blocks end with each weight.

    What lies so already is not copied (octavo.nn.GroupedLinear sees to that).
    """
    if len(weights) == 1:
        return weights[0]
    codes, scale = (_join([getattr(q, name) for q in weights]) for name in ("qdata", "scale"))
    return QuantizedTensor.trusted(codes, scale, weights[0].scaling)


def _join(matrices: list[torch.Tensor]) -> torch.Tensor:
    """Matrices of one shape as one, row after row: a view where they lie so."""
    first, num = matrices[0], len(matrices)
    size, start = first.nbytes, first.data_ptr()
    has_room = first.untyped_storage().nbytes() >= first.storage_offset() * first.element_size() + num * size
    if has_room and all(x.is_contiguous() and x.data_ptr() == start + i * size for i, x in enumerate(matrices)):
        return first.as_strided((num * first.shape[0], first.shape[1]), (first.shape[1], 1))
    return torch.cat([x.view(torch.uint8) for x in matrices]).view(first.dtype)


def can_multiply_columns(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether scaled_grouped_mm_columns takes a [N, R] and b [K, R]."""
    is_block = a.scaling.kind == "block_1x128" and b.scaling.kind in ("block_1x128", "block_128x128")
    return is_block and a.shape[1] % SLAB == 0 and 0 not in (*a.shape, *b.shape)


def num_tiles(num_rows: int, num_groups: int, block_m: int) -> int:
    """Tiles that any groups of so many rows fit, with those of rows of no group: see place_of."""
    return num_rows if num_rows < num_groups else triton.cdiv(num_rows, block_m) + num_groups


class RowTile(NamedTuple):
    """How row_tiles is launched; registers: at most so many a thread, None for as many as it takes."""

    block_m: int
    stages: int
    registers: int | None


def row_tile(num_rows: int, num_groups: int) -> RowTile:
    """The quickest on an H200 by the rows that groups have on average."""
    if num_rows < num_groups:
        return RowTile(32, 4, None)
    return RowTile(32 if num_rows <= TURNED_GROUP * num_groups else 64, 3, 168)  # three programs fit on a processor


def takes_pairs(a: QuantizedTensor, whole: QuantizedTensor, num_rows: int, num_groups: int) -> bool:
    """Whether row_pairs multiplies: many rows a group, and codes that Hopper's tensor memory unit can fetch."""
    is_aligned = all(q.qdata.data_ptr() % ALIGNMENT == 0 for q in (a, whole))
    return num_rows >= MANY_ROWS * num_groups and is_aligned and _is_hopper(a.device)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    """Without a GPU, what Hopper would get is interpreted or compiled."""
    return device.type != "cuda" or torch.cuda.get_device_capability(device)[0] == 9


def scaled_grouped_mm(
    a: QuantizedTensor,
    whole: QuantizedTensor,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    slots: torch.Tensor | None = None,
    slots_per_row: int = 1,
) -> torch.Tensor:
    """What can_multiply accepts: [R, N] of out_dtype, zeros in rows of no group."""
    R, K, E = a.shape[0] if slots is None else slots.shape[0], a.shape[1], offsets.shape[0]
    N = whole.shape[0] // E
    out = torch.empty(R, N, dtype=out_dtype, device=a.device)
    codes, weights = a.qdata, whole.qdata
    if takes_pairs(a, whole, R, E):
        kernel, rows = row_pairs, 2 * PAIR_M
        own = {"BLOCK_M": PAIR_M, "STAGES": PAIR_STAGES}
        weights = TensorDescriptor(weights, [E * N, K], [K, 1], [BLOCK_N, SLAB])
        codes = codes if slots is not None else TensorDescriptor(codes, [R, K], [K, 1], [PAIR_M, SLAB])
    else:
        kernel, tile = row_tiles, row_tile(R, E)
        rows, own = tile.block_m, {"BLOCK_M": tile.block_m, "STAGES": tile.stages}
        own |= {} if tile.registers is None else {"maxnreg": tile.registers}
    grid = (num_tiles(R, E, rows) * triton.cdiv(N, BLOCK_N),)
    with on_device_of(out):
        launch = launcher_of(
            kernel, SLOTS=slots_per_row, GROUPS=max(LEAST_GROUPS, triton.next_power_of_2(E)), BLOCK_N=BLOCK_N,
            SLAB=SLAB, HAS_BLOCKS=a.scaling.kind != "per_row", num_warps=WARPS, **own,
        )  # fmt: skip
        scales = (a.scale, weights, whole.scale.contiguous())
        launch(grid, out, codes, *scales, offsets, slots, a.scale.stride(0), a.scale.stride(1), R, N, K, E)
    return out


def can_multiply_hp(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether grouped_mm_exact takes x [R, K] and weights [E, N, K]: 16 bits, none empty."""
    return x.element_size() == 2 and weights.dtype == x.dtype and 0 not in (*x.shape, *weights.shape)


def is_faster_hp(x: torch.Tensor, weights: torch.Tensor) -> bool:
    """Whether grouped_mm_exact is faster than torch's library: few rows a group, and nothing to copy."""
    return x.shape[0] <= FEW_ROWS * weights.shape[0] and weights.is_contiguous()


def grouped_mm_exact(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """What can_multiply_hp accepts: [R, N] of out_dtype, each row with the bits of hp_mm_exact; zeros in no group."""
    x, weights = x.contiguous(), weights.contiguous()
    (R, K), (E, N, _) = x.shape, weights.shape
    out = torch.empty(R, N, dtype=out_dtype, device=x.device)
    tile = hp_mm.LARGE if R >= LARGE_GROUP * E else SMALL_HP
    grid = (num_tiles(R, E, tile.block_m) * triton.cdiv(N, tile.block_n),)
    with on_device_of(out):
        launch = launcher_of(
            hp_row_tiles, GROUPS=triton.next_power_of_2(E), BLOCK_M=tile.block_m, BLOCK_N=tile.block_n,
            BLOCK_K=tile.block_k, STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip
        launch(grid, out, x, weights, offsets, R, N, K, E)
    return out


def clear_tail(out: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """out [R, N], whose rows are contiguous, with zeros in the rows of no group."""
    R, N = out.shape
    if not R:
        return out
    with on_device_of(out):
        launch = launcher_of(clear_rows, BLOCK_M=CLEAR_ROWS, BLOCK_N=CLEAR_COLUMNS, num_warps=CLEAR_WARPS)
        grid = (triton.cdiv(R, CLEAR_ROWS), triton.cdiv(N, CLEAR_COLUMNS))
        launch(grid, out, offsets, out.stride(0), R, N, offsets.shape[0])
    return out


def scaled_grouped_mm_columns(
    a: QuantizedTensor, b: QuantizedTensor, offsets: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """What can_multiply_columns accepts: [E, N, K] of out_dtype."""
    (N, R), K, E = a.shape, b.shape[0], offsets.shape[0]
    out = torch.empty(E, N, K, dtype=out_dtype, device=a.device)
    grid = (triton.cdiv(N, SLAB), triton.cdiv(K, SLAB), E)
    strides = (*a.scale.stride(), *b.scale.stride())
    with on_device_of(out):
        launch = launcher_of(
            gradient_tiles, SLAB=SLAB, B_IS_SQUARE=b.scaling.kind == "block_128x128", STAGES=GRAD_STAGES,
            num_warps=GRAD_WARPS,
        )  # fmt: skip
        launch(grid, out, a.qdata, a.scale, b.qdata, b.scale, offsets, *strides, R, N, K)
    return out
