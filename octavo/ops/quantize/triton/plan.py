"""What is launched to quantize a matrix of one shape with one pair of scalings: tiles, rules, grids and outputs.

`plan_emission` keeps what it works out: doing so takes the CPU longer than a small launch takes the GPU.
"""

import functools
import operator
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling, largest_quant_scale
from octavo.ops._runtime.launch.triton import Launcher, launcher_of
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


class TilePlan(NamedTuple):
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
    "group rows": TilePlan(64, 128, 4, 64, 1, 16),
    "group columns": TilePlan(128, 64, 4, 16, 1, 64),
    "group both": TilePlan(128, 128, 4, 64, 2, 128),
    "square": TilePlan(128, 128, 8, 128, 1, 64),
    "group and square": TilePlan(128, 128, 4, 64, 1, 64),
    "lines both": TilePlan(128, 128, 4, 128, 1, 64),
    "rows": TilePlan(32, 256, 4, 32, 1, 16),
    "columns": TilePlan(128, 64, 4, 32, 1, 64),
    "both": TilePlan(128, 128, 8, 128, 1, 64),
    "groups of 32": TilePlan(32, 128, 4, 32, 1, 128),
    "amax of lines": TilePlan(512, 128, 4, 32, 1, 16),
    "amax of all": TilePlan(128, 256, 4, 32, 1, 16),
}
WHOLE_ROW_BLOCK, WHOLE_ROW_WARPS = 4096, 8
OFFSET_LIMIT = 1 << 22  # strides up to here keep offsets within a tile of 512 lines in 32 bits

# Allocates on the current GPU; torch.compile's code uses it because reading torch.empty's arguments takes 2 us.
_empty_on_gpu = getattr(torch._C._dynamo.guards, "_empty_strided_cuda", None)


# OUT of device.py for all steps of a plan, and a None behind it for StepPlan.take to put in the place of the others'.
Out = tuple[torch.Tensor | None, ...]
Take = Callable[[Sequence[Any]], tuple[Any, ...]]


class Output(NamedTuple):
    """Codes and scale of one direction, as they are allocated."""

    scaling: Scaling
    shape: tuple[int, int]
    strides: tuple[int, int]
    scale_shape: tuple[int, int]
    scale_strides: tuple[int, int]

    @classmethod
    def of(cls, rows: int, cols: int, scaling: Scaling) -> "Output":
        """Of a [rows, cols] operand; scales of groups lie one group after the other, as GEMMs take them."""
        num_rows, num_cols = scaling.scale_shape(rows, cols)
        is_grouped = SCALES_OF_KIND[scaling.kind] == "group"
        scale_strides = (1, max(num_rows, 1)) if is_grouped else (max(num_cols, 1), 1)
        return cls(scaling, (rows, cols), (max(cols, 1), 1), (num_rows, num_cols), scale_strides)

    def allocate(self, device: torch.device, on_current_gpu: bool) -> QuantizedTensor:
        """A new operand; its values are unset."""
        scaling, shape, strides, scale_shape, scale_strides = self
        if on_current_gpu and _empty_on_gpu is not None:
            qdata = _empty_on_gpu(shape, strides, scaling.dtype)
            scale = _empty_on_gpu(scale_shape, scale_strides, torch.float32)
        else:
            qdata = torch.empty(shape, dtype=scaling.dtype, device=device)
            scale = torch.empty(scale_shape, dtype=torch.float32, device=device)
            if scale.stride() != scale_strides:
                scale = scale.as_strided(scale_shape, scale_strides)
        return QuantizedTensor.trusted(qdata, scale, scaling)


class StepPlan(NamedTuple):
    """One launch of a producer's kernel: its rule, tile and grid, and what it takes of an EmissionPlan's OUT."""

    take: Take  # None for the rest, so that a rule has one kernel
    rule: tuple[Any, ...]
    block_m: int
    block_k: int
    num_warps: int
    grid: tuple[int]
    registers: int | None
    quantize: Launcher  # of a plain matrix: (grid, OUT, x, its row stride, M, K); shapes share it


class EmissionPlan(NamedTuple):
    """What an Emission allocates and launches.

    num_amaxes are numbers in the rows' and the columns' buffers, num_zeros those of both.
    """

    rows: Output | None
    columns: Output | None
    num_amaxes: tuple[int, int]
    is_one_amax: bool  # both directions share one number, of all of x
    num_zeros: int
    steps: tuple[StepPlan, ...]

    def allocate(
        self,
        device: torch.device,
        on_current_gpu: bool,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        row_place: QuantizedTensor | None = None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None, Out]:
        """(rows, columns, OUT): operands with values unset, and what kernels take of them, amaxes zeroed.

        Args:
            row_place: the rows' operand, where it is not to be a new one.
        """
        row_codes = row_scale = col_codes = col_scale = rows = columns = None
        if self.rows is not None:
            rows = self.rows.allocate(device, on_current_gpu) if row_place is None else row_place
            row_codes, row_scale = rows.qdata, rows.scale
        if self.columns is not None:
            columns = self.columns.allocate(device, on_current_gpu)
            col_codes, col_scale = columns.qdata, columns.scale
        row_amax = col_amax = None
        if self.num_zeros:
            bits = self.zero_numbers(device, on_current_gpu)
            num_rows, num_cols = self.num_amaxes
            row_amax = bits[:num_rows] if num_rows else None
            col_amax = row_amax if self.is_one_amax else bits[num_rows:] if num_cols else None
        infinite = infinity_flag(device) if self.steps else None
        out = (row_codes, row_scale, col_codes, col_scale, row_amax, col_amax, quant_scale, amax_out, infinite, None)
        return rows, columns, out

    def zero_numbers(self, device: torch.device, on_current_gpu: bool) -> torch.Tensor:
        """Zeroed bits of the rows' and the columns' amaxes, in this order."""
        if on_current_gpu and _empty_on_gpu is not None:
            return _empty_on_gpu((self.num_zeros,), (1,), torch.int32).zero_()
        return torch.zeros(self.num_zeros, dtype=torch.int32, device=device)


@functools.lru_cache(maxsize=1024)
def plan_emission(
    M: int,
    K: int,
    dtype: torch.dtype,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    is_known: bool,
    observe: bool,
    aligned: bool,
    is_long: bool,
    tile: tuple[int, int, int] | None,
) -> EmissionPlan:
    """The plan of an Emission; is_long asks for offsets of 64 bits within a tile, the rest is as there."""
    rows = None if scaling is None else Output.of(M, K, scaling)
    columns = None if column_scaling is None else Output.of(K, M, column_scaling)
    if 0 in (M, K):
        return EmissionPlan(rows, columns, (0, 0), False, 0, ())
    row_rule = rule_of(scaling, dtype, is_known, tile[1] if tile else 0)
    col_rule = rule_of(column_scaling, dtype, is_known, 0)
    num_amaxes = ({"line": M, "tensor": 1}.get(row_rule[0], 0), {"line": K, "tensor": 1}.get(col_rule[0], 0))
    is_one_amax = row_rule[0] == col_rule[0] == "tensor"
    steps = _steps(M, K, dtype, row_rule, col_rule, observe, aligned, is_long, tile)
    num_zeros = 1 if is_one_amax else sum(num_amaxes)
    return EmissionPlan(rows, columns, num_amaxes, is_one_amax, num_zeros, steps)


def plan_whole_rows(M: int, K: int, dtype: torch.dtype, scaling: Scaling) -> EmissionPlan:
    """The plan of the rows of a plain matrix with a scale each, none of them empty: a program owns a row."""
    rule, block_k = rule_of_rows(scaling, dtype), min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
    launch = launcher_of(quantize_whole_rows, RULE=rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS)
    step = StepPlan(_take(rule), rule, 1, block_k, WHOLE_ROW_WARPS, (M,), None, launch)
    return EmissionPlan(Output.of(M, K, scaling), None, (0, 0), False, 0, (step,))


def _steps(
    M: int,
    K: int,
    dtype: torch.dtype,
    row_rule: tuple[Any, ...],
    col_rule: tuple[Any, ...],
    observe: bool,
    aligned: bool,
    is_long: bool,
    tile: tuple[int, int, int] | None,
) -> tuple[StepPlan, ...]:
    """Launches in their order: amaxes first, where a scale needs all of a line or of x."""
    tail = (SOURCE_TYPES[dtype], tl.int64 if is_long else tl.int32)
    aligned = aligned and M % 16 == 0 and K % 16 == 0

    def launch(rule: tuple[Any, ...], tile: tuple[int, int, int] | None) -> StepPlan:
        plan = _plan(rule[:7], rule[7:14])
        block_m, block_k, num_warps = tile or plan[:3]
        if tile is None and not aligned:
            num_warps *= 2  # narrow loads take an address each
        # Lanes lie along K first, 16 bytes each; what is left of a program's threads lies along M.
        spread = 32 * num_warps * 16 // (plan.cols_k * tail[0].primitive_bitwidth // 8)
        spread = max(1, min(spread, block_m // 2))
        rule = (*rule, *tail, plan.rows_m, plan.chunks, plan.cols_k, spread)
        grid = (triton.cdiv(M, block_m) * triton.cdiv(K, block_k),)
        options = options_of(num_warps, plan.registers)
        quantize = launcher_of(quantize_tiles, RULE=rule, BLOCK_M=block_m, BLOCK_K=block_k, **options)
        return StepPlan(_take(rule), rule, block_m, block_k, num_warps, grid, plan.registers, quantize)

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


def options_of(num_warps: int, registers: int | None) -> dict[str, int]:
    """num_warps and, where there is one, the cap on registers, as triton names them."""
    return {"num_warps": num_warps} | ({} if registers is None else {"maxnreg": registers})


@functools.lru_cache(maxsize=256)
def rule_of(scaling: Scaling | None, dtype: torch.dtype, is_known: bool, whole_row: int) -> tuple[Any, ...]:
    """The constants of one direction's quantization: docs/numerics.md. Their order is in device.py."""
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


def rule_of_rows(scaling: Scaling, dtype: torch.dtype) -> tuple[Any, ...]:
    """As much of RULE as a kernel needs that makes one scale a row by itself."""
    return (*rule_of(scaling, dtype, False, 0), *NONE, False, SOURCE_TYPES[dtype])


def _amax_rule(rule: tuple[Any, ...]) -> tuple[Any, ...]:
    """The rule of the pass that finds the amaxes which `rule` needs."""
    return (f"amax_{rule[0]}", *NONE[1:]) if rule[0] in ("line", "tensor") else NONE


def _one_tile(row_rule: tuple[Any, ...], col_rule: tuple[Any, ...]) -> bool:
    """Whether a tile exists that suits both directions."""
    if "group" == col_rule[0] != row_rule[0] == "square":
        return col_rule[6] == row_rule[6]
    if "square" == col_rule[0] != row_rule[0] == "group":
        return col_rule[6] % row_rule[6] == 0
    return True


def _plan(row_rule: tuple[Any, ...], col_rule: tuple[Any, ...]) -> TilePlan:
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


def _take(rule: tuple[Any, ...]) -> Take:
    """What this rule uses of OUT, None for the others: where a None stands behind OUT, it is last."""
    row, col, observe = rule[0], rule[7], rule[14]
    codes = ("group", "square", "line", "tensor", "static")
    amaxes = ("line", "tensor", "amax_line", "amax_tensor")
    of_rows, of_columns = (row in codes, row in amaxes), (col in codes, col in amaxes)
    operands = (of_rows[0], of_rows[0], of_columns[0], of_columns[0], of_rows[1], of_columns[1])
    # a known scale says nothing of the amax, which is only looked at to be folded
    sees_amax = row in codes[:-1] or col in codes[:-1] or observe
    used = (*operands, "static" in (row, col), observe, sees_amax)
    return operator.itemgetter(*(i if is_used else -1 for i, is_used in enumerate(used)))


def fill_empty_scales(
    rows: QuantizedTensor | None, columns: QuantizedTensor | None, quant_scale: torch.Tensor | None
) -> None:
    """The scales of a matrix without elements, which nothing is launched for."""
    for q in (rows, columns):
        if q is not None:
            q.scale.copy_(torch.ones_like(q.scale) if quant_scale is None else torch.ones_like(q.scale) / quant_scale)
