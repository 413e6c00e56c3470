"""Triton quantizers: rows, columns or both of a matrix to FP8 in one read, bit-equal to reference.py.

This file is the host side: `Emission` for every kernel that ends with `emit` or `emit_tile` (device.py), and the
quantizers themselves. A program owns one BLOCK_M x BLOCK_K tile, or one whole row; plan.py says which, launch.py how.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.launch.triton import Launcher, is_current_gpu, launcher_of, on_device_of
from octavo.ops.quantize.triton.device import quantize_whole_rows
from octavo.ops.quantize.triton.plan import (
    NONE,
    OFFSET_LIMIT,
    PLANS,
    EmissionPlan,
    Output,
    Plan,
    options_of,
    plan_emission,
    rule_of,
)

__all__ = [
    "NONE",
    "PLANS",
    "Emission",
    "Plan",
    "Step",
    "both_codes",
    "column_codes",
    "plan_emission",
    "quantize_both",
    "quantize_columns",
    "quantize_rows",
    "row_codes",
]

WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8


class Step(NamedTuple):
    """One launch of a producer's kernel: what it passes on to emit or emit_tile, its tile and its grid."""

    out: tuple[torch.Tensor | None, ...]
    rule: tuple[Any, ...]
    block_m: int
    block_k: int
    num_warps: int
    grid: tuple[int]
    registers: int | None
    quantize: Launcher  # the launch for a plain matrix

    @property
    def options(self) -> dict[str, int]:
        """num_warps and, where there is one, the cap on registers, as triton names them."""
        return options_of(self.num_warps, self.registers)


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
        is_long = max(M, K, longest_stride) > OFFSET_LIMIT
        wishes = (quant_scale is not None, amax_out is not None, aligned, is_long, tile)
        plan = plan_emission(M, K, dtype, scaling, column_scaling, *wishes)
        on_current_gpu = is_current_gpu(device)
        self.rows = None if plan.rows is None else plan.rows.allocate(device, on_current_gpu)
        self.columns = None if plan.columns is None else plan.columns.allocate(device, on_current_gpu)
        out = (*_parts(self.rows), *_parts(self.columns), *_amax_buffers(plan, device), quant_scale, amax_out)
        if len(plan.steps) == 1:  # uses all that there is
            self.steps = [Step(out, *plan.steps[0][1:])]
        else:
            self.steps = [Step(_only(step.used, out), *step[1:]) for step in plan.steps]
        if 0 in (M, K):
            _fill_empty_scales(self.rows, self.columns, quant_scale)

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
    stride = x.stride(0)
    # Triton specializes what is a multiple of 16, and moves 16 bytes at once where all of these are.
    aligned = not (x.data_ptr() % 16 or stride % 16 or M % 16 or K % 16)
    with on_device_of(x):
        emission = Emission(
            M, K, x.dtype, x.device, scaling, column_scaling,
            quant_scale=quant_scale, amax_out=amax_out, aligned=aligned, longest_stride=stride,
        )  # fmt: skip
        for step in emission.steps:
            step.quantize(step.grid, step.out, x, stride, M, K)
    return emission


def _quantize_whole_rows(x: torch.Tensor, scaling: Scaling) -> QuantizedTensor:
    M, K = x.shape
    output, launch = _plan_whole_rows(M, K, scaling, x.dtype)
    with on_device_of(x):
        out = output.allocate(x.device, is_current_gpu(x.device))
        launch((M,), out.qdata, out.scale, x, x.stride(0), K)
    return out


@functools.lru_cache(maxsize=1024)
def _plan_whole_rows(M: int, K: int, scaling: Scaling, dtype: torch.dtype) -> tuple[Output, Launcher]:
    rule = (*rule_of(scaling, dtype, False, 0), *NONE)
    block_k = min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
    launcher = launcher_of(quantize_whole_rows, RULE=rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS)
    return Output.of(M, K, scaling), launcher


def _amax_buffers(plan: EmissionPlan, device: torch.device) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Zeroed bits of the rows' and the columns' amaxes; where both mean all of x they are one number."""
    num_rows, num_cols = plan.num_amaxes
    if not num_rows + num_cols:
        return None, None
    if plan.is_one_amax:
        shared = torch.zeros(1, dtype=torch.int32, device=device)
        return shared, shared
    row_bits, col_bits = torch.zeros(num_rows + num_cols, dtype=torch.int32, device=device).split((num_rows, num_cols))
    return row_bits if num_rows else None, col_bits if num_cols else None


def _only(used: tuple[bool, ...], out: tuple[torch.Tensor | None, ...]) -> tuple[torch.Tensor | None, ...]:
    """OUT with None for what a step does not use, so that one kernel is compiled for each rule."""
    return tuple(tensor if is_used else None for tensor, is_used in zip(out, used, strict=True))


def _parts(q: QuantizedTensor | None) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    return (None, None) if q is None else (q.qdata, q.scale)


def _fill_empty_scales(
    rows: QuantizedTensor | None, columns: QuantizedTensor | None, static: torch.Tensor | None
) -> None:
    for q in (rows, columns):
        if q is not None:
            q.scale.copy_(torch.ones_like(q.scale) if static is None else torch.ones_like(q.scale) / static)
