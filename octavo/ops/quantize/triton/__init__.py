"""Triton quantizers: rows, columns or both of a matrix to FP8 in one read, bit-equal to reference.py.

This file is the host side: what is launched for a scaling (PLANS), `Emission` for every kernel that ends with `emit` or
`emit_tile` (device.py), and the quantizers themselves. A program owns one BLOCK_M x BLOCK_K tile, or one whole row.

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
from octavo.ops.quantize.triton.device import quantize_tiles, quantize_whole_rows

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
WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8
OFFSET_LIMIT = 1 << 22  # strides up to here keep offsets within a tile of 512 lines in 32 bits


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
        longest_stride: between rows of what the producer reads, where it takes its offsets' type from RULE[16].
        aligned: whether the producer's own loads and sizes are multiples of 16 bytes; else, and for fp32, the two
            directions are two launches.
        tile: BLOCK_M, BLOCK_K, num_warps of a producer that ends with `emit_tile`, for rows alone in groups or with a
            known scale; BLOCK_K a multiple of the group, and the whole row where a row shares one scale.
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
        wishes = (amax_out is not None, aligned, is_long, tile)
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
        quant_scale=quant_scale, amax_out=amax_out, aligned=_is_aligned(x), longest_stride=x.stride(0),
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
        block_m, block_k, num_warps = tile or plan[:3]
        if tile is None and not aligned:
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
