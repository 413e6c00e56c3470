"""Triton RMSNorm and LayerNorm: forward, forward with quantization (norm_quantize/triton.py launches it), backward.

x is [T, K]. A program owns ROWS whole rows of BLOCK_K >= K places, or walks over one row too long for that in chunks.
Sums along a row follow one tree of pairs, whatever the layout, so that every kernel, tile and alignment gives a row the
same bits; where it could change them, products are not fused into sums. A norm without mean is RMSNorm.
"""

from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, let_next_begin, on_device_of, wait_for_last
from octavo.ops.one_shot.triton import exchange_few_rows, exchange_rows
from octavo.ops.quantize.triton.casts import round_to, widen
from octavo.ops.quantize.triton.device import emit, emit_tile

# A program's elements (rows of fewer share it) and its elements a warp, 32 a thread.
ROW_TILE = 4096
ELEMENTS_PER_WARP = 1024
LONGEST_ROW = 16384
CHUNK = 4096  # of longer rows; a multiple of every FP8 group
CHUNK_WARPS = 4

# Backward: most programs, each of which leaves one partial sum over its rows; stages of its loop's loads.
BACKWARD_PROGRAMS = 264
BACKWARD_ELEMENTS_PER_WARP = 1024
BACKWARD_STAGES = 3
BACKWARD_LONGEST_ROW = 8192
COLUMN_TILE = (4, 512, 4)  # rows, columns and warps of the sums over long rows' tokens
PARTIAL_TILE = (32, 32, 4)  # partial sums, columns and warps of the last sum


@triton.jit
def tree_sum(x, DONE: tl.constexpr = 0):
    """Sums of the rows of x [ROWS, N] in an order of its own: pairs of neighbours thrice, then halves. -> [ROWS]

    DONE: steps that were made before.
    """
    for step in tl.static_range(DONE, 24):
        if x.shape[1] > 1:
            # A sum of two is the same in either order, so no layout can change it. Neighbours lie in one thread.
            if step < 3:
                x = _neighbour_sums(x)
            else:
                x = tl.sum(tl.reshape(x, [x.shape[0], 2, x.shape[1] // 2]), axis=1)
    return tl.reshape(x, [x.shape[0]])


@triton.jit
def tree_sum_of_pairs(first, second, INTERLEAVED: tl.constexpr):
    """tree_sum of rows given as two halves [ROWS, N / 2] of 8 numbers or more, or every second number of each."""
    if INTERLEAVED:
        total = tree_sum(first + second, 1)
    else:
        for _ in tl.static_range(3):
            first, second = _neighbour_sums(first), _neighbour_sums(second)
        total = tree_sum(first + second, 4)
    return total


@triton.jit
def _neighbour_sums(x):
    return tl.sum(tl.reshape(x, [x.shape[0], x.shape[1] // 2, 2]), axis=2)


@triton.jit
def inverse_root(sum_squares, K, eps):
    return tl.div_rn(1.0, tl.sqrt_rn(tl.div_rn(sum_squares, tl.cast(K, tl.float32)) + eps))


@triton.jit
def row_statistics(values, col_is_in, K, eps, HAS_MEAN: tl.constexpr):
    """(mean [ROWS], rstd [ROWS]) of values [ROWS, BLOCK_K], which are 0 past K."""
    if HAS_MEAN:
        mean = tl.div_rn(tree_sum(values), tl.cast(K, tl.float32))
        centred = tl.where(col_is_in[None, :], values - mean[:, None], 0.0)
        rstd = inverse_root(tree_sum(centred * centred), K, eps)
    else:
        rstd = inverse_root(tree_sum(values * values), K, eps)
        mean = tl.zeros_like(rstd)
    return mean, rstd


@triton.jit
def normalize(values, mean, rstd, gamma, beta, HAS_MEAN: tl.constexpr, HAS_BIAS: tl.constexpr):
    """The norm of values [ROWS, COLS] in fp32; mean, rstd [ROWS], gamma, beta [1, COLS]."""
    if HAS_MEAN:
        values = values - mean[:, None]
    y = values * rstd[:, None] * gamma
    if HAS_BIAS:
        y = y + beta
    return y


@triton.jit
def load_gamma(weight, cols, col_is_in, ZERO_CENTERED: tl.constexpr):
    """The factors [1, COLS]: of two dims, so that they are loaded in the layout of the rows."""
    gamma = widen(tl.load(weight + cols[None, :], mask=col_is_in[None, :], other=0.0))
    return gamma + 1.0 if ZERO_CENTERED else gamma


@triton.jit
def load_beta(bias, cols, col_is_in):
    """The summands [1, COLS]."""
    if bias is None:
        beta = tl.zeros([1, cols.shape[0]], tl.float32)
    else:
        beta = widen(tl.load(bias + cols[None, :], mask=col_is_in[None, :], other=0.0))
    return beta


@triton.jit
def add_expert_rows(x, routed, stride_xm, first_row, rows, cols, row_is_in, is_in, TOP_K: tl.constexpr):
    """Each token's rows of x times their weights, added in slot order in fp32 and rounded, as combine_rows does it."""
    total = tl.zeros([rows.shape[0], cols.shape[0]], tl.float32)
    parts = ()
    for s in tl.static_range(TOP_K):  # all are asked for before the first is waited for
        slots = (first_row + rows) * TOP_K + s
        row = tl.load(routed[0] + slots, mask=row_is_in, other=0)
        part = tl.load(x + (row[:, None] * stride_xm + cols[None, :]), mask=is_in, other=0.0)
        parts += (part, tl.load(routed[1] + slots, mask=row_is_in, other=0.0))  # type: ignore[assignment]
    for s in tl.static_range(TOP_K):
        total += widen(parts[2 * s]) * parts[2 * s + 1][:, None]
    return round_to(total, x.dtype.element_ty)


@triton.jit
def load_sum(
    x, residual, exchange, stride_xm, stride_rm, first_row, rows, cols, row_is_in, is_in,
    WAY: tl.constexpr,
):  # fmt: skip
    """x + residual at these places, rounded to x's dtype, in fp32; x is what all ranks' make, where they exchange.

    WAY: (ranks, whether their parts are added, whether they travel in packets), or None. No ranks: (0, experts a token)
    whose rows x has, and exchange is (the rows of each token, their weights).
    """
    # Offsets are kept relative to the first row: a 64-bit address for every element would spill registers.
    if exchange is None:
        values = tl.load(x + first_row * stride_xm + rows[:, None] * stride_xm + cols[None, :], mask=is_in, other=0.0)
        values = widen(values)
    elif WAY[0] == 0:
        values = add_expert_rows(x, exchange, stride_xm, first_row, rows, cols, row_is_in, is_in, WAY[1])
    elif WAY[2]:
        values = exchange_few_rows(x, exchange, stride_xm, first_row, rows, cols, row_is_in, WAY[0], WAY[1])
    else:
        values = widen(exchange_rows(x, exchange, stride_xm, first_row, rows, cols, is_in, WAY[0], WAY[1]))
    if residual is not None:
        places = residual + first_row * stride_rm + rows[:, None] * stride_rm + cols[None, :]
        values = values + widen(tl.load(places, mask=is_in, other=0.0))
        values = round_to(values, x.dtype.element_ty)
    return values


@triton.jit
def store_rows(places, K, first_row, rows, cols, values, is_in):
    """Store values [ROWS, COLS] in a contiguous matrix of K columns."""
    offsets = rows[:, None] * K + cols[None, :]
    tl.store(places + first_row * K + offsets, values.to(places.dtype.element_ty), mask=is_in)


@triton.jit
def norm_tile(
    STORED_OUT, summed, mean_out, rstd_out, x, residual, weight, bias, exchange, stride_xm, stride_rm, tile, T, K, eps,
    STORED_RULE: tl.constexpr, ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
    WAY: tl.constexpr,
):  # fmt: skip
    """All but the norm's store of one tile of whole rows: (norm [ROWS, BLOCK_K], first row, rows, columns, mask)."""
    HAS_MEAN: tl.constexpr = mean_out is not None
    first_row = tile.to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    row_is_in = rows < T - first_row
    col_is_in = cols < K
    is_in = row_is_in[:, None] & col_is_in[None, :]
    values = load_sum(x, residual, exchange, stride_xm, stride_rm, first_row, rows, cols, row_is_in, is_in, WAY)
    if residual is not None:
        store_rows(summed, K, first_row, rows, cols, values, is_in)
    mean, rstd = row_statistics(values, col_is_in, K, eps, HAS_MEAN)
    if HAS_MEAN:
        tl.store(mean_out + first_row + rows, mean, mask=row_is_in)
    tl.store(rstd_out + first_row + rows, rstd, mask=row_is_in)
    if STORED_RULE is not None:
        emit_tile(values, STORED_OUT, tile, tile * 0, T, K, STORED_RULE, ROWS, BLOCK_K)
    gamma = load_gamma(weight, cols, col_is_in, ZERO_CENTERED)
    beta = load_beta(bias, cols, col_is_in)
    normed = normalize(values, mean, rstd, gamma, beta, HAS_MEAN, bias is not None)
    return normed, first_row, rows, cols, is_in


@triton.jit
def norm_rows(
    y, summed, mean_out, rstd_out, x, residual, weight, bias, stride_xm, stride_rm, T, K, eps,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """ROWS whole rows a program."""
    normed, first_row, rows, cols, is_in = norm_tile(
        None, summed, mean_out, rstd_out, x, residual, weight, bias, None, stride_xm, stride_rm, tl.program_id(0), T, K,
        eps, None, ZERO_CENTERED, ROWS, BLOCK_K, None,
    )  # fmt: skip
    store_rows(y, K, first_row, rows, cols, normed, is_in)


@triton.jit
def norm_long_rows(
    y, summed, mean_out, rstd_out, x, residual, weight, bias, stride_xm, stride_rm, K, eps,
    ZERO_CENTERED: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """One row a program, in chunks of BLOCK_K; all reads but the first hit the cache."""
    HAS_MEAN: tl.constexpr = mean_out is not None
    row = tl.program_id(0).to(tl.int64)
    rows = tl.zeros([1], tl.int64)
    size = tl.cast(K, tl.float32)
    total = tl.zeros([1, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        is_in = (cols < K)[None, :]
        values = load_sum(x, residual, None, stride_xm, stride_rm, row, rows, cols, None, is_in, None)
        if residual is not None:
            store_rows(summed, K, row, rows, cols, values, is_in)
        total += values if HAS_MEAN else values * values
    if HAS_MEAN:
        mean = tl.div_rn(tree_sum(total), size)
        tl.store(mean_out + row + rows, mean)
        total = tl.zeros([1, BLOCK_K], tl.float32)
        for start in range(0, K, BLOCK_K):
            cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
            is_in = (cols < K)[None, :]
            values = load_sum(x, residual, None, stride_xm, stride_rm, row, rows, cols, None, is_in, None)
            centred = tl.where(is_in, values - mean[:, None], 0.0)
            total += centred * centred
    else:
        mean = tl.zeros([1], tl.float32)
    rstd = inverse_root(tree_sum(total), K, eps)
    tl.store(rstd_out + row + rows, rstd)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_is_in = cols < K
        # From x and residual again: what other threads stored in `summed` may not be seen yet.
        values = load_sum(x, residual, None, stride_xm, stride_rm, row, rows, cols, None, col_is_in[None, :], None)
        gamma = load_gamma(weight, cols, col_is_in, ZERO_CENTERED)
        beta = load_beta(bias, cols, col_is_in)
        normed = normalize(values, mean, rstd, gamma, beta, HAS_MEAN, bias is not None)
        store_rows(y, K, row, rows, cols, normed, col_is_in[None, :])


@triton.jit
def _row_part(
    ROW_OUT, STORED_OUT, y, summed, mean_out, rstd_out, x, residual, weight, bias, exchange, stride_xm, stride_rm,
    tile, T, K, eps, ROW_RULE: tl.constexpr, STORED_RULE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, WAY: tl.constexpr,
):  # fmt: skip
    """Everything of one tile of whole rows; returns their norm [ROWS, BLOCK_K], 0 or NaN outside."""
    normed, first_row, rows, cols, is_in = norm_tile(
        STORED_OUT, summed, mean_out, rstd_out, x, residual, weight, bias, exchange, stride_xm, stride_rm, tile, T, K,
        eps, STORED_RULE, ZERO_CENTERED, ROWS, BLOCK_K, WAY,
    )  # fmt: skip
    normed = round_to(normed, x.dtype.element_ty)
    if y is not None:
        store_rows(y, K, first_row, rows, cols, normed, is_in)
    if bias is not None:
        normed = tl.where(is_in, normed, 0.0)
    if ROW_RULE is not None:
        emit_tile(normed, ROW_OUT, tile, tile * 0, T, K, ROW_RULE, ROWS, BLOCK_K)
    return normed


@triton.jit
def _norm_at(inputs, first_m, first_k, m, k, is_in, ZERO_CENTERED: tl.constexpr):
    stream, mean, rstd, weight, bias, stride, T, K = inputs
    places = stream + (first_m * stride + first_k) + (m * stride + k)
    values = widen(tl.load(places, mask=is_in, other=0.0))
    is_row = m < T - first_m
    is_col = k < K - first_k
    if mean is not None:
        values = values - tl.load(mean + first_m + m, mask=is_row, other=0.0)
    gamma = widen(tl.load(weight + first_k + k, mask=is_col, other=0.0))
    if ZERO_CENTERED:
        gamma = gamma + 1.0
    normed = values * tl.load(rstd + first_m + m, mask=is_row, other=0.0) * gamma
    if bias is not None:
        normed = normed + widen(tl.load(bias + first_k + k, mask=is_col, other=0.0))
    normed = round_to(normed, stream.dtype.element_ty)
    return tl.where(is_in, normed, 0.0) if bias is not None else normed


@triton.jit
def norm_at(inputs, first_m, first_k, m, k, is_in):
    """emit's PRODUCE: the norm at these places, from the statistics that are there; normalize's arithmetic."""
    return _norm_at(inputs, first_m, first_k, m, k, is_in, False)


@triton.jit
def zero_centered_norm_at(inputs, first_m, first_k, m, k, is_in):
    """norm_at with a weight that is centred at zero."""
    return _norm_at(inputs, first_m, first_k, m, k, is_in, True)


@triton.jit
def _largest(size, normed):
    """The larger of size and the magnitudes of normed [ROWS, BLOCK_K], by column or by 8 columns; NaN counts as 0."""
    magnitude = tl.abs(normed)
    found = tl.max(tl.where(magnitude == magnitude, magnitude, 0.0), axis=0)
    if size.shape[0] < found.shape[0]:
        found = tl.max(tl.reshape(found, [size.shape[0], found.shape[0] // size.shape[0]]), axis=1)
    return tl.maximum(size, found)


@triton.jit
def _fold_amax(col_amax, tensor_amax, infinite, size, K, BLOCK_K: tl.constexpr):
    # Positive fp32 numbers have the order of their bits. Lanes beside each other add to columns beside each other.
    bits = size.to(tl.int32, bitcast=True)
    if col_amax is not None:
        cols = tl.max_contiguous(tl.arange(0, BLOCK_K), 1)
        tl.atomic_max(col_amax + cols, bits, mask=cols < K, sem="relaxed")
    if tensor_amax is not None:
        largest = tl.max(bits, axis=0)
        tl.atomic_max(tensor_amax, largest, sem="relaxed")
        tl.store(infinite, 1, mask=largest == 0x7F800000)


@triton.jit
def norm_quantize_rows(
    ROW_OUT, STORED_OUT, col_amax, tensor_amax, infinite, y, summed, mean_out, rstd_out, x, residual, weight, bias,
    exchange, stride_xm, stride_rm, T, K, eps, ROW_RULE: tl.constexpr, STORED_RULE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr, WAY: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """The row part of ROW_TILES tiles a program."""
    wait_for_last(EARLY)
    let_next_begin()
    if col_amax is None and tensor_amax is None:
        _row_part(
            ROW_OUT, STORED_OUT, y, summed, mean_out, rstd_out, x, residual, weight, bias, exchange, stride_xm,
            stride_rm, tl.program_id(0), T, K, eps, ROW_RULE, STORED_RULE, ZERO_CENTERED, ROWS, BLOCK_K, WAY,
        )  # fmt: skip
    else:
        size = tl.zeros([BLOCK_K if col_amax is not None else BLOCK_K // 8], tl.float32)
        first = tl.program_id(0) * ROW_TILES
        for step in tl.range(0, ROW_TILES, num_stages=STAGES):
            normed = _row_part(
                ROW_OUT, STORED_OUT, y, summed, mean_out, rstd_out, x, residual, weight, bias, exchange, stride_xm,
                stride_rm, first + step, T, K, eps, ROW_RULE, STORED_RULE, ZERO_CENTERED, ROWS, BLOCK_K, WAY,
            )  # fmt: skip
            size = _largest(size, normed)
        _fold_amax(col_amax, tensor_amax, infinite, size, K, BLOCK_K)


@triton.jit
def norm_quantize_tiles(
    OUT, stream, mean, rstd, weight, bias, stride_xm, T, K,
    RULE: tl.constexpr, ZERO_CENTERED: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """The tile part of one tile a program."""
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    inputs = (stream, mean, rstd, weight, bias, stride_xm, T, K)
    PRODUCE: tl.constexpr = zero_centered_norm_at if ZERO_CENTERED else norm_at
    emit(PRODUCE, inputs, OUT, pid // num_tiles_k, pid % num_tiles_k, T, K, RULE, BLOCK_M, BLOCK_K)


@triton.jit
def _load_normed(saved, first_row, rows, cols, row_is_in, K, GROUP: tl.constexpr):
    """The normalised rows [ROWS, COLS] before gamma, from x or its FP8 codes, 0 outside; and rstd [ROWS].

    saved: (x or codes, scale, mean, rstd, row stride, the scale's strides).
    GROUP: elements that share a scale; 0 for the whole row. cols starts at a multiple of it.
    """
    stored, scale, mean, rstd, stride_xm, stride_sm, stride_sk = saved
    is_in = row_is_in[:, None] & (cols < K)[None, :]
    places = stored + first_row * stride_xm + rows[:, None] * stride_xm + cols[None, :]
    values = widen(tl.load(places, mask=is_in, other=0.0))
    if scale is not None:
        if GROUP:
            num_groups: tl.constexpr = values.shape[1] // GROUP
            groups = tl.min(cols, axis=0) // GROUP + tl.arange(0, num_groups)
            group_is_in = row_is_in[:, None] & (groups < tl.cdiv(K, GROUP))[None, :]
            scale_places = scale + (first_row + rows)[:, None] * stride_sm + groups[None, :] * stride_sk
            factor = tl.load(scale_places, mask=group_is_in, other=0.0)
            grouped = tl.reshape(values, [values.shape[0], num_groups, GROUP]) * factor[:, :, None]
            values = tl.reshape(grouped, [values.shape[0], num_groups * GROUP])
        else:
            values = values * tl.load(scale + (first_row + rows) * stride_sm, mask=row_is_in, other=0.0)[:, None]
    if mean is not None:
        values = values - tl.load(mean + first_row + rows, mask=row_is_in, other=0.0)[:, None]
    row_rstd = tl.load(rstd + first_row + rows, mask=row_is_in, other=0.0)
    return tl.where(is_in, values * row_rstd[:, None], 0.0), row_rstd


@triton.jit
def _load_grad(grad, stride_gm, first_row, rows, cols, is_in):
    places = grad + first_row * stride_gm + rows[:, None] * stride_gm + cols[None, :]
    return widen(tl.load(places, mask=is_in, other=0.0))


@triton.jit
def _store_grad(grad_x, grad_residual, inner, row_rstd, stride_rm, K, first_row, rows, cols, is_in):
    """Store the norm's gradient; that of the residual stream is added to it after its rounding, as autograd does."""
    wide = inner * row_rstd[:, None]
    if grad_residual is not None:
        wide = round_to(wide, grad_x.dtype.element_ty)
        wide = wide + _load_grad(grad_residual, stride_rm, first_row, rows, cols, is_in)
    store_rows(grad_x, K, first_row, rows, cols, wide, is_in)


@triton.jit
def without_share(scaled, normed, product_mean):
    """scaled - normed * product_mean, rounded once: left to the compiler, kernels would differ in what is fused."""
    return tl.fma(normed, product_mean * -1.0, scaled)  # a minus sign would be 0 - x, which has another zero


@triton.jit
def norm_backward_rows(
    grad_x, weight_sums, bias_sums, grad, stored, scale, weight, mean, rstd, grad_residual,
    stride_gm, stride_xm, stride_sm, stride_sk, stride_rm, T, K,
    ZERO_CENTERED: tl.constexpr, GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of ROWS whole rows: grad_x, and the program's own sums for the gradients of gamma and beta."""
    saved = (stored, scale, mean, rstd, stride_xm, stride_sm, stride_sk)
    pid = tl.program_id(0)
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    col_is_in = cols < K
    size = tl.cast(K, tl.float32)
    gamma = load_gamma(weight, cols, col_is_in, ZERO_CENTERED)
    weight_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for tile in tl.range(pid, tl.cdiv(T, ROWS), tl.num_programs(0), num_stages=STAGES):
        first_row = tl.cast(tile, tl.int64) * ROWS
        row_is_in = rows < T - first_row
        is_in = row_is_in[:, None] & col_is_in[None, :]
        wide = _load_grad(grad, stride_gm, first_row, rows, cols, is_in)
        normed, row_rstd = _load_normed(saved, first_row, rows, cols, row_is_in, K, GROUP)
        weight_sum = tl.fma(wide, normed, weight_sum)
        if mean is not None:
            bias_sum += wide
        scaled = wide * gamma
        inner = without_share(scaled, normed, tl.div_rn(tree_sum(scaled * normed), size)[:, None])
        if mean is not None:
            inner = inner - tl.div_rn(tree_sum(scaled), size)[:, None]
        _store_grad(grad_x, grad_residual, inner, row_rstd, stride_rm, K, first_row, rows, cols, is_in)
    place = pid.to(tl.int64) * K + cols
    tl.store(weight_sums + place, tl.sum(weight_sum, axis=0), mask=col_is_in)
    if mean is not None:
        tl.store(bias_sums + place, tl.sum(bias_sum, axis=0), mask=col_is_in)


@triton.jit
def norm_backward_long_rows(
    grad_x, grad, stored, scale, weight, mean, rstd, grad_residual,
    stride_gm, stride_xm, stride_sm, stride_sk, stride_rm, T, K,
    ZERO_CENTERED: tl.constexpr, GROUP: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """grad_x of one row a program, in chunks of BLOCK_K."""
    saved = (stored, scale, mean, rstd, stride_xm, stride_sm, stride_sk)
    row = tl.program_id(0).to(tl.int64)
    rows = tl.zeros([1], tl.int64)
    row_is_in = rows < T - row
    size = tl.cast(K, tl.float32)
    products = tl.zeros([1, BLOCK_K], tl.float32)
    total = tl.zeros([1, BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_is_in = cols < K
        wide = _load_grad(grad, stride_gm, row, rows, cols, col_is_in[None, :])
        normed, _ = _load_normed(saved, row, rows, cols, row_is_in, K, GROUP)
        scaled = wide * load_gamma(weight, cols, col_is_in, ZERO_CENTERED)
        products += scaled * normed
        total += scaled
    product_mean = tl.div_rn(tree_sum(products), size)
    scaled_mean = tl.div_rn(tree_sum(total), size)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        col_is_in = cols < K
        wide = _load_grad(grad, stride_gm, row, rows, cols, col_is_in[None, :])
        normed, row_rstd = _load_normed(saved, row, rows, cols, row_is_in, K, GROUP)
        inner = wide * load_gamma(weight, cols, col_is_in, ZERO_CENTERED) - normed * product_mean[:, None]
        if mean is not None:
            inner = inner - scaled_mean[:, None]
        _store_grad(grad_x, grad_residual, inner, row_rstd, stride_rm, K, row, rows, cols, col_is_in[None, :])


@triton.jit
def norm_backward_columns(
    weight_sums, bias_sums, grad, stored, scale, mean, rstd, stride_gm, stride_xm, stride_sm, stride_sk, T, K,
    GROUP: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr,
):  # fmt: skip
    """Sums over every n-th tile of ROWS tokens for BLOCK_K columns of the gradients of gamma and beta."""
    saved = (stored, scale, mean, rstd, stride_xm, stride_sm, stride_sk)
    pid = tl.program_id(0)
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.program_id(1).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
    col_is_in = cols < K
    weight_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for tile in range(pid, tl.cdiv(T, ROWS), tl.num_programs(0)):
        first_row = tl.cast(tile, tl.int64) * ROWS
        row_is_in = rows < T - first_row
        wide = _load_grad(grad, stride_gm, first_row, rows, cols, row_is_in[:, None] & col_is_in[None, :])
        normed, _ = _load_normed(saved, first_row, rows, cols, row_is_in, K, GROUP)
        weight_sum = tl.fma(wide, normed, weight_sum)
        bias_sum += wide
    place = pid.to(tl.int64) * K + cols
    tl.store(weight_sums + place, tl.sum(weight_sum, axis=0), mask=col_is_in)
    if mean is not None:
        tl.store(bias_sums + place, tl.sum(bias_sum, axis=0), mask=col_is_in)


@triton.jit
def sum_partials(
    grad_weight, grad_bias, weight_sums, bias_sums, num_partials, K, ROWS: tl.constexpr, BLOCK_K: tl.constexpr
):
    """The programs' sums added up in order, BLOCK_K columns a program."""
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.program_id(0).to(tl.int64) * BLOCK_K + tl.arange(0, BLOCK_K).to(tl.int64)
    weight_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    bias_sum = tl.zeros([ROWS, BLOCK_K], tl.float32)
    for first in range(0, num_partials, ROWS):
        is_in = (first + rows < num_partials)[:, None] & (cols < K)[None, :]
        places = (first + rows)[:, None] * K + cols[None, :]
        weight_sum += tl.load(weight_sums + places, mask=is_in, other=0.0)
        if grad_bias is not None:
            bias_sum += tl.load(bias_sums + places, mask=is_in, other=0.0)
    out = tl.sum(weight_sum, axis=0).to(grad_weight.dtype.element_ty)
    tl.store(grad_weight + cols, out, mask=cols < K)
    if grad_bias is not None:
        out = tl.sum(bias_sum, axis=0).to(grad_bias.dtype.element_ty)
        tl.store(grad_bias + cols, out, mask=cols < K)


class NormLaunch(NamedTuple):
    """What the kernels of a forward take, in their order.

    outputs: summed [T, K], mean, rstd [T], None where there is none. sources: x, residual, weight, bias, with
    contiguous last dims. strides: between the rows of x and of residual. fuses: whether products may fuse into sums:
    only where those that are added up are exact.
    """

    outputs: tuple[torch.Tensor | None, torch.Tensor | None, torch.Tensor]
    sources: tuple[torch.Tensor, torch.Tensor | None, torch.Tensor, torch.Tensor | None]
    strides: tuple[int, int]
    fuses: bool

    @classmethod
    def of(
        cls,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        kind: str,
    ) -> "NormLaunch":
        """Allocate the outputs of a forward."""
        x, residual = dense_rows(x), None if residual is None else dense_rows(residual)
        summed = None if residual is None else torch.empty_like(residual, memory_format=torch.contiguous_format)
        num_rows = len(x if residual is None else residual)
        rstd = torch.empty(num_rows, dtype=torch.float32, device=x.device)
        mean = torch.empty_like(rstd) if kind == "layer_norm" else None
        vectors = (weight.contiguous(), None if bias is None else bias.contiguous())
        strides = (x.stride(0), 0 if residual is None else residual.stride(0))
        return cls((summed, mean, rstd), (x, residual, *vectors), strides, mean is None and x.element_size() == 2)

    @property
    def results(self) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """The outputs, empty tensors for those that are not there."""
        summed, mean, rstd = self.outputs
        return (
            self.sources[0].new_empty(0) if summed is None else summed,
            rstd.new_empty(0) if mean is None else mean,
            rstd,
        )


def norm_forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.forward, on a GPU; x has elements."""
    T, K = x.shape
    y = torch.empty(T, K, dtype=x.dtype, device=x.device)
    norm = NormLaunch.of(x, weight, bias, residual, kind)
    operands = (y, *norm.outputs, *norm.sources, *norm.strides)
    with on_device_of(x):
        if K <= LONGEST_ROW:
            rows, block_k, num_warps = row_tile(K)
            launch = launcher_of(
                norm_rows, ZERO_CENTERED=zero_centered_gamma, ROWS=rows, BLOCK_K=block_k, num_warps=num_warps,
                enable_fp_fusion=norm.fuses,
            )  # fmt: skip
            launch((triton.cdiv(T, rows),), *operands, T, K, eps)
        else:
            launch = launcher_of(
                norm_long_rows, ZERO_CENTERED=zero_centered_gamma, BLOCK_K=CHUNK, num_warps=CHUNK_WARPS,
                enable_fp_fusion=norm.fuses,
            )  # fmt: skip
            launch((T,), *operands, K, eps)
    return y, *norm.results


def row_tile(K: int) -> tuple[int, int, int]:
    """ROWS, BLOCK_K and num_warps of a program of whole rows; BLOCK_K is a multiple of every FP8 group."""
    block_k = max(128, triton.next_power_of_2(K))
    rows = max(1, ROW_TILE // block_k)
    return rows, block_k, max(1, rows * block_k // ELEMENTS_PER_WARP)


def dense_rows(x: torch.Tensor) -> torch.Tensor:
    """x with a contiguous last dim."""
    return x if x.stride(-1) == 1 else x.contiguous()


def norm_backward(
    grad: torch.Tensor,
    stored: torch.Tensor,
    scale: torch.Tensor | None,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_residual: torch.Tensor | None,
    zero_centered_gamma: bool,
    block: list[int],
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.backward, from x or its FP8 codes and scale, on a GPU; grad has elements."""
    grad, stored = dense_rows(grad), dense_rows(stored)
    grad_residual = None if grad_residual is None else dense_rows(grad_residual)
    grad_x = torch.empty(grad.shape, dtype=grad.dtype, device=grad.device)
    group = max(block[1], 0) if block else 0
    strides = (grad.stride(0), stored.stride(0), *((0, 0) if scale is None else scale.stride()))
    saved = (stored, scale, weight.contiguous(), mean, rstd, grad_residual)
    last_stride = 0 if grad_residual is None else grad_residual.stride(0)
    with on_device_of(grad):
        launch = _backward_rows if grad.shape[1] <= BACKWARD_LONGEST_ROW else _backward_long_rows
        sums = launch(grad_x, grad, saved, (*strides, last_stride), zero_centered_gamma, group)
        grad_weight, grad_bias = add_partials(weight, *sums)
    return grad_x, grad_weight, weight.new_empty(0) if grad_bias is None else grad_bias


Sums = tuple[torch.Tensor, torch.Tensor | None]
Saved = tuple[torch.Tensor | None, ...]


def _partials(num: int, K: int, mean: torch.Tensor | None, device: torch.device) -> Sums:
    sums = torch.empty(1 if mean is None else 2, num, K, dtype=torch.float32, device=device)
    return sums[0], None if mean is None else sums[1]


def _backward_rows(
    grad_x: torch.Tensor,
    grad: torch.Tensor,
    saved: Saved,
    strides: tuple[int, ...],
    zero_centered_gamma: bool,
    group: int,
) -> Sums:
    T, K = grad.shape
    block_k = max(triton.next_power_of_2(K), group, 16)  # narrower tiles have nothing to pair
    rows = max(1, ROW_TILE // block_k)
    num_warps = max(1, rows * block_k // BACKWARD_ELEMENTS_PER_WARP)
    num_programs = min(triton.cdiv(T, rows), BACKWARD_PROGRAMS)
    sums = _partials(num_programs, K, saved[3], grad.device)
    launch = launcher_of(
        norm_backward_rows, ZERO_CENTERED=zero_centered_gamma, GROUP=group,
        ROWS=rows, BLOCK_K=block_k, STAGES=BACKWARD_STAGES if rows <= 4 else 1, num_warps=num_warps,
    )  # fmt: skip
    launch((num_programs,), grad_x, *sums, grad, *saved, *strides, T, K)
    return sums


def _backward_long_rows(
    grad_x: torch.Tensor,
    grad: torch.Tensor,
    saved: Saved,
    strides: tuple[int, ...],
    zero_centered_gamma: bool,
    group: int,
) -> Sums:
    T, K = grad.shape
    launch = launcher_of(
        norm_backward_long_rows, ZERO_CENTERED=zero_centered_gamma, GROUP=group, BLOCK_K=CHUNK, num_warps=CHUNK_WARPS
    )
    launch((T,), grad_x, grad, *saved, *strides, T, K)
    stored, scale, _, mean, rstd, _ = saved
    rows, block_k, num_warps = COLUMN_TILE
    num_tiles_k = triton.cdiv(K, block_k)
    num_programs = min(triton.cdiv(T, rows), max(1, BACKWARD_PROGRAMS // num_tiles_k))
    sums = _partials(num_programs, K, mean, grad.device)
    launch = launcher_of(norm_backward_columns, GROUP=group, ROWS=rows, BLOCK_K=block_k, num_warps=num_warps)
    launch((num_programs, num_tiles_k), *sums, grad, stored, scale, mean, rstd, *strides[:4], T, K)
    return sums


def add_partials(
    weight: torch.Tensor,
    weight_sums: torch.Tensor,
    bias_sums: torch.Tensor | None,
    tile: tuple[int, int, int] = PARTIAL_TILE,
) -> Any:
    """Sums over the programs of weight_sums and bias_sums [P, K] fp32, in weight's dtype; the tile is their order."""
    num_partials, K = weight_sums.shape
    grad_weight = torch.empty(K, dtype=weight.dtype, device=weight.device)
    grad_bias = None if bias_sums is None else torch.empty_like(grad_weight)
    rows, block_k, num_warps = tile
    launch = launcher_of(sum_partials, ROWS=rows, BLOCK_K=block_k, num_warps=num_warps)
    launch((triton.cdiv(K, block_k),), grad_weight, grad_bias, weight_sums, bias_sums, num_partials, K)
    return grad_weight, grad_bias
