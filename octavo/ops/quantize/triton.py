"""Triton quantizers: rows, columns or both of a matrix to FP8 in one read, bit-equal to reference.py.

x is [M, K]; "columns" is the quantization of x.t(), its codes [K, M] row-major (K-major for a GEMM that
sums over M). A program owns one BLOCK_M x BLOCK_K tile, or one whole row. What shares a scale is SCALES:
"group" one line of a tile (1xB), "square" a tile (BxB), "line" a whole row or column and "tensor" all of
x (both from amax buffers that an earlier launch filled), "static" all of x with a given quant_scale.
"""

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.scaling import Scaling, largest_quant_scale

SCALES_OF_KIND = {
    "per_tensor": "tensor",
    "per_row": "line",
    "block_1x128": "group",
    "mx_1x32": "group",
    "block_128x128": "square",
}
FP8_TYPES = {torch.float8_e4m3fn: tl.float8e4nv, torch.float8_e5m2: tl.float8e5}

# BLOCK_M, BLOCK_K, num_warps. Where a scale does not fix a side, it is chosen for 32 or 64 elements a thread, which
# keeps even unaligned tiles from spilling, and for rows of 128 bytes or more.
TRANSPOSED_TILE = (128, 64, 4)
AMAX_TILE = (128, 64, 8)
STRAIGHT_TILE = (16, 512, 8)
GROUP_ROWS_TILE = (32, 4)  # BLOCK_M and num_warps; BLOCK_K is the group
SQUARE_TILE_WARPS = {128: 16, 32: 4}
WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8


@triton.jit
def _magnitude(x):
    # NaN counts as 0 by comparison: min/max that propagate NaN miscompile beside a transposed FP8 store.
    size = tl.abs(x)
    return tl.where(size == size, size, 0.0)


@triton.jit
def _quant_scale(amax, FP8_MAX: tl.constexpr, AMAX_FLOOR: tl.constexpr, OVERFLOW: tl.constexpr, POW2: tl.constexpr):
    amax = tl.where(amax > AMAX_FLOOR, amax, AMAX_FLOOR)
    # A zero or infinite amax divides to exactly 1.
    amax = tl.where((amax > 0.0) & (amax < float("inf")), amax, FP8_MAX)
    quant_scale = tl.div_rn(FP8_MAX, amax)
    quant_scale = tl.where(quant_scale < float("inf"), quant_scale, OVERFLOW)
    if POW2:
        exponent_bits = quant_scale.to(tl.int32, bitcast=True) & 0x7F800000
        quant_scale = exponent_bits.to(tl.float32, bitcast=True)
    return quant_scale


@triton.jit
def _tile(M, K, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    """This program's tile: its numbers, its first element, the places in it and which of them exist."""
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    tile_m = (pid // num_tiles_k).to(tl.int64)
    tile_k = (pid % num_tiles_k).to(tl.int64)
    # Offsets are kept relative to the tile: a 64-bit address for every element would spill registers.
    rows = tl.arange(0, BLOCK_M).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    return tile_m, tile_k, rows, cols, rows < M - tile_m * BLOCK_M, cols < K - tile_k * BLOCK_K


@triton.jit
def _load_tile(x, stride_xm, first_m, first_k, rows, cols, row_is_in, col_is_in):
    places = x + (first_m * stride_xm + first_k) + rows[:, None] * stride_xm + cols[None, :]
    return tl.load(places, mask=row_is_in[:, None] & col_is_in[None, :], other=0.0).to(tl.float32)


@triton.jit
def _store_tile(q, num_cols, first_row, first_col, rows, cols, codes, row_is_in, col_is_in):
    places = q + (first_row * num_cols + first_col) + rows[:, None] * num_cols + cols[None, :]
    tl.store(places, codes, mask=row_is_in[:, None] & col_is_in[None, :])


@triton.jit
def amax_tiles(
    row_amax,
    col_amax,
    tensor_amax,
    x,
    stride_xm,
    M,
    K,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    TENSOR: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Fold each tile's largest magnitudes into zeroed buffers of fp32 bits, whose order is that of integers."""
    tile_m, tile_k, rows, cols, row_is_in, col_is_in = _tile(M, K, BLOCK_M, BLOCK_K)
    first_m = tile_m * BLOCK_M
    first_k = tile_k * BLOCK_K
    size = _magnitude(_load_tile(x, stride_xm, first_m, first_k, rows, cols, row_is_in, col_is_in))
    if ROWS:
        bits = tl.max(size, axis=1).to(tl.int32, bitcast=True)
        tl.atomic_max(row_amax + first_m + rows, bits, mask=row_is_in, sem="relaxed")
    if COLS:
        bits = tl.max(size, axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(col_amax + first_k + cols, bits, mask=col_is_in, sem="relaxed")
    if TENSOR:
        bits = tl.max(tl.max(size, axis=1), axis=0).to(tl.int32, bitcast=True)
        tl.atomic_max(tensor_amax, bits, sem="relaxed")


@triton.jit
def quantize_tiles(
    row_q,
    row_s,
    col_q,
    col_s,
    x,
    row_amax,
    col_amax,
    static,
    stride_xm,
    M,
    K,
    SCALES: tl.constexpr,
    ROWS: tl.constexpr,
    COLS: tl.constexpr,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POW2: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantize one tile and store its codes straight (ROWS), transposed (COLS) or both."""
    tile_m, tile_k, rows, cols, row_is_in, col_is_in = _tile(M, K, BLOCK_M, BLOCK_K)
    first_m = tile_m * BLOCK_M
    first_k = tile_k * BLOCK_K
    values = _load_tile(x, stride_xm, first_m, first_k, rows, cols, row_is_in, col_is_in)
    num_tiles_m = tl.cdiv(M, BLOCK_M)
    num_tiles_k = tl.cdiv(K, BLOCK_K)

    if SCALES == "group" or SCALES == "line":
        if ROWS:
            if SCALES == "group":
                amax = tl.max(_magnitude(values), axis=1)  # [BLOCK_M]
                scale_places = (first_m + rows) * num_tiles_k + tile_k
                is_mine = row_is_in
            else:
                amax = tl.load(row_amax + first_m + rows, mask=row_is_in, other=0.0)
                scale_places = first_m + rows
                is_mine = row_is_in & (tile_k == 0)
            quant_scale = _quant_scale(amax, FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2)
            tl.store(row_s + scale_places, tl.div_rn(1.0, quant_scale), mask=is_mine)
            codes = (values * quant_scale[:, None]).to(FP8)
            _store_tile(row_q, K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)
        if COLS:
            if SCALES == "group":
                amax = tl.max(_magnitude(values), axis=0)  # [BLOCK_K]
                scale_places = (first_k + cols) * num_tiles_m + tile_m
                is_mine = col_is_in
            else:
                amax = tl.load(col_amax + first_k + cols, mask=col_is_in, other=0.0)
                scale_places = first_k + cols
                is_mine = col_is_in & (tile_m == 0)
            quant_scale = _quant_scale(amax, FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2)
            tl.store(col_s + scale_places, tl.div_rn(1.0, quant_scale), mask=is_mine)
            codes = tl.trans((values * quant_scale[None, :]).to(FP8))
            _store_tile(col_q, M, first_k, first_m, cols, rows, codes, col_is_in, row_is_in)
    else:
        if SCALES == "static":
            quant_scale = tl.load(static)
        else:
            if SCALES == "tensor":
                amax = tl.load(row_amax)
            else:
                amax = tl.max(tl.max(_magnitude(values), axis=1), axis=0)
            quant_scale = _quant_scale(amax, FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2)
        scale = tl.div_rn(1.0, quant_scale)
        codes = (values * quant_scale).to(FP8)  # one cast serves both directions
        is_mine = (SCALES == "square") | (tl.program_id(0) == 0)
        if ROWS:
            scale_place = (tile_m * num_tiles_k + tile_k) * (SCALES == "square")
            tl.store(row_s + scale_place, scale, mask=is_mine)
            _store_tile(row_q, K, first_m, first_k, rows, cols, codes, row_is_in, col_is_in)
        if COLS:
            scale_place = (tile_k * num_tiles_m + tile_m) * (SCALES == "square")
            tl.store(col_s + scale_place, scale, mask=is_mine)
            _store_tile(col_q, M, first_k, first_m, cols, rows, tl.trans(codes), col_is_in, row_is_in)


@triton.jit
def quantize_whole_rows(
    row_q,
    row_s,
    x,
    stride_xm,
    K,
    FP8: tl.constexpr,
    FP8_MAX: tl.constexpr,
    AMAX_FLOOR: tl.constexpr,
    OVERFLOW: tl.constexpr,
    POW2: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Quantize one row a program: its second pass over the row hits the cache, so memory is read once."""
    row = tl.program_id(0).to(tl.int64)
    size = tl.zeros([BLOCK_K], tl.float32)
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        size = tl.maximum(size, _magnitude(values))
    quant_scale = _quant_scale(tl.max(size, axis=0), FP8_MAX, AMAX_FLOOR, OVERFLOW, POW2)
    tl.store(row_s + row, tl.div_rn(1.0, quant_scale))
    for start in range(0, K, BLOCK_K):
        cols = start + tl.arange(0, BLOCK_K).to(tl.int64)
        values = tl.load(x + row * stride_xm + cols, mask=cols < K, other=0.0).to(tl.float32)
        tl.store(row_q + row * K + cols, (values * quant_scale).to(FP8), mask=cols < K)


def quantize_rows(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize the rows of x.

    Args:
        x: [M, K] bf16, fp16 or fp32, last dim contiguous (else it is copied), on a GPU.
        scaling: any.
        quant_scale: one fp32 value on x's device, per tensor only; without it, x's own amax decides.

    Returns:
        qdata [M, K] FP8 and decode scale [row blocks, column blocks] fp32, both contiguous.
    """
    row_q, row_s, _, _ = _quantize(x, scaling, quant_scale, rows=True, cols=False)
    assert row_q is not None and row_s is not None, "rows were asked for"
    return row_q, row_s


def quantize_columns(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize x.t() from x [M, K] as stored: qdata [K, M] and its decode scale; arguments as in quantize_rows."""
    _, _, col_q, col_s = _quantize(x, scaling, quant_scale, rows=False, cols=True)
    assert col_q is not None and col_s is not None, "columns were asked for"
    return col_q, col_s


def quantize_both(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """Both of the above from one read of x: row codes, row scale, column codes, column scale."""
    row_q, row_s, col_q, col_s = _quantize(x, scaling, quant_scale, rows=True, cols=True)
    assert row_q is not None and row_s is not None and col_q is not None and col_s is not None, "both were asked for"
    return row_q, row_s, col_q, col_s


def _quantize(
    x: torch.Tensor, scaling: Scaling, static: torch.Tensor | None, *, rows: bool, cols: bool
) -> tuple[torch.Tensor | None, ...]:
    if x.stride(-1) != 1:
        x = x.contiguous()
    M, K = x.shape
    row_q, row_s = _outputs(x, M, K, scaling) if rows else (None, None)
    col_q, col_s = _outputs(x, K, M, scaling) if cols else (None, None)
    if x.numel() == 0:
        _fill_empty_scales(row_s, col_s, static)
        return row_q, row_s, col_q, col_s
    scales = "static" if static is not None else SCALES_OF_KIND[scaling.kind]
    with _on_device_of(x):
        row_amax, col_amax = _amax_buffers(x, scales, rows=rows, cols=cols)
        if rows and cols and not (_is_aligned(x) and x.element_size() == 2):
            # Both directions of a tile that no wide load or store fits would spill registers; and triton 3.6 permutes
            # the transposed codes of fp32 tiles where one cast feeds both stores (seen on an H200).
            _launch(x, scaling, scales, (row_q, row_s, None, None), row_amax, col_amax, static)
            _launch(x, scaling, scales, (None, None, col_q, col_s), row_amax, col_amax, static)
        else:
            _launch(x, scaling, scales, (row_q, row_s, col_q, col_s), row_amax, col_amax, static)
    return row_q, row_s, col_q, col_s


def _launch(
    x: torch.Tensor,
    scaling: Scaling,
    scales: str,
    outputs: tuple[torch.Tensor | None, ...],
    row_amax: torch.Tensor | None,
    col_amax: torch.Tensor | None,
    static: torch.Tensor | None,
) -> None:
    M, K = x.shape
    rows, cols = outputs[0] is not None, outputs[2] is not None
    rule = _rule(x, scaling)
    if scales == "line" and row_amax is None and rows:
        block_k = min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
        quantize_whole_rows[(M,)](
            *outputs[:2], x, x.stride(0), K, **rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS
        )  # fmt: skip
        return
    block_m, block_k, num_warps = _tile_config(scaling, scales, rows, cols)
    grid = (triton.cdiv(M, block_m) * triton.cdiv(K, block_k),)
    quantize_tiles[grid](
        *outputs, x, row_amax, col_amax, static, x.stride(0), M, K,
        SCALES=scales, ROWS=rows, COLS=cols, **rule, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=num_warps,
    )  # fmt: skip


def _rule(x: torch.Tensor, scaling: Scaling) -> dict[str, Any]:
    """The constants of the quantization rule for x: docs/numerics.md."""
    return {
        "FP8": FP8_TYPES[scaling.dtype],
        "FP8_MAX": scaling.fp8_max,
        "AMAX_FLOOR": float(scaling.amax_floor),
        "OVERFLOW": largest_quant_scale(scaling, x.dtype),
        "POW2": scaling.scale_format == "e8m0",
    }


def _tile_config(scaling: Scaling, scales: str, rows: bool, cols: bool) -> tuple[int, int, int]:
    """BLOCK_M, BLOCK_K and num_warps: by scaling and direction, never by the size of x."""
    block = scaling.block_size[1]
    if scales == "square" or (scales == "group" and rows and cols):
        return block, block, SQUARE_TILE_WARPS[block]
    if scales == "group" and cols:
        return block, TRANSPOSED_TILE[1], SQUARE_TILE_WARPS[block] // 2
    if scales == "group":
        block_m, num_warps = GROUP_ROWS_TILE
        return block_m, block, num_warps
    return TRANSPOSED_TILE if cols else STRAIGHT_TILE


def _outputs(x: torch.Tensor, rows: int, cols: int, scaling: Scaling) -> tuple[torch.Tensor, torch.Tensor]:
    qdata = torch.empty(rows, cols, dtype=scaling.dtype, device=x.device)
    scale = torch.empty(scaling.scale_shape(rows, cols), dtype=torch.float32, device=x.device)
    return qdata, scale


def _amax_buffers(
    x: torch.Tensor, scales: str, *, rows: bool, cols: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """fp32 amax of rows and columns ("line"; rows alone need none) or, as one row's, of all of x ("tensor")."""
    is_tensor = scales == "tensor"
    by_row, by_col = scales == "line" and rows and cols, scales == "line" and cols
    if not (is_tensor or by_col):
        return None, None
    M, K = x.shape
    sizes = [1 if is_tensor else M if by_row else 0, K if by_col else 0]
    row_bits, col_bits = torch.zeros(sum(sizes), dtype=torch.int32, device=x.device).split(sizes)
    block_m, block_k, num_warps = STRAIGHT_TILE if is_tensor else AMAX_TILE
    grid = (triton.cdiv(M, block_m) * triton.cdiv(K, block_k),)
    amax_tiles[grid](
        row_bits, col_bits, row_bits, x, x.stride(0), M, K,
        ROWS=by_row, COLS=by_col, TENSOR=is_tensor, BLOCK_M=block_m, BLOCK_K=block_k, num_warps=num_warps,
    )  # fmt: skip
    return (row_bits.view(torch.float32) if sizes[0] else None), col_bits.view(torch.float32)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether Triton specializes x's address, stride and sizes as multiples of 16, and so moves 16 bytes at once."""
    return all(n % 16 == 0 for n in (x.data_ptr(), x.stride(0), *x.shape))


def _fill_empty_scales(row_s: torch.Tensor | None, col_s: torch.Tensor | None, static: torch.Tensor | None) -> None:
    for scale in (row_s, col_s):
        if scale is not None:
            scale.copy_(torch.ones_like(scale) if static is None else torch.ones_like(scale) / static)


def _on_device_of(x: torch.Tensor) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(x.device) if x.is_cuda else contextlib.nullcontext()
