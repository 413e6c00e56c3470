"""Device side of the quantizers: `emit` quantizes a tile of a matrix that its caller computes, rows, columns or both.

x is [M, K]; "columns" is the quantization of x.t(), its codes [K, M] row-major (K-major for a GEMM that
sums over M).

RULE is (*rows' rule, *columns' rule, OBSERVE, SOURCE, OFFSET, ROWS_M, CHUNKS, COLS_K, SPREAD), flat because triton 3.6
takes no tuple of tuples. A direction's rule is (SCALES, FP8, FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2, BLOCK), with SCALES
"none" for a direction left out. What shares a scale is SCALES: "group" BLOCK elements of a line, "square" a whole tile,
"line" a whole row or column and "tensor" all of x (both from amax buffers that a first pass, "amax_line" or
"amax_tensor", has filled), "static" all of x with a given quant_scale; with OBSERVE the tile's own amax is folded into
amax_out as well. SOURCE is the type of the values, OFFSET that of offsets in a tile; for the rest see TilePlan.
OUT is (row_q, row_s, col_q, col_s, row_amax, col_amax, static, amax_out, infinite), with None for what a rule does not
use; infinite is the device's flag (octavo.numerics.infinity), set by the program that reads an infinite amax.
"""

import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import IS_COMPILED, let_next_begin  # the interpreter knows no PTX
from octavo.ops.quantize.triton.casts import hold, widen


@triton.jit
def amax_over(size, axis: tl.constexpr):
    # NaN drops out of a max; a line of NaN alone leaves NaN, which is repaired here, after the reduction, because
    # min/max that propagate NaN miscompile beside a transposed FP8 store.
    amax = tl.max(tl.abs(size), axis=axis)
    return tl.where(amax == amax, amax, 0.0)


@triton.jit
def quant_scale_of(amax, RULE: tl.constexpr, AT: tl.constexpr):
    """The rule's quant_scale of each amax: FP8_MAX / amax, correctly rounded without a branch; 1 for NaN.

    The quotient for the mantissa m in [1, 2) comes from 1 / m and one step on its remainder. That rounds right from
    any inverse close to 2**-21 where m has the 11 bits of a 16-bit source, and else from one that is right to the last
    bit, by a quadratic and two Newton steps. tests/ops/quantize/test_division.py holds both against true division.
    """
    FP8_MAX: tl.constexpr = RULE[AT + 2]
    amax = tl.where(amax > RULE[AT + 3], amax, RULE[AT + 3]) if RULE[AT + 3] > 0.0 else amax
    bits = amax.to(tl.int32, bitcast=True)
    m_bits = (bits & 0x7FFFFF) | 0x3F800000
    m = m_bits.to(tl.float32, bitcast=True)
    if RULE[15] == tl.float32 or RULE[AT + 3] > 0.0:
        inverse = tl.fma(tl.fma(m, 0.3232325, -1.4545455), m, 2.1212122)
        inverse = tl.fma(tl.fma(-m, inverse, 1.0), inverse, inverse)
        inverse = tl.fma(tl.fma(-m, inverse, 1.0), inverse, inverse)
    else:
        inverse = tl.rsqrt(m)
        inverse = inverse * inverse
    quotient = FP8_MAX * inverse
    quotient = tl.fma(tl.fma(-m, quotient, FP8_MAX), inverse, quotient)
    scale_bits = (quotient.to(tl.int32, bitcast=True) - (bits - m_bits)).to(tl.uint32, bitcast=True)
    if RULE[15] == tl.bfloat16 and RULE[AT + 3] == 0.0:
        # No quotient of bf16 lies between RULE[AT + 4] and infinity, and no overflow passes the unsigned numbers.
        largest = tl.cast(RULE[AT + 4], tl.float32).to(tl.uint32, bitcast=True)
        scale_bits = tl.minimum(scale_bits, largest)
        quant_scale = scale_bits.to(tl.float32, bitcast=True)
    else:
        quant_scale = scale_bits.to(tl.float32, bitcast=True)
        # Up to this amax the quotient overflows.
        quant_scale = tl.where(amax > FP8_MAX * 2.0**-128, quant_scale, RULE[AT + 4])
    # 0, infinity and NaN; compared as floats they would take twice the instructions
    is_number = (bits - 1).to(tl.uint32, bitcast=True) < 0x7F7FFFFF
    quant_scale = tl.where(is_number, quant_scale, 1.0)
    if RULE[AT + 5]:
        quant_scale = (quant_scale.to(tl.int32, bitcast=True) & 0x7F800000).to(tl.float32, bitcast=True)
    return quant_scale


@triton.jit
def decode_scale_of(amax, RULE: tl.constexpr, AT: tl.constexpr):
    """The decode scale of each amax, to be stored."""
    # An amax is a number of the source's dtype. Triton moves the change of layout before a store up to the widening,
    # so that each scale is divided by one thread and not by all that share its line.
    amax = amax.to(RULE[15]).to(tl.float32)
    return tl.div_rn(1.0, quant_scale_of(amax, RULE, AT))


@triton.jit
def note_infinite(infinite, amax):
    """Set the flag where one of these amaxes is infinite, which its quant_scale of 1 does not show."""
    if infinite is not None and IS_COMPILED:
        # Each thread looks at the amaxes that it has: tl.store would move them to other threads first, through shared
        # memory, and take the registers of a program. All write the same number.
        tl.inline_asm_elementwise(
            "{ .reg .pred is_inf; .reg .b32 one; mov.b32 one, 1; setp.eq.f32 is_inf, $1, 0f7F800000; "
            "@is_inf st.global.b32 [$2], one; mov.b32 $0, one; }",
            constraints="=r,r,l",
            args=[amax, infinite.to(tl.int64)],
            dtype=tl.int32,
            is_pure=False,
            pack=1,
        )
    elif infinite is not None:
        tl.store(infinite + tl.zeros(amax.shape, tl.int32), 1, mask=amax == float("inf"))


@triton.jit
def fold_amax(buffer, amax, mask):
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
        quant_scale = quant_scale_of(tl.load(known_amax).to(tl.float32, bitcast=True), RULE, AT)
    else:
        quant_scale = quant_scale_of(amax, RULE, AT)
    return quant_scale


@triton.jit
def _store_uniform_scale(
    scale, quant_scale, square, is_first, amax, known_amax, infinite, RULE: tl.constexpr, AT: tl.constexpr
):
    if RULE[AT] == "square":
        tl.store(scale + square, tl.div_rn(1.0, quant_scale))
        if infinite is not None:
            tl.store(infinite, 1, mask=amax == float("inf"))
    elif is_first:
        tl.store(scale, tl.div_rn(1.0, quant_scale))
        if RULE[AT] == "tensor" and infinite is not None:
            tl.store(infinite, 1, mask=tl.load(known_amax) == 0x7F800000)


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
            fold_amax(OUT[4] + first_m + i + m, amax_over(values, 1), m < left_m - i)
        size = tl.maximum(size, values)
    if RULE[7] == "amax_line":
        fold_amax(OUT[5] + first_k + k, amax_over(size, 0), k < left_k)
    if RULE[0] == "amax_tensor":  # the columns' buffer is the same one
        fold_amax(OUT[4], amax_over(tl.max(size, axis=1), 0), None)
    elif RULE[7] == "amax_tensor":
        fold_amax(OUT[5], amax_over(tl.max(size, axis=1), 0), None)


@triton.jit
def _grouped_rows(
    PRODUCE: tl.constexpr, inputs, OUT, first_m, first_k, left_m, left_k, M, K, RULE: tl.constexpr,
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
    amax = amax_over(tl.max(tl.abs(values), axis=2), 0)
    places = OUT[1] + (first_k // RULE[6]) * M + first_m + (line % GROUPS).to(RULE[16]) * M + line_m
    tl.store(places, decode_scale_of(amax, RULE, 0), mask=(line_m < left_m) & (line_k < left_k))
    note_infinite(OUT[8], amax)
    codes = (values * quant_scale_of(amax, RULE, 0)[None, :, None]).to(RULE[1])
    tl.store(OUT[0] + (first_m * K + first_k) + (m * K + k), codes, mask=is_in)
    return amax


@triton.jit
def _scaled_rows(row_q, values, quant_scale, first_m, first_k, m, k, is_in, K, RULE: tl.constexpr):
    codes = (values * quant_scale).to(RULE[1])
    tl.store(row_q + (first_m * K + first_k) + (m * K + k), codes, mask=is_in)


@triton.jit
def even_rows(BLOCK_M: tl.constexpr, SPREAD: tl.constexpr):
    """The even rows of a tile, [BLOCK_M / 2], in the order in which every thread owns whole words of a column.

    SPREAD threads lie along M and own BLOCK_M / SPREAD consecutive rows each.
    """
    half = tl.arange(0, BLOCK_M // 2)
    return half % SPREAD * (BLOCK_M // SPREAD) + half // SPREAD * 2


@triton.jit
def _store_columns(places, codes, left_m, left_k, M, RULE: tl.constexpr, BLOCK_M: tl.constexpr):
    """Store codes [even_rows, columns, 2 (the even row and the next)] transposed, from `places` on."""
    SPREAD: tl.constexpr = RULE[20]
    COLS_K: tl.constexpr = codes.shape[1]
    codes = tl.permute(tl.reshape(codes, [BLOCK_M // SPREAD // 2, SPREAD, COLS_K, 2]), (2, 1, 0, 3))
    codes = tl.reshape(codes, [COLS_K, BLOCK_M])
    k = tl.arange(0, COLS_K)[:, None]
    m = tl.arange(0, BLOCK_M)[None, :]
    tl.store(places + (k.to(RULE[16]) * M + m), codes, mask=(k < left_k) & (m < left_m))


@triton.jit
def _columns(
    PRODUCE: tl.constexpr, inputs, OUT, quant_scale, first_m, first_k, left_m, left_k, M, K, RULE: tl.constexpr,
    BLOCK_M: tl.constexpr,
):  # fmt: skip
    """Quantize COLS_K columns and store their codes transposed; quant_scale is used where a tile has one."""
    COLS_K: tl.constexpr = RULE[19]
    infinite = OUT[8] if RULE[0] == "none" else None  # rows have the same values
    column = tl.arange(0, COLS_K)
    m = even_rows(BLOCK_M, RULE[20])[:, None].to(RULE[16])
    k = column[None, :]
    even = PRODUCE(inputs, first_m, first_k, m, k, (m < left_m) & (k < left_k))
    odd = PRODUCE(inputs, first_m, first_k, m + 1, k, (m + 1 < left_m) & (k < left_k))
    values = tl.join(even, odd)  # [BLOCK_M / 2, COLS_K, 2]: the cast pairs neighbours along M, as they are stored
    if RULE[7] == "group":
        amax = amax_over(tl.maximum(tl.abs(even), tl.abs(odd)), 0)  # [COLS_K]
        places = OUT[3] + (first_m // BLOCK_M) * K + first_k + column
        tl.store(places, decode_scale_of(amax, RULE, 7), mask=column < left_k)
        note_infinite(infinite, amax)
        codes = (values * quant_scale_of(amax, RULE, 7)[None, :, None]).to(RULE[8])
    elif RULE[7] == "line":
        amax = _known_amax(OUT[5] + first_k + column, column < left_k)
        if first_m == 0:
            tl.store(OUT[3] + first_k + column, decode_scale_of(amax, RULE, 7), mask=column < left_k)
            note_infinite(infinite, amax)
        codes = (values * quant_scale_of(amax, RULE, 7)[None, :, None]).to(RULE[8])
    else:
        codes = (values * quant_scale).to(RULE[8])
    _store_columns(OUT[2] + (first_k * M + first_m), codes, left_m, left_k, M, RULE, BLOCK_M)


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
            found = _grouped_rows(PRODUCE, inputs, OUT, first_m + i, first_k, left_m - i, left_k, M, K, RULE, BLOCK_K)
            if RULE[7] == "square":
                largest = tl.maximum(largest, found)
        if RULE[7] == "square":
            amax = tl.max(largest, axis=0)
    elif RULE[0] == "square" or RULE[7] == "square" or RULE[14]:
        size = tl.zeros([ROWS_M, BLOCK_K], tl.float32)
        for i in range(0, BLOCK_M, ROWS_M):
            is_in = (m < left_m - i) & (k < left_k)
            size = tl.maximum(size, tl.abs(PRODUCE(inputs, first_m + i, first_k, m, k, is_in)))
        amax = amax_over(tl.max(size, axis=1), 0)
        if RULE[14]:
            fold_amax(OUT[7].to(tl.pointer_type(tl.int32)), amax, None)
            if OUT[8] is not None:
                tl.store(OUT[8], 1, mask=amax == float("inf"))
    if RULE[0] == "line":
        for i in range(0, BLOCK_M, ROWS_M):
            row = tl.arange(0, ROWS_M)
            line_amax = _known_amax(OUT[4] + first_m + i + row, row < left_m - i)
            if tile_k == 0:
                tl.store(OUT[1] + first_m + i + row, decode_scale_of(line_amax, RULE, 0), mask=row < left_m - i)
                note_infinite(OUT[8], line_amax)
            is_in = (m < left_m - i) & (k < left_k)
            values = PRODUCE(inputs, first_m + i, first_k, m, k, is_in)
            quant_scale = quant_scale_of(line_amax, RULE, 0)[:, None]
            _scaled_rows(OUT[0], values, quant_scale, first_m + i, first_k, m, k, is_in, K, RULE)
    elif RULE[0] == "square" or RULE[0] == "tensor" or RULE[0] == "static":
        quant_scale = _uniform_scale(amax, OUT[4], OUT[6], RULE, 0)
        for i in range(0, BLOCK_M, ROWS_M):
            is_in = (m < left_m - i) & (k < left_k)
            values = PRODUCE(inputs, first_m + i, first_k, m, k, is_in)
            _scaled_rows(OUT[0], values, quant_scale, first_m + i, first_k, m, k, is_in, K, RULE)
        square = tile_m * tl.cdiv(K, BLOCK_K) + tile_k
        _store_uniform_scale(OUT[1], quant_scale, square, is_first, amax, OUT[4], OUT[8], RULE, 0)
    if RULE[7] == "group" or RULE[7] == "line":
        for i in range(0, BLOCK_K, COLS_K):
            _columns(PRODUCE, inputs, OUT, 1.0, first_m, first_k + i, left_m, left_k - i, M, K, RULE, BLOCK_M)
    elif RULE[7] == "square" or RULE[7] == "tensor" or RULE[7] == "static":
        quant_scale = _uniform_scale(amax, OUT[5], OUT[6], RULE, 7)
        for i in range(0, BLOCK_K, COLS_K):
            _columns(PRODUCE, inputs, OUT, quant_scale, first_m, first_k + i, left_m, left_k - i, M, K, RULE, BLOCK_M)
        square = tile_k * tl.cdiv(M, BLOCK_M) + tile_m
        infinite = OUT[8] if RULE[0] == "none" else None
        _store_uniform_scale(OUT[3], quant_scale, square, is_first, amax, OUT[5], infinite, RULE, 7)


@triton.jit
def _fold_register_tile(row_even, row_odd, size, OUT, first_m, first_k, left_m, m, RULE: tl.constexpr):
    """Fold a register tile's amaxes: row_even and row_odd [BLOCK_M / 2] of its rows, size [BLOCK_M / 2, BLOCK_K]."""
    row_even = tl.where(row_even == row_even, row_even, 0.0)
    row_odd = tl.where(row_odd == row_odd, row_odd, 0.0)
    if RULE[0] == "amax_line":
        fold_amax(OUT[4] + first_m + m, row_even, m < left_m)
        fold_amax(OUT[4] + first_m + m + 1, row_odd, m + 1 < left_m)
    if RULE[7] == "amax_line":
        fold_amax(OUT[5] + first_k + tl.arange(0, RULE[19]), amax_over(size, 0), None)
    amax = tl.max(tl.maximum(row_even, row_odd), axis=0)
    if RULE[0] == "amax_tensor":  # the columns' buffer is the same one
        fold_amax(OUT[4], amax, None)
    elif RULE[7] == "amax_tensor":
        fold_amax(OUT[5], amax, None)
    if RULE[14]:
        fold_amax(OUT[7].to(tl.pointer_type(tl.int32)), amax, None)
        if OUT[8] is not None:
            tl.store(OUT[8], 1, mask=amax == float("inf"))


@triton.jit
def quantize_register_tile(even, odd, OUT, tile_m, tile_k, M, K, RULE: tl.constexpr):
    """emit for a producer whose values cost too much to compute twice: both directions of a tile that it holds.

    even and odd are [BLOCK_M / 2, BLOCK_K] in the source's dtype, best made by `hold`: the rows even_rows(BLOCK_M,
    SPREAD) of the tile and the ones after them, 0 outside the matrix, with BLOCK_M = RULE[17], BLOCK_K = RULE[19] and
    SPREAD = RULE[20]. A thread then owns what it stores in either direction. K is a multiple of BLOCK_K; a group is as
    long as its side of the tile, a square the tile.
    """
    BLOCK_M: tl.constexpr = RULE[17]
    BLOCK_K: tl.constexpr = RULE[19]
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_k = tile_k.to(tl.int64) * BLOCK_K
    left_m = tl.minimum(M - first_m, BLOCK_M).to(tl.int32)
    m = even_rows(BLOCK_M, RULE[20])
    k = tl.arange(0, BLOCK_K)
    IS_AMAX: tl.constexpr = RULE[0] == "amax_line" or RULE[0] == "amax_tensor"
    IS_COLUMN_AMAX: tl.constexpr = RULE[7] == "amax_line" or RULE[7] == "amax_tensor"
    even = widen(even)
    odd = widen(odd)
    size = tl.maximum(tl.abs(even), tl.abs(odd))
    if RULE[7] == "group":
        # [BLOCK_K]; first, or more would wait in registers for it
        col_amax = hold(tl.max(size, axis=0), RULE[15])
    row_even = tl.max(tl.abs(even), axis=1)  # NaN of a line of NaN makes the scale 1, as 0 does
    row_odd = tl.max(tl.abs(odd), axis=1)
    if IS_AMAX or IS_COLUMN_AMAX or RULE[14]:
        _fold_register_tile(row_even, row_odd, size, OUT, first_m, first_k, left_m, m, RULE)
    if not (IS_AMAX or IS_COLUMN_AMAX):
        if RULE[0] == "static" or RULE[0] == "tensor":
            scale_even = _uniform_scale(0.0, OUT[4], OUT[6], RULE, 0)
            scale_odd = scale_even
            is_first = (tile_m == 0) & (tile_k == 0)
            _store_uniform_scale(OUT[1], scale_even, 0, is_first, 0.0, OUT[4], OUT[8], RULE, 0)
        else:
            places = OUT[1] + first_m + m
            if RULE[0] == "group":
                places += tile_k.to(tl.int64) * M
            else:
                row_even = _known_amax(OUT[4] + first_m + m, m < left_m)
                row_odd = _known_amax(OUT[4] + first_m + m + 1, m + 1 < left_m)
            if RULE[0] == "group" or tile_k == 0:
                pair = tl.arange(0, 2)[None, :]
                scales = decode_scale_of(tl.join(row_even, row_odd), RULE, 0)  # [BLOCK_M / 2, 2]
                tl.store(places[:, None] + pair, scales, mask=m[:, None] + pair < left_m)
                note_infinite(OUT[8], tl.maximum(row_even, row_odd))
            scale_even = quant_scale_of(row_even, RULE, 0)[:, None]
            scale_odd = quant_scale_of(row_odd, RULE, 0)[:, None]
        row_q = OUT[0] + (first_m * K + first_k)
        offsets = m[:, None].to(RULE[16]) * K + k[None, :]
        tl.store(row_q + offsets, (even * scale_even).to(RULE[1]), mask=(m < left_m)[:, None])
        tl.store(row_q + K + offsets, (odd * scale_odd).to(RULE[1]), mask=(m + 1 < left_m)[:, None])
        if RULE[7] == "group" or RULE[7] == "line":
            if RULE[7] == "group":
                amax = widen(col_amax)
                tl.store(OUT[3] + tile_m.to(tl.int64) * K + first_k + k, decode_scale_of(amax, RULE, 7))
            else:
                amax = _known_amax(OUT[5] + first_k + k, k < BLOCK_K)
                if tile_m == 0:
                    tl.store(OUT[3] + first_k + k, decode_scale_of(amax, RULE, 7))
            scale = quant_scale_of(amax, RULE, 7)[None, :, None]
        else:
            tile_amax = 0.0
            if RULE[7] == "square":
                tile_amax = tl.max(tl.maximum(row_even, row_odd), axis=0)
            scale = _uniform_scale(tile_amax, OUT[5], OUT[6], RULE, 7)
            square = tile_k * tl.cdiv(M, BLOCK_M) + tile_m
            is_first = (tile_m == 0) & (tile_k == 0)
            _store_uniform_scale(OUT[3], scale, square, is_first, tile_amax, OUT[5], None, RULE, 7)
        codes = (tl.join(even, odd) * scale).to(RULE[8])
        _store_columns(OUT[2] + (first_k * M + first_m), codes, left_m, BLOCK_K, M, RULE, BLOCK_M)


@triton.jit
def load_values(inputs, first_m, first_k, m, k, is_in):
    """The PRODUCE of a plain matrix; inputs are its address and row stride."""
    x, stride_xm = inputs
    places = x + (first_m * stride_xm + first_k) + (m * stride_xm + k)
    return widen(tl.load(places, mask=is_in, other=0.0))


@triton.jit
def quantize_tiles(OUT, x, stride_xm, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quantize one tile of x."""
    let_next_begin()
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    emit(load_values, (x, stride_xm), OUT, pid // num_tiles_k, pid % num_tiles_k, M, K, RULE, BLOCK_M, BLOCK_K)


@triton.jit
def quantize_whole_rows(OUT, x, stride_xm, M, K, RULE: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quantize one row a program: its second pass over the row hits the cache, so memory is read once."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        size = tl.maximum(size, tl.abs(values))
    amax = amax_over(size, 0)
    quant_scale = quant_scale_of(amax, RULE, 0)
    tl.store(OUT[1] + row, tl.div_rn(1.0, quant_scale))
    tl.store(OUT[8], 1, mask=amax == float("inf"))
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        tl.store(OUT[0] + row * K + cols, (values * quant_scale).to(RULE[1]), mask=cols < K)


@triton.jit
def _store_tile(q, num_cols, first_row, first_col, rows, cols, codes, row_is_in, col_is_in):
    places = q + (first_row * num_cols + first_col) + rows[:, None] * num_cols + cols[None, :]
    tl.store(places, codes, mask=row_is_in[:, None] & col_is_in[None, :])


@triton.jit
def emit_tile(values, OUT, tile_m, tile_k, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """Quantize the rows of a tile that the caller holds, by groups or with a known scale.

    values are [BLOCK_M, BLOCK_K] fp32, each a number of the source's dtype, and 0 outside the matrix.
    """
    tl.static_assert(RULE[7] == "none" and (RULE[0] == "group" or RULE[0] == "static"), "what emit_tile can emit")
    first_m = tile_m.to(tl.int64) * BLOCK_M
    first_k = tile_k.to(tl.int64) * BLOCK_K
    # Offsets are kept relative to the tile: a 64-bit address for every element would spill registers.
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    row_is_in = rows < M - first_m
    col_is_in = cols < K - first_k
    if RULE[0] == "group":
        GROUPS: tl.constexpr = BLOCK_K // RULE[6]
        group = tl.arange(0, GROUPS).to(tl.int64)[None, :]
        grouped = tl.reshape(values, [BLOCK_M, GROUPS, RULE[6]])
        amaxes = amax_over(grouped, 2)  # [BLOCK_M, GROUPS]
        is_in = row_is_in[:, None] & (group * RULE[6] < K - first_k)
        places = OUT[1] + (first_k // RULE[6]) * M + first_m + group * M + rows[:, None]
        tl.store(places, decode_scale_of(amaxes, RULE, 0), mask=is_in)
        note_infinite(OUT[8], amaxes)
        codes = (grouped * quant_scale_of(amaxes, RULE, 0)[:, :, None]).to(RULE[1])
        codes = tl.reshape(codes, [BLOCK_M, BLOCK_K])
    else:
        quant_scale = tl.load(OUT[6])
        if (tile_m == 0) & (tile_k == 0):
            tl.store(OUT[1], tl.div_rn(1.0, quant_scale))
        codes = (values * quant_scale).to(RULE[1])
    _store_tile(OUT[0], K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)
