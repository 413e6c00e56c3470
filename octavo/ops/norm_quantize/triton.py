"""Triton norm + quantize: rows in the pass that makes the statistics, columns from a second read of the same rows.

x is [T, K]. The row part owns ROWS whole rows: residual add, statistics, codes of whatever has its scale in one row,
the FP8 copy for backward, and amaxes of whatever has not. The tile part owns a BLOCK_M x BLOCK_K tile: it computes the
norm again and ends with emit. Two ways for it to find the rows in the L2 cache were tried at 32768 x 4096 on an H200,
and slower: one launch whose tiles wait for their rows on a counter (216 to 489 us against 211 to 353 for the two), and
a launch for every 1024 to 8192 tokens, of their rows beside the tiles of those before (288 to 366 us against 227; the
shorter, the slower): instructions hold it back, not the memory.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.launch.triton import launcher_of, let_next_begin, on_device_of
from octavo.ops.norm.triton import (
    LONGEST_ROW,
    allow_fusion,
    dense_rows,
    load_beta,
    load_gamma,
    load_sum,
    norm_forward,
    normalize,
    row_statistics,
    row_tile,
    store_rows,
)
from octavo.ops.quantize.triton import Emission, Step, quantize_matrix
from octavo.ops.quantize.triton.casts import round_to, widen
from octavo.ops.quantize.triton.device import emit, emit_tile

# Tiles of rows whose amaxes a program folds before it folds them into memory: of the columns, of the whole tensor; and
# how many times the warps of a program without amaxes it has, and the stages of that loop's loads.
COLUMN_AMAX_LOOP = (32, 1, 1)
TENSOR_AMAX_LOOP = (4, 1, 1)

ROW_LOCAL_KINDS = ("per_row", "block_1x128", "mx_1x32")
NOTHING = ("none",)  # the rule of what is not emitted


@triton.jit
def _row_part(
    ROW_OUT,
    STORED_OUT,
    summed,
    mean_out,
    rstd_out,
    x,
    residual,
    weight,
    bias,
    stride_xm,
    stride_rm,
    tile,
    T,
    K,
    eps,
    ROW_RULE: tl.constexpr,
    STORED_RULE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """Everything of one tile of whole rows; returns their norm [ROWS, BLOCK_K], 0 or NaN outside."""
    HAS_MEAN: tl.constexpr = mean_out is not None
    first_row = tile.to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    row_is_in = rows < T - first_row
    col_is_in = cols < K
    is_in = row_is_in[:, None] & col_is_in[None, :]
    values = load_sum(x, residual, stride_xm, stride_rm, first_row, rows, cols, is_in)
    if residual is not None:
        store_rows(summed, K, first_row, rows, cols, values, is_in)
    mean, rstd = row_statistics(values, col_is_in, K, eps, HAS_MEAN)
    if HAS_MEAN:
        tl.store(mean_out + first_row + rows, mean, mask=row_is_in)
    tl.store(rstd_out + first_row + rows, rstd, mask=row_is_in)
    whole = tile * 0
    if STORED_RULE[0] != "none":
        emit_tile(values, STORED_OUT, tile, whole, T, K, STORED_RULE, ROWS, BLOCK_K)
    gamma = load_gamma(weight, cols, col_is_in, ZERO_CENTERED)
    beta = load_beta(bias, cols, col_is_in)
    normed = normalize(values, mean, rstd, gamma, beta, HAS_MEAN, bias is not None)
    normed = round_to(normed, x.dtype.element_ty)
    if bias is not None:
        normed = tl.where(is_in, normed, 0.0)
    if ROW_RULE[0] != "none":
        emit_tile(normed, ROW_OUT, tile, whole, T, K, ROW_RULE, ROWS, BLOCK_K)
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
    ROW_OUT,
    STORED_OUT,
    col_amax,
    tensor_amax,
    infinite,
    summed,
    mean_out,
    rstd_out,
    x,
    residual,
    weight,
    bias,
    stride_xm,
    stride_rm,
    T,
    K,
    eps,
    ROW_RULE: tl.constexpr,
    STORED_RULE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK_K: tl.constexpr,
    ROW_TILES: tl.constexpr,
    STAGES: tl.constexpr,
):
    """The row part of ROW_TILES tiles a program."""
    let_next_begin()
    if col_amax is None and tensor_amax is None:
        _row_part(
            ROW_OUT, STORED_OUT, summed, mean_out, rstd_out, x, residual, weight, bias, stride_xm, stride_rm,
            tl.program_id(0), T, K, eps, ROW_RULE, STORED_RULE, ZERO_CENTERED, ROWS, BLOCK_K,
        )  # fmt: skip
    else:
        size = tl.zeros([BLOCK_K if col_amax is not None else BLOCK_K // 8], tl.float32)
        first = tl.program_id(0) * ROW_TILES
        for step in tl.range(0, ROW_TILES, num_stages=STAGES):
            normed = _row_part(
                ROW_OUT, STORED_OUT, summed, mean_out, rstd_out, x, residual, weight, bias, stride_xm, stride_rm,
                first + step, T, K, eps, ROW_RULE, STORED_RULE, ZERO_CENTERED, ROWS, BLOCK_K,
            )  # fmt: skip
            size = _largest(size, normed)
        _fold_amax(col_amax, tensor_amax, infinite, size, K, BLOCK_K)


@triton.jit
def norm_quantize_tiles(
    OUT,
    stream,
    mean,
    rstd,
    weight,
    bias,
    stride_xm,
    T,
    K,
    RULE: tl.constexpr,
    ZERO_CENTERED: tl.constexpr,
    BLOCK_M: tl.constexpr,
    BLOCK_K: tl.constexpr,
):
    """The tile part of one tile a program."""
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    inputs = (stream, mean, rstd, weight, bias, stride_xm, T, K)
    PRODUCE: tl.constexpr = zero_centered_norm_at if ZERO_CENTERED else norm_at
    emit(PRODUCE, inputs, OUT, pid // num_tiles_k, pid % num_tiles_k, T, K, RULE, BLOCK_M, BLOCK_K)


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
    scaling: Scaling,
    column_scaling: Scaling | None,
    store_scaling: Scaling | None,
) -> tuple[torch.Tensor, ...]:
    """As reference.norm_quantize, on a GPU; x has elements."""
    operands = (weight, bias, residual)
    scalings = (scaling, column_scaling, store_scaling)
    if x.shape[1] > LONGEST_ROW:
        return _unfused(x, *operands, quant_scale, amax_out, eps, kind, zero_centered_gamma, *scalings)
    call = _Call(x, *operands, kind, eps, zero_centered_gamma)
    with on_device_of(x):
        return call.run(*scalings, quant_scale, amax_out)


class _Call:
    """One call's operands and outputs, and the launches that turn the ones into the others."""

    def __init__(
        self,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        residual: torch.Tensor | None,
        kind: str,
        eps: float,
        zero_centered_gamma: bool,
    ) -> None:
        x, residual = dense_rows(x), None if residual is None else dense_rows(residual)
        self.T, self.K = x.shape
        self.x, self.eps, self.zero_centered_gamma = x, eps, zero_centered_gamma
        self.vectors = (weight.contiguous(), None if bias is None else bias.contiguous())
        self.summed = None if residual is None else torch.empty(x.shape, dtype=x.dtype, device=x.device)
        self.mean = torch.empty(self.T, dtype=torch.float32, device=x.device) if kind == "layer_norm" else None
        self.rstd = torch.empty(self.T, dtype=torch.float32, device=x.device)
        self.outputs = (self.summed, self.mean, self.rstd)
        self.sources = (x, residual, *self.vectors)
        self.strides = (x.stride(0), 0 if residual is None else residual.stride(0))

    def run(
        self,
        scaling: Scaling,
        column_scaling: Scaling | None,
        store_scaling: Scaling | None,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
    ) -> tuple[torch.Tensor, ...]:
        is_row_local = scaling.kind in ROW_LOCAL_KINDS or quant_scale is not None
        rows, row_rule, row_out = self._rows(scaling if is_row_local else None, quant_scale)
        stored, stored_rule, stored_out = self._rows(store_scaling, None)
        tiles = self._tiles(None if is_row_local else scaling, column_scaling, quant_scale)
        steps = [] if tiles is None else tiles.steps
        amax: tuple[torch.Tensor | None, torch.Tensor | None] = (None, None)
        if amax_out is not None:
            amax = (None, amax_out.view(torch.int32))
        if steps and _is_amax(steps[0]):
            amax, steps = _amax_buffers(steps[0]), steps[1:]
        row_part = ((row_out, stored_out), {"ROW_RULE": row_rule, "STORED_RULE": stored_rule})
        self._launch_rows(*row_part, amax)
        for step in steps:
            self._launch_tiles(step)
        columns = tiles.columns if tiles is not None else None
        return self._results(rows if is_row_local or tiles is None else tiles.rows, columns, stored)

    def _rows(self, scaling: Scaling | None, quant_scale: torch.Tensor | None) -> tuple[Any, ...]:
        """(codes, rule, OUT) of what the row part emits."""
        if scaling is None:
            return None, NOTHING, (None,) * 9
        tile = row_tile(self.K)
        emission = Emission(
            self.T, self.K, self.x.dtype, self.x.device, scaling, None, quant_scale=quant_scale, tile=tile
        )
        (step,) = emission.steps
        rule = step.rule
        if scaling.kind == "per_row":  # the group is the whole row of the tile
            rule = (*rule[:6], tile[1], *rule[7:])
        return emission.row_codes, rule, step.out

    def _tiles(
        self, scaling: Scaling | None, column_scaling: Scaling | None, quant_scale: torch.Tensor | None
    ) -> Emission | None:
        if scaling is None and column_scaling is None:
            return None
        stream = self.x if self.summed is None else self.summed
        is_aligned = stream.data_ptr() % 16 == 0 and stream.stride(0) % 16 == 0
        return Emission(
            self.T, self.K, self.x.dtype, self.x.device, scaling, column_scaling,
            quant_scale=quant_scale, aligned=is_aligned, longest_stride=stream.stride(0),
        )  # fmt: skip

    def _launch_rows(self, outs: Any, rules: dict[str, Any], amax: tuple[torch.Tensor | None, ...]) -> None:
        rows, block_k, num_warps = row_tile(self.K)
        loop = COLUMN_AMAX_LOOP if amax[0] is not None else TENSOR_AMAX_LOOP if amax[1] is not None else (1, 1, 1)
        row_tiles, more_warps, stages = loop
        launch = launcher_of(
            norm_quantize_rows, **rules,
            ZERO_CENTERED=self.zero_centered_gamma, ROWS=rows, BLOCK_K=block_k, ROW_TILES=row_tiles,
            STAGES=stages, num_warps=num_warps * more_warps, enable_fp_fusion=allow_fusion(self.x, self.mean),
        )  # fmt: skip
        infinite = None if amax[1] is None else infinity_flag(self.x.device)
        operands = (*outs, *amax, infinite, *self.outputs, *self.sources, *self.strides)
        launch((triton.cdiv(self.T, rows * row_tiles),), *operands, self.T, self.K, self.eps)

    def _launch_tiles(self, step: Step) -> None:
        stream = self.x if self.summed is None else self.summed
        launch = launcher_of(
            norm_quantize_tiles, RULE=step.rule,
            ZERO_CENTERED=self.zero_centered_gamma, BLOCK_M=step.block_m, BLOCK_K=step.block_k,
            **step.options, enable_fp_fusion=allow_fusion(self.x, self.mean),
        )  # fmt: skip
        operands = (stream, self.mean, self.rstd, *self.vectors, stream.stride(0))
        # of columns alone the row part has seen all values
        out = (*step.out[:8], None) if step.rule[0] == "none" else step.out
        launch(step.grid, out, *operands, self.T, self.K)

    def _results(
        self, rows: QuantizedTensor | None, columns: QuantizedTensor | None, stored: QuantizedTensor | None
    ) -> tuple[torch.Tensor, ...]:
        assert rows is not None, "rows are always made"
        nothing, no_scale = self.x.new_empty(0), self.rstd.new_empty(0)
        pairs = [(nothing, no_scale) if q is None else (q.qdata, q.scale) for q in (columns, stored)]
        summed = nothing if self.summed is None else self.summed
        mean = no_scale if self.mean is None else self.mean
        return (rows.qdata, rows.scale, *pairs[0], summed, *pairs[1], mean, self.rstd)


def _is_amax(step: Step) -> bool:
    return any(scales in ("amax_line", "amax_tensor") for scales in (step.rule[0], step.rule[7]))


def _amax_buffers(step: Step) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """The buffers that an amax pass fills: of the columns, of the whole tensor."""
    row_kind, col_kind = step.rule[0], step.rule[7]
    whole = step.out[4] if row_kind == "amax_tensor" else step.out[5] if col_kind == "amax_tensor" else None
    return step.out[5] if col_kind == "amax_line" else None, whole


def _unfused(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
    scaling: Scaling,
    column_scaling: Scaling | None,
    store_scaling: Scaling | None,
) -> tuple[torch.Tensor, ...]:
    """Rows too long for one program: the norm, then the quantizers."""
    y, summed, mean, rstd = norm_forward(x, weight, bias, residual, eps, kind, zero_centered_gamma)
    nothing = (x.new_empty(0), rstd.new_empty(0))
    rows, columns = quantize_matrix(y, scaling, column_scaling, quant_scale, amax_out)
    stored = None
    if store_scaling is not None:
        stored, _ = quantize_matrix(x if residual is None else summed, store_scaling, None)
    assert rows is not None, "rows are always made"
    pairs = [nothing if q is None else (q.qdata, q.scale) for q in (columns, stored)]
    return (rows.qdata, rows.scale, *pairs[0], summed, *pairs[1], mean, rstd)
