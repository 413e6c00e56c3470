"""Triton quantizers: rows, columns or both of a matrix to FP8 in one read, bit-equal to reference.py.

x is [M, K]; "columns" is the quantization of x.t(), its codes [K, M] row-major (K-major for a GEMM that
sums over M). A program owns one BLOCK_M x BLOCK_K tile, or one whole row. `emit` computes a tile and quantizes it;
the kernels of other ops that make matrices (norms, activations) use it too, or `emit_tile` where they hold their tile.
`Emission` is the host side of both.

RULE is (*rows' rule, *columns' rule, OBSERVE, SOURCE, OFFSET, ROWS_M, CHUNKS, COLS_K, SPREAD), flat because triton 3.6
takes no tuple of tuples. A direction's rule is (SCALES, FP8, FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2, BLOCK), with SCALES
"none" for a direction left out. What shares a scale is SCALES: "group" BLOCK elements of a line, "square" a whole tile,
"line" a whole row or column and "tensor" all of x (both from amax buffers that a first pass, "amax_line" or
"amax_tensor", has filled), "static" all of x with a given quant_scale; with OBSERVE the tile's own amax is folded into
amax_out as well. SOURCE is the type of the values, OFFSET that of offsets in a tile; for the rest see Plan.
OUT is (row_q, row_s, col_q, col_s, row_amax, col_amax, static, amax_out), with None for what a rule does not use.
"""

import contextlib
import dataclasses
import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling, largest_quant_scale

SCALES_OF_KIND = {
    "per_tensor": "tensor",
    "per_row": "line",
    "block_1x128": "group",
    "mx_1x32": "group",
    "block_128x128": "square",
}
NONE = ("none", 0, 0, 0, 0, 0, 0)
FP8_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}

SOURCE_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}


class Plan(NamedTuple):
    """How a program of `emit` walks its tile: rows in pieces of rows_m x block_k, columns of block_m x cols_k.

    A row's group is read in `chunks` pieces, so that so many times fewer threads share (and divide) its scale.
    """

    block_m: int
    block_k: int
    num_warps: int
    rows_m: int
    chunks: int
    cols_k: int
    registers: int | None = None  # a cap, where the assembler alone would take so many that fewer programs fit


# One for each kind of work and never for a size. Columns alone and rows alone run over the matrix in their own tiles.
PLANS = {
    "group rows": Plan(64, 128, 4, 64, 1, 16),
    "group columns": Plan(128, 64, 4, 16, 1, 64),
    "group both": Plan(128, 128, 4, 64, 2, 128),
    "square": Plan(128, 128, 8, 128, 1, 64),
    "group and square": Plan(128, 128, 4, 64, 1, 64),
    "lines both": Plan(128, 128, 4, 128, 1, 64),
    "rows": Plan(32, 256, 4, 32, 1, 16),
    "columns": Plan(128, 64, 4, 32, 1, 64),
    "both": Plan(128, 128, 8, 128, 1, 64),
    "groups of 32": Plan(32, 128, 4, 32, 1, 128),
    "amax of lines": Plan(512, 128, 4, 32, 1, 16),
    "amax of all": Plan(128, 256, 4, 32, 1, 16),
}
# BLOCK_M, BLOCK_K, num_warps for producers that hold their tile (emit_tile). Where a scale does not fix a side, it is
# chosen for 32 or 64 elements a thread, which keeps even unaligned tiles from spilling.
TRANSPOSED_TILE = (128, 64, 4)
AMAX_TILE = (128, 64, 8)
STRAIGHT_TILE = (16, 512, 8)
GROUP_ROWS_TILE = (32, 4)  # BLOCK_M and num_warps; BLOCK_K is the group
SQUARE_TILE_WARPS = {128: 16, 32: 4}
WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8
OFFSET_LIMIT = 1 << 22  # strides up to here keep offsets within a tile of 512 lines in 32 bits


@triton.jit
def _largest(size, axis: tl.constexpr):
    # NaN drops out of a max; a line of NaN alone leaves NaN, which is repaired here, after the reduction, because
    # min/max that propagate NaN miscompile beside a transposed FP8 store.
    amax = tl.max(tl.abs(size), axis=axis)
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def _quant_scale(amax, RULE: tl.constexpr, AT: tl.constexpr):
    """The rule's quant_scale of each amax: FP8_MAX / amax, correctly rounded without a branch.

    1 / m for the mantissa m in [1, 2) comes from a quadratic and two Newton steps, the quotient from one step on its
    remainder. tests/ops/quantize/test_division.py holds that against true division.
    """
    FP8_MAX: tl.constexpr = RULE[AT + 2]
    amax = tl.where(amax > RULE[AT + 3], amax, RULE[AT + 3])
    bits = amax.to(tl.int32, bitcast=True)
    m_bits = (bits & 0x7FFFFF) | 0x3F800000
    m = m_bits.to(tl.float32, bitcast=True)
    inverse = tl.fma(tl.fma(m, 0.3232325, -1.4545455), m, 2.1212122)
    inverse = tl.fma(tl.fma(-m, inverse, 1.0), inverse, inverse)
    inverse = tl.fma(tl.fma(-m, inverse, 1.0), inverse, inverse)
    quotient = FP8_MAX * inverse
    quotient = tl.fma(tl.fma(-m, quotient, FP8_MAX), inverse, quotient)
    quant_scale = (quotient.to(tl.int32, bitcast=True) - (bits - m_bits)).to(tl.float32, bitcast=True)
    # Up to this amax the quotient overflows.
    quant_scale = tl.where(amax > FP8_MAX * 2.0**-128, quant_scale, RULE[AT + 4])
    quant_scale = tl.where((amax > 0.0) & (amax < float("inf")), quant_scale, 1.0)
    if RULE[AT + 5]:
        quant_scale = (quant_scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return quant_scale


@triton.jit
def _scale(amax, RULE: tl.constexpr, AT: tl.constexpr):
    """The decode scale of each amax, to be stored."""
    # An amax is a number of the source's dtype. Triton moves the change of layout before a store up to the widening,
    # so that each scale is divided by one thread and not by all that share its line.
    amax = amax.to(RULE[15]).to(tl.float32)
    return tl.div_rn(1.0, _quant_scale(amax, RULE, AT))


@triton.jit
def _fold(buffer, amax, mask):
    # The order of positive fp32 numbers is that of their bits.
    tl.atomic_max(buffer, amax.to(tl.int32, bitcast=True), mask=mask, sem="relaxed")


@triton.jit
def _known_amax(buffer, mask):
    return tl.load(buffer, mask=mask, other=0).to(tl.float32, bitcast=True)


@triton.jit
def _uniform_scale(amax, known_amax, static, RULE: tl.constexpr, AT: tl.constexpr):
    """The one quant_scale of a tile: given, or from an amax that is given or the tile's own."""
    if RULE[AT] == "static":
        quant_scale = tl.load(static)
    elif RULE[AT] == "tensor":
        quant_scale = _quant_scale(tl.load(known_amax).to(tl.float32, bitcast=True), RULE, AT)
    else:
        quant_scale = _quant_scale(amax, RULE, AT)
    return quant_scale


@triton.jit
def _store_uniform_scale(scale, quant_scale, square, is_first, RULE: tl.constexpr, AT: tl.constexpr):
    if RULE[AT] == "square":
        tl.store(scale + square, tl.div_rn(1.0, quant_scale))
    elif is_first:
        tl.store(scale, tl.div_rn(1.0, quant_scale))


@triton.jit
def _amax_pass(
    PRODUCE: tl.constexpr, inputs, OUT, first_m, first_k, left_m, left_k, RULE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Fold a tile's amaxes into the zeroed buffers of rows, columns or all."""
    ROWS_M: tl.constexpr = RULE[17]
    m = tl.arange(0, ROWS_M)
    k = tl.arange(0, BLOCK_K)
    size = tl.zeros([ROWS_M, BLOCK_K], tl.float32)
    for i in range(0, left_m, ROWS_M):
        is_in = (m < left_m - i)[:, None] & (k < left_k)[None, :]
        values = tl.abs(PRODUCE(inputs, first_m + i, first_k, m[:, None].to(RULE[16]), k[None, :], is_in))
        if RULE[0] == "amax_line":
            _fold(OUT[4] + first_m + i + m, _largest(values, 1), m < left_m - i)
        size = tl.maximum(size, values)
    if RULE[7] == "amax_line":
        _fold(OUT[5] + first_k + k, _largest(size, 0), k < left_k)
    if RULE[0] == "amax_tensor":  # the columns' buffer is the same one
        _fold(OUT[4], _largest(tl.max(size, axis=1), 0), None)
    elif RULE[7] == "amax_tensor":
        _fold(OUT[5], _largest(tl.max(size, axis=1), 0), None)


@triton.jit
def _grouped_rows(
    PRODUCE: tl.constexpr, inputs, row_q, row_s, first_m, first_k, left_m, left_k, M, K, RULE: tl.constexpr,
    BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize ROWS_M rows by groups; returns each group's amax."""
    GROUPS: tl.constexpr = BLOCK_K // RULE[6]
    CHUNKS: tl.constexpr = RULE[18]
    # A group is read in CHUNKS pieces, so that fewer threads share its scale.
    line = tl.arange(0, RULE[17] * GROUPS)
    line_m = line // GROUPS
    line_k = line % GROUPS * RULE[6]
    piece = tl.arange(0, CHUNKS) * (RULE[6] // CHUNKS)
    m = line_m[None, :, None].to(RULE[16])
    k = piece[:, None, None] + line_k[None, :, None] + tl.arange(0, RULE[6] // CHUNKS)[None, None, :]
    is_in = (m < left_m) & (k < left_k)
    values = PRODUCE(inputs, first_m, first_k, m, k, is_in)  # [CHUNKS, ROWS_M * GROUPS, group / CHUNKS]
    amax = _largest(tl.max(tl.abs(values), axis=2), 0)
    places = row_s + (first_k // RULE[6]) * M + first_m + (line % GROUPS).to(RULE[16]) * M + line_m
    tl.store(places, _scale(amax, RULE, 0), mask=(line_m < left_m) & (line_k < left_k))
    codes = (values * _quant_scale(amax, RULE, 0)[None, :, None]).to(RULE[1])
    tl.store(row_q + (first_m * K + first_k) + (m * K + k), codes, mask=is_in)
    return amax


@triton.jit
def _scaled_rows(row_q, values, quant_scale, first_m, first_k, m, k, is_in, K, RULE: tl.constexpr):
    codes = (values * quant_scale).to(RULE[1])
    tl.store(row_q + (first_m * K + first_k) + (m * K + k), codes, mask=is_in)


@triton.jit
def _columns(
    PRODUCE: tl.constexpr, inputs, OUT, quant_scale, first_m, first_k, left_m, left_k, M, K, RULE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Quantize COLS_K columns and store their codes transposed; quant_scale is used where a tile has one."""
    COLS_K: tl.constexpr = RULE[19]
    SPREAD: tl.constexpr = RULE[20]  # threads along M
    EACH: tl.constexpr = BLOCK_M // SPREAD  # consecutive rows of one thread, so that it stores whole words
    half = tl.arange(0, BLOCK_M // 2)
    column = tl.arange(0, COLS_K)
    m = (half % SPREAD * EACH + half // SPREAD * 2)[:, None].to(RULE[16])
    k = column[None, :]
    even = PRODUCE(inputs, first_m, first_k, m, k, (m < left_m) & (k < left_k))
    odd = PRODUCE(inputs, first_m, first_k, m + 1, k, (m + 1 < left_m) & (k < left_k))
    values = tl.join(even, odd)  # [BLOCK_M / 2, COLS_K, 2]: the cast pairs neighbours along M, as they are stored
    if RULE[7] == "group":
        amax = _largest(tl.maximum(tl.abs(even), tl.abs(odd)), 0)  # [COLS_K]
        places = OUT[3] + (first_m // BLOCK_M) * K + first_k + column
        tl.store(places, _scale(amax, RULE, 7), mask=column < left_k)
        codes = (values * _quant_scale(amax, RULE, 7)[None, :, None]).to(RULE[8])
    elif RULE[7] == "line":
        amax = _known_amax(OUT[5] + first_k + column, column < left_k)
        if first_m == 0:
            tl.store(OUT[3] + first_k + column, _scale(amax, RULE, 7), mask=column < left_k)
        codes = (values * _quant_scale(amax, RULE, 7)[None, :, None]).to(RULE[8])
    else:
        codes = (values * quant_scale).to(RULE[8])
    codes = tl.permute(tl.reshape(codes, [EACH // 2, SPREAD, COLS_K, 2]), (2, 1, 0, 3))
    codes = tl.reshape(codes, [COLS_K, BLOCK_M])
    k = column[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    tl.store(OUT[2] + (first_k * M + first_m) + (k.to(RULE[16]) * M + m), codes, mask=(k < left_k) & (m < left_m))


@triton.jit
def emit(
    PRODUCE: tl.constexpr, inputs, OUT, tile_m, tile_k, M, K, RULE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Quantize one tile of a matrix [M, K] that PRODUCE computes, and store codes and scales, as RULE says.

    PRODUCE(inputs, first_m, first_k, m, k, is_in) gives the values at rows first_m + m and columns first_k + k, which
    broadcast to is_in's shape, as fp32 numbers of the source's dtype, 0 where not is_in. Each direction calls it in
    its own order: a second read hits the cache and costs less than moving values between threads.
    """
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_k = tile_k.to(tl.int64) * BLOCK_K
    left_m = tl.minimum(M - first_m, BLOCK_M).to(tl.int32)
    left_k = tl.minimum(K - first_k, BLOCK_K).to(tl.int32)
    is_first = (tile_m == 0) & (tile_k == 0)
    ROWS_M: tl.constexpr = RULE[17]
    COLS_K: tl.constexpr = RULE[19]
    if RULE[0] == "amax_line" or RULE[0] == "amax_tensor" or RULE[7] == "amax_line" or RULE[7] == "amax_tensor":
        _amax_pass(PRODUCE, inputs, OUT, first_m, first_k, left_m, left_k, RULE, BLOCK_M, BLOCK_K)
    amax = 0.0
    m = tl.arange(0, ROWS_M)[:, None].to(RULE[16])
    k = tl.arange(0, BLOCK_K)[None, :]
    if RULE[0] == "group":
        largest = tl.zeros([ROWS_M * (BLOCK_K // RULE[6])], tl.float32)
        for i in range(0, BLOCK_M, ROWS_M):
            found = _grouped_rows(
                PRODUCE, inputs, OUT[0], OUT[1], first_m + i, first_k, left_m - i, left_k, M, K, RULE, BLOCK_K
            )
            if RULE[7] == "square":
                largest = tl.maximum(largest, found)
        if RULE[7] == "square":
            amax = tl.max(largest, axis=0)
    elif RULE[0] == "square" or RULE[7] == "square" or RULE[14]:
        size = tl.zeros([ROWS_M, BLOCK_K], tl.float32)
        for i in range(0, BLOCK_M, ROWS_M):
            is_in = (m < left_m - i) & (k < left_k)
            size = tl.maximum(size, tl.abs(PRODUCE(inputs, first_m + i, first_k, m, k, is_in)))
        amax = _largest(tl.max(size, axis=1), 0)
        if RULE[14]:
            _fold(OUT[7].to(tl.pointer_type(tl.int32)), amax, None)
    if RULE[0] == "line":
        for i in range(0, BLOCK_M, ROWS_M):
            row = tl.arange(0, ROWS_M)
            line_amax = _known_amax(OUT[4] + first_m + i + row, row < left_m - i)
            if tile_k == 0:
                tl.store(OUT[1] + first_m + i + row, _scale(line_amax, RULE, 0), mask=row < left_m - i)
            is_in = (m < left_m - i) & (k < left_k)
            values = PRODUCE(inputs, first_m + i, first_k, m, k, is_in)
            quant_scale = _quant_scale(line_amax, RULE, 0)[:, None]
            _scaled_rows(OUT[0], values, quant_scale, first_m + i, first_k, m, k, is_in, K, RULE)
    elif RULE[0] == "square" or RULE[0] == "tensor" or RULE[0] == "static":
        quant_scale = _uniform_scale(amax, OUT[4], OUT[6], RULE, 0)
        for i in range(0, BLOCK_M, ROWS_M):
            is_in = (m < left_m - i) & (k < left_k)
            values = PRODUCE(inputs, first_m + i, first_k, m, k, is_in)
            _scaled_rows(OUT[0], values, quant_scale, first_m + i, first_k, m, k, is_in, K, RULE)
        _store_uniform_scale(OUT[1], quant_scale, tile_m * tl.cdiv(K, BLOCK_K) + tile_k, is_first, RULE, 0)
    if RULE[7] == "group" or RULE[7] == "line":
        for i in range(0, BLOCK_K, COLS_K):
            _columns(PRODUCE, inputs, OUT, 1.0, first_m, first_k + i, left_m, left_k - i, M, K, RULE, BLOCK_M)
    elif RULE[7] == "square" or RULE[7] == "tensor" or RULE[7] == "static":
        quant_scale = _uniform_scale(amax, OUT[5], OUT[6], RULE, 7)
        for i in range(0, BLOCK_K, COLS_K):
            _columns(PRODUCE, inputs, OUT, quant_scale, first_m, first_k + i, left_m, left_k - i, M, K, RULE, BLOCK_M)
        _store_uniform_scale(OUT[3], quant_scale, tile_k * tl.cdiv(M, BLOCK_M) + tile_m, is_first, RULE, 7)


@triton.jit
def load_values(inputs, first_m, first_k, m, k, is_in):
    """The PRODUCE of a plain matrix; inputs are its address and row stride."""
    x, stride_xm = inputs
    places = x + (first_m * stride_xm + first_k) + (m * stride_xm + k)
    return tl.load(places, mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def quantize_tiles(OUT, x, stride_xm, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quantize one tile of x."""
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    emit(load_values, (x, stride_xm), OUT, pid // num_tiles_k, pid % num_tiles_k, M, K, RULE, BLOCK_M, BLOCK_K)


@triton.jit
def quantize_whole_rows(row_q, row_s, x, stride_xm, K, RULE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quantize one row a program: its second pass over the row hits the cache, so memory is read once."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        size = tl.maximum(size, tl.abs(values))
    quant_scale = _quant_scale(_largest(size, 0), RULE, 0)
    tl.store(row_s + row, tl.div_rn(1.0, quant_scale))
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        tl.store(row_q + row * K + cols, (values * quant_scale).to(RULE[1]), mask=cols < K)


@triton.jit
def _store_tile(q, num_cols, first_row, first_col, rows, cols, codes, row_is_in, col_is_in):
    places = q + (first_row * num_cols + first_col) + rows[:, None] * num_cols + cols[None, :]
    tl.store(places, codes, mask=row_is_in[:, None] & col_is_in[None, :])


@triton.jit
def emit_tile(values, OUT, tile_m, tile_k, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """emit for a producer that holds its tile: values [BLOCK_M, BLOCK_K] fp32, each a number of the source's dtype.

    They must be 0 outside the matrix. Slower than emit where columns are stored, because the tile lies across threads
    as its loads left it.
    """
    ROWS: tl.constexpr = RULE[0]
    COLS: tl.constexpr = RULE[7]
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_k = tile_k.to(tl.int64) * BLOCK_K
    # Offsets are kept relative to the tile: a 64-bit address for every element would spill registers.
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    row_is_in = rows < M - first_m
    col_is_in = cols < K - first_k
    is_first = (tile_m == 0) & (tile_k == 0)

    if ROWS == "amax_line":
        _fold(OUT[4] + first_m + rows, _largest(values, 1), row_is_in)
    if COLS == "amax_line":
        _fold(OUT[5] + first_k + cols, _largest(values, 0), col_is_in)
    amax = 0.0
    NEEDS_AMAX: tl.constexpr = ROWS == "amax_tensor" or COLS == "amax_tensor" or RULE[14]
    if NEEDS_AMAX or ROWS == "square" or COLS == "square":
        amax = _largest(tl.max(tl.abs(values), axis=1), 0)
    if ROWS == "amax_tensor":  # the columns' buffer is the same one
        _fold(OUT[4], amax, None)
    elif COLS == "amax_tensor":
        _fold(OUT[5], amax, None)
    if RULE[14]:
        _fold(OUT[7].to(tl.pointer_type(tl.int32)), amax, None)

    if ROWS == "group":
        GROUPS: tl.constexpr = BLOCK_K // RULE[6]
        group = tl.arange(0, GROUPS).to(tl.int64)[None, :]
        grouped = tl.reshape(values, [BLOCK_M, GROUPS, RULE[6]])
        amaxes = _largest(grouped, 2)  # [BLOCK_M, GROUPS]
        is_in = row_is_in[:, None] & (group * RULE[6] < K - first_k)
        places = OUT[1] + (first_k // RULE[6]) * M + first_m + group * M + rows[:, None]
        tl.store(places, _scale(amaxes, RULE, 0), mask=is_in)
        codes = (grouped * _quant_scale(amaxes, RULE, 0)[:, :, None]).to(RULE[1])
        codes = tl.reshape(codes, [BLOCK_M, BLOCK_K])
        _store_tile(OUT[0], K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)
    elif ROWS == "line":
        amaxes = _known_amax(OUT[4] + first_m + rows, row_is_in)  # [BLOCK_M]
        tl.store(OUT[1] + first_m + rows, _scale(amaxes, RULE, 0), mask=row_is_in & (tile_k == 0))
        codes = (values * _quant_scale(amaxes, RULE, 0)[:, None]).to(RULE[1])
        _store_tile(OUT[0], K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)
    elif ROWS == "square" or ROWS == "tensor" or ROWS == "static":
        quant_scale = _uniform_scale(amax, OUT[4], OUT[6], RULE, 0)
        _store_uniform_scale(OUT[1], quant_scale, tile_m * tl.cdiv(K, BLOCK_K) + tile_k, is_first, RULE, 0)
        codes = (values * quant_scale).to(RULE[1])
        _store_tile(OUT[0], K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)

    if COLS == "group" or COLS == "line":
        if COLS == "group":
            tl.static_assert(RULE[13] == BLOCK_M, "a tile is as high as the columns' group")
            amaxes = _largest(values, 0)  # [BLOCK_K]
            tl.store(OUT[3] + tile_m.to(tl.int64) * K + first_k + cols, _scale(amaxes, RULE, 7), mask=col_is_in)
        else:
            amaxes = _known_amax(OUT[5] + first_k + cols, col_is_in)
            tl.store(OUT[3] + first_k + cols, _scale(amaxes, RULE, 7), mask=col_is_in & (tile_m == 0))
        codes = tl.trans((values * _quant_scale(amaxes, RULE, 7)[None, :]).to(RULE[8]))
        _store_tile(OUT[2], M, first_k, first_m, cols, rows, codes, col_is_in, row_is_in)
    elif COLS == "square" or COLS == "tensor" or COLS == "static":
        quant_scale = _uniform_scale(amax, OUT[5], OUT[6], RULE, 7)
        _store_uniform_scale(OUT[3], quant_scale, tile_k * tl.cdiv(M, BLOCK_M) + tile_m, is_first, RULE, 7)
        codes = tl.trans((values * quant_scale).to(RULE[8]))  # where the rows' rule is the same, this is one cast
        _store_tile(OUT[2], M, first_k, first_m, cols, rows, codes, col_is_in, row_is_in)


@dataclasses.dataclass(frozen=True)
class Step:
    """One launch of a producer's kernel: what it passes on to emit or emit_tile, its tile and its grid."""

    out: tuple[torch.Tensor | None, ...]
    rule: tuple[Any, ...]
    block_m: int
    block_k: int
    num_warps: int
    grid: tuple[int]
    registers: int | None

    @property
    def options(self) -> dict[str, int]:
        """num_warps and, where there is one, the cap on registers, as triton names them."""
        return {"num_warps": self.num_warps} | ({} if self.registers is None else {"maxnreg": self.registers})


class Emission:
    """The host side of emit and emit_tile: outputs of both directions, and the launches that fill them.

    Every kernel is launched once for each of `steps`, with step.out, step.rule, its tile, its grid and its options.

    Args:
        M, K: shape of the matrix that is quantized.
        dtype: of the values it is quantized from: fp32, bf16 or fp16.
        scaling: of the rows, or None for no rows. column_scaling: of the columns, or None for no columns.
        quant_scale: one fp32 number that both directions use, per tensor only; None: from the values' own amax.
        amax_out: one fp32 number >= 0 into which the values' amax is folded; with quant_scale only.
        in_pieces: the producer ends with `emit`, not with emit_tile.
        longest_stride: between rows of what the producer reads, where it takes its offsets' type from RULE[16].
        wide: every tile's BLOCK_K is a multiple of 128, for a producer that emits a second matrix of 1x128 rows.
        aligned: whether the producer's own loads and sizes are multiples of 16 bytes; else, and for fp32, the two
            directions are two launches.
        tile: BLOCK_M, BLOCK_K, num_warps of a launch for rows alone, where the producer has a reason for its own;
            BLOCK_K a multiple of the rows' group, and the whole row where a row shares one scale.
    """

    def __init__(
        self,
        M: int,
        K: int,
        dtype: torch.dtype,
        device: torch.device,
        scaling: Scaling | None,
        column_scaling: Scaling | None = None,
        *,
        quant_scale: torch.Tensor | None = None,
        amax_out: torch.Tensor | None = None,
        aligned: bool = True,
        wide: bool = False,
        in_pieces: bool = False,
        longest_stride: int = 0,
        tile: tuple[int, int, int] | None = None,
    ) -> None:
        self.rows = None if scaling is None else _outputs(M, K, scaling, device)
        self.columns = None if column_scaling is None else _outputs(K, M, column_scaling, device)
        self.steps: list[Step] = []
        if 0 in (M, K):
            _fill_empty_scales(self.rows, self.columns, quant_scale)
            return
        is_long = max(M, K, longest_stride) > OFFSET_LIMIT
        whole_row = tile[1] if tile else 0
        row_rule = _rule(scaling, dtype, quant_scale is not None, whole_row)
        col_rule = _rule(column_scaling, dtype, quant_scale is not None, 0)
        row_amax, col_amax = _amax_buffers(row_rule, col_rule, M, K, device)
        out = (*_parts(self.rows), *_parts(self.columns), row_amax, col_amax, quant_scale, amax_out)
        wishes = (amax_out is not None, aligned, wide, in_pieces, is_long, tile)
        for used, *rest in _launches(M, K, dtype, row_rule, col_rule, *wishes):
            tensors = tuple(tensor if is_used else None for tensor, is_used in zip(out, used, strict=True))
            self.steps.append(Step(tensors, *rest))

    @property
    def row_codes(self) -> QuantizedTensor:
        """The rows' codes and scale."""
        assert self.rows is not None, "no rows were asked for"
        return self.rows

    @property
    def column_codes(self) -> QuantizedTensor:
        """The columns' codes and scale."""
        assert self.columns is not None, "no columns were asked for"
        return self.columns


def quantize_rows(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of x.

    Args:
        x: [M, K] bf16, fp16 or fp32, last dim contiguous (else it is copied), on a GPU.
        scaling: any.
        quant_scale: one fp32 value on x's device, per tensor only; without it, x's own amax decides.
        amax_out: one fp32 value into which max|x| is folded; with quant_scale only.

    Returns:
        qdata [M, K] FP8, contiguous, and decode scale [row blocks, column blocks] fp32, M-major for 1xB blocks.
    """
    rows = row_codes(x, scaling, quant_scale, amax_out)
    return rows.qdata, rows.scale


def quantize_columns(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x.t() from x [M, K] as stored: qdata [K, M] and its decode scale; arguments as in quantize_rows."""
    columns = column_codes(x, scaling, quant_scale, amax_out)
    return columns.qdata, columns.scale


def quantize_both(
    x: torch.Tensor,
    scaling: Scaling,
    column_scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both of the above from one read of x: row codes, row scale, column codes, column scale."""
    rows, columns = both_codes(x, scaling, column_scaling, quant_scale, amax_out)
    return rows.qdata, rows.scale, columns.qdata, columns.scale


def row_codes(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None
) -> QuantizedTensor:
    """quantize_rows as one operand."""
    if scaling.kind == "per_row" and x.numel():
        return _quantize_whole_rows(x if x.stride(-1) == 1 else x.contiguous(), scaling)
    return _quantize(x, scaling, None, quant_scale, amax_out).row_codes


def column_codes(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None
) -> QuantizedTensor:
    """quantize_columns as one operand."""
    return _quantize(x, None, scaling, quant_scale, amax_out).column_codes


def both_codes(
    x: torch.Tensor,
    scaling: Scaling,
    column_scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """quantize_both as two operands."""
    emission = _quantize(x, scaling, column_scaling, quant_scale, amax_out)
    return emission.row_codes, emission.column_codes


def _quantize(
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> Emission:
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    emission = Emission(
        M, K, x.dtype, x.device, scaling, column_scaling,
        quant_scale=quant_scale, amax_out=amax_out, aligned=_is_aligned(x), in_pieces=True, longest_stride=x.stride(0),
    )  # fmt: skip
    with on_device_of(x):
        for step in emission.steps:
            quantize_tiles[step.grid](
                step.out, x, x.stride(0), M, K,
                RULE=step.rule, BLOCK_M=step.block_m, BLOCK_K=step.block_k, **step.options,
            )  # fmt: skip
    return emission


def _quantize_whole_rows(x: torch.Tensor, scaling: Scaling) -> QuantizedTensor:
    M, K = x.shape
    out = _outputs(M, K, scaling, x.device)
    block_k = min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
    rule = (*_rule(scaling, x.dtype, False, 0), *NONE)
    with on_device_of(x):
        quantize_whole_rows[(M,)](
            out.qdata, out.scale, x, x.stride(0), K, RULE=rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS
        )
    return out


@functools.lru_cache(maxsize=1024)
def _launches(
    M: int,
    K: int,
    dtype: torch.dtype,
    row_rule: tuple[Any, ...],
    col_rule: tuple[Any, ...],
    observe: bool,
    aligned: bool,
    wide: bool,
    in_pieces: bool,
    is_long: bool,
    tile: tuple[int, int, int] | None,
) -> tuple[tuple[Any, ...], ...]:
    """Emission's launches as Step's fields, with which of OUT are used in place of OUT.

    Kept for each shape: making them takes the CPU longer than a small launch takes the GPU.
    """
    tail = (SOURCE_TYPES[dtype], tl.int64 if is_long else tl.int32)
    aligned = aligned and M % 16 == 0 and K % 16 == 0

    def launch(rule: tuple[Any, ...], tile: tuple[int, int, int] | None) -> tuple[Any, ...]:
        plan = _plan(rule[:7], rule[7:14])
        block_m, block_k, num_warps = tile or (plan[:3] if in_pieces else _tile_config(rule[:7], rule[7:14]))
        if wide and block_k % 128:
            num_warps = min(16, num_warps * 128 // block_k)
            block_k = 128
        if in_pieces and not aligned:
            num_warps *= 2  # narrow loads take an address each
        # Lanes lie along K first, 16 bytes each; what is left of a program's threads lies along M.
        spread = 32 * num_warps * 16 // (plan.cols_k * tail[0].primitive_bitwidth // 8)
        spread = max(1, min(spread, block_m // 2))
        rule = (*rule, *tail, plan.rows_m, plan.chunks, plan.cols_k, spread)
        grid = (triton.cdiv(M, block_m) * triton.cdiv(K, block_k),)
        return _used(rule), rule, block_m, block_k, num_warps, grid, plan.registers

    passes = []
    if row_rule[0] in ("line", "tensor") or col_rule[0] in ("line", "tensor"):
        passes.append(launch((*_amax_rule(row_rule), *_amax_rule(col_rule), False), None))
    is_both = row_rule != NONE and col_rule != NONE
    if is_both and not (aligned and dtype.itemsize == 2 and _one_tile(row_rule, col_rule)):
        # Both directions of a tile that no wide load or store fits would spill registers; and triton 3.6 permutes the
        # transposed codes of fp32 tiles where one cast feeds both stores (seen on an H200). emit shares no cast, but
        # that has not been seen on a card, so fp32 stays apart there too.
        passes += [launch((*row_rule, *NONE, observe), tile), launch((*NONE, *col_rule, False), None)]
    else:
        passes.append(launch((*row_rule, *col_rule, observe), tile if col_rule == NONE else None))
    return tuple(passes)


@functools.lru_cache(maxsize=256)
def _rule(scaling: Scaling | None, dtype: torch.dtype, is_known: bool, whole_row: int) -> tuple[Any, ...]:
    """The constants of one direction's quantization: docs/numerics.md. Their order is in this file's first lines."""
    if scaling is None:
        return NONE
    scales = "static" if is_known else SCALES_OF_KIND[scaling.kind]
    is_whole = scales == "line" and whole_row > 0
    return (
        "group" if is_whole else scales,
        FP8_TYPES[scaling.dtype],
        scaling.fp8_max,
        float(scaling.amax_floor),
        largest_quant_scale(scaling, dtype),
        scaling.scale_format == "e8m0",
        whole_row if is_whole else scaling.block_size[1],
    )


def _amax_rule(rule: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rule of the pass that finds the amaxes which `rule` needs."""
    return (f"amax_{rule[0]}", *NONE[1:]) if rule[0] in ("line", "tensor") else NONE


def _amax_buffers(
    row_rule: tuple[Any, ...], col_rule: tuple[Any, ...], M: int, K: int, device: torch.device
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zeroed bits of the rows' and the columns' amaxes; where both mean all of x they are one number."""
    sizes = [{"line": M, "tensor": 1}.get(row_rule[0], 0), {"line": K, "tensor": 1}.get(col_rule[0], 0)]
    if not any(sizes):
        return None, None
    if row_rule[0] == col_rule[0] == "tensor":
        shared = torch.zeros(1, dtype=torch.int32, device=device)
        return shared, shared
    row_bits, col_bits = torch.zeros(sum(sizes), dtype=torch.int32, device=device).split(sizes)
    return row_bits if sizes[0] else None, col_bits if sizes[1] else None


def _one_tile(row_rule: tuple[Any, ...], col_rule: tuple[Any, ...]) -> bool:
    """Whether a tile exists that suits both directions."""
    if "group" == col_rule[0] != row_rule[0] == "square":
        return col_rule[6] == row_rule[6]
    if "square" == col_rule[0] != row_rule[0] == "group":
        return col_rule[6] % row_rule[6] == 0
    return True


def _plan(row_rule: tuple[Any, ...], col_rule: tuple[Any, ...]) -> Plan:
    """The plan of a rule, by kind of work and never by the size of x."""
    row, col = row_rule[0], col_rule[0]
    if "amax_line" in (row, col):
        return PLANS["amax of lines"]
    if "amax_tensor" in (row, col):
        return PLANS["amax of all"]
    if (row == "group" and row_rule[6] == 32) or (col == "group" and col_rule[6] == 32):
        return PLANS["groups of 32"]._replace(**({"block_m": 128} if _is_high(row, col_rule) else {}))
    if "square" in (row, col):
        return PLANS["group and square" if "group" in (row, col) else "square"]
    if col == "none":
        return PLANS["group rows" if row == "group" else "rows"]
    if row == "none":
        return PLANS["group columns" if col == "group" else "columns"]
    if "group" in (row, col):
        return PLANS["group both"]
    return PLANS["lines both" if "line" in (row, col) else "both"]


def _is_high(row: str, col_rule: tuple[Any, ...]) -> bool:
    """Whether a tile with a group of 32 has a direction that makes it 128 rows high."""
    return row == "square" or col_rule[0] == "square" or col_rule[6] == 128


def _tile_config(row_rule: tuple[Any, ...], col_rule: tuple[Any, ...]) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_K and num_warps of emit_tile: by scaling and direction, never by the size of x."""
    if "amax_line" in (row_rule[0], col_rule[0]):
        return AMAX_TILE
    for rule in (row_rule, col_rule):
        if rule[0] == "square":
            return rule[6], rule[6], SQUARE_TILE_WARPS[rule[6]]
    if row_rule[0] == "group" and col_rule == NONE:
        return GROUP_ROWS_TILE[0], row_rule[6], GROUP_ROWS_TILE[1]
    if row_rule[0] == "group" and col_rule[0] == "group":
        return col_rule[6], row_rule[6], SQUARE_TILE_WARPS[max(row_rule[6], col_rule[6])]
    if row_rule[0] == "group":
        return TRANSPOSED_TILE[0], row_rule[6], 2 * TRANSPOSED_TILE[2]
    if col_rule[0] == "group":
        return col_rule[6], TRANSPOSED_TILE[1], SQUARE_TILE_WARPS[col_rule[6]] // 2
    return STRAIGHT_TILE if col_rule == NONE else TRANSPOSED_TILE


def _used(rule: tuple[Any, ...]) -> tuple[bool, ...]:
    """Which of OUT this rule needs; the others are None, so that one kernel is compiled for each rule."""
    row, col, observe = rule[0], rule[7], rule[14]
    codes = ("group", "square", "line", "tensor", "static")
    return (
        row in codes,
        row in codes,
        col in codes,
        col in codes,
        row in ("line", "tensor", "amax_line", "amax_tensor"),
        col in ("line", "tensor", "amax_line", "amax_tensor"),
        "static" in (row, col),
        observe,
    )


def _outputs(rows: int, cols: int, scaling: Scaling, device: torch.device) -> QuantizedTensor:
    qdata = torch.empty(rows, cols, dtype=scaling.dtype, device=device)
    num_rows, num_cols = scaling.scale_shape(rows, cols)
    if SCALES_OF_KIND[scaling.kind] == "group":
        scale = torch.empty(num_cols, num_rows, dtype=torch.float32, device=device).t()  # strides (1, rows)
    else:
        scale = torch.empty(num_rows, num_cols, dtype=torch.float32, device=device)
    return QuantizedTensor(qdata, scale, scaling)


def _parts(q: QuantizedTensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if q is None else (q.qdata, q.scale)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether Triton specializes x's address, stride and sizes as multiples of 16, and so moves 16 bytes at once."""
    return all(n % 16 == 0 for n in (x.data_ptr(), x.stride(0), *x.shape))


def _fill_empty_scales(
    rows: QuantizedTensor | None, columns: QuantizedTensor | None, static: torch.Tensor | None
) -> None:
    for q in (rows, columns):
        if q is not None:
            q.scale.copy_(torch.ones_like(q.scale) if static is None else torch.ones_like(q.scale) / static)


def on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    """The context in which a kernel that works on x is launched."""
    if not x.is_cuda or x.device.index == torch.cuda.current_device():
        return contextlib.nullcontext()
    return torch.cuda.device(x.device)
