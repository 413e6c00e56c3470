"""Quantizers of a plain matrix, rows, columns or both: launches of quantize_tiles and quantize_whole_rows (device.py).

What decides a launch is a key; its first launch goes by plan.py and triton and leaves a PreparedQuantizer, with which
later ones allocate what they are not given and launch by addresses.
"""

from typing import Any, NamedTuple

import torch

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.kernel_requests import leaves_out_launches
from octavo.ops._runtime.launch import triton as launch
from octavo.ops.quantize.reference import Operands, placed
from octavo.ops.quantize.triton.plan import (
    OFFSET_LIMIT,
    EmissionPlan,
    Take,
    fill_empty_scales,
    plan_emission,
    plan_whole_rows,
)
from octavo.ops.quantize.triton.zero_pool import MOST_TAKEN, alloc_zeros

is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)


class PreparedQuantizer(NamedTuple):
    """What a launch takes that its key decides."""

    plan: EmissionPlan  # outputs and amaxes
    kernel: Any
    launches: list[tuple[launch.CompiledLaunch, tuple[int, int, int], Take]]  # each with its grid and what it takes
    sizes: tuple[int, int, int]  # x's row stride, M, K
    infinite: int  # the address of the device's flag


# (x's shape, strides, dtype, device and alignment, both scalings, dtypes, devices and alignments of what else is given)
prepared_quantizers = launch.LaunchCache()


def quantize_matrix(
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
    shares_zeros: bool = False,
) -> Operands:
    """(rows, columns) of x, each None where it has no scaling.

    Args:
        x: [M, K] bf16, fp16 or fp32, on a GPU; copied where its last dim is not contiguous.
        scaling: of the rows, or None for none.
        column_scaling: of the columns, or None for none.
        quant_scale: one fp32 value on x's device, per tensor only; without it, x's own amax decides.
        amax_out: one fp32 value into which max|x| is folded; with quant_scale only.
        out: the rows' operand, where it is not to be a new one.
        shares_zeros: amaxes may lie in a slab that later calls share, which an allocator for this call alone, as
            torch.compile's CUDA graphs have one, would not know of.
    Returns:
        Of each: qdata [M, K] or [K, M] FP8, contiguous, and decode scale [row blocks, column blocks] fp32, strides
        (1, rows) for 1xB blocks.
    """
    if out is not None and not _is_laid_out(out):
        rows, columns = quantize_matrix(x, scaling, column_scaling, quant_scale, amax_out, shares_zeros=shares_zeros)
        return placed(rows, out), columns
    device, address, static, observed = x.get_device(), x.data_ptr(), None, None
    row_text, column_text = scaling and scaling.text, column_scaling and column_scaling.text
    key: tuple[object, ...] = (x.shape, x.stride(), x.dtype, device, address % 16 == 0, row_text, column_text)
    if quant_scale is not None:
        static = quant_scale.data_ptr()
        key += (quant_scale.dtype, quant_scale.get_device(), static % 16 == 0)
        if amax_out is not None:
            observed = amax_out.data_ptr()
            key += (amax_out.dtype, amax_out.get_device(), observed % 16 == 0)
    prepared: PreparedQuantizer | None = prepared_quantizers.get(key)
    if prepared is None or launch.has_launch_hooks(prepared.kernel):
        with launch.on_device_of(x):
            return _launch_first(key, x, scaling, column_scaling, quant_scale, amax_out, out)
    if device != launch.current_device():
        with torch.cuda.device(device):
            return quantize_matrix(x, scaling, column_scaling, quant_scale, amax_out, out, shares_zeros)
    plan, _, launches, sizes, infinite = prepared
    stream = launch.current_stream(device)
    rows = columns = row_q = row_s = col_q = col_s = row_amax = col_amax = None
    if plan.rows is not None:
        rows = plan.rows.allocate(x.device, True) if out is None else out
        row_q, row_s = rows.qdata.data_ptr(), rows.scale.data_ptr()
    if plan.columns is not None:
        columns = plan.columns.allocate(x.device, True)
        col_q, col_s = columns.qdata.data_ptr(), columns.scale.data_ptr()
    if plan.num_zeros:
        if shares_zeros and plan.num_zeros <= MOST_TAKEN and not is_capturing():
            zeros, _held = alloc_zeros(plan.num_zeros, x.device, stream)
        else:
            _held = plan.zero_numbers(x.device, True)
            zeros = _held.data_ptr()
        num_rows, num_cols = plan.num_amaxes
        row_amax = zeros if num_rows else None
        col_amax = zeros if plan.is_one_amax else zeros + 4 * num_rows if num_cols else None
    given = (row_q, row_s, col_q, col_s, row_amax, col_amax, static, observed, infinite, None)
    for compiled, grid, take in launches:
        compiled.launch(grid, stream, take(given), address, *sizes)
    return rows, columns


def _launch_first(
    key: object,
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    out: QuantizedTensor | None,
) -> Operands:
    """Launch as every kernel is, and keep what was launched."""
    if x.stride(1) != 1 and x.shape[1] > 1:
        return quantize_matrix(x.contiguous(), scaling, column_scaling, quant_scale, amax_out, out)
    (M, K), stride = x.shape, x.stride(0)
    if scaling is not None and column_scaling is None and scaling.kind == "per_row" and M * K:
        plan = plan_whole_rows(M, K, x.dtype, scaling)
    else:
        # Triton specializes what is a multiple of 16, and moves 16 bytes at once where all of these are.
        is_wide = x.data_ptr() % 16 == 0 and not (stride % 16 or M % 16 or K % 16)
        is_long = max(M, K, stride) > OFFSET_LIMIT
        wishes = (quant_scale is not None, amax_out is not None, is_wide, is_long, None)
        plan = plan_emission(M, K, x.dtype, scaling, column_scaling, *wishes)
    # what is left out is to read as zeros: torch.empty makes them, and plan's own allocator does not
    is_quick = x.get_device() >= 0 and not leaves_out_launches()
    rows, columns, given = plan.allocate(x.device, is_quick, quant_scale, amax_out, out)
    sizes, launches = (stride, M, K), []
    for step in plan.steps:
        compiled = step.quantize(step.grid, step.take(given), x, *sizes)
        if compiled is not None:
            launches.append((compiled, launch.whole_grid(step.grid), step.take))
    if not plan.steps:
        fill_empty_scales(rows, columns, quant_scale)
    elif len(launches) == len(plan.steps):
        kernel, flag = plan.steps[0].quantize.kernel, infinity_flag(x.device).data_ptr()
        prepared_quantizers.keep(key, PreparedQuantizer(plan, kernel, launches, sizes, flag))
    return rows, columns


def _is_laid_out(out: QuantizedTensor) -> bool:
    """Whether kernels can write into it: strides and alignment are those of a new operand."""
    is_grouped = out.scaling.kind in ("block_1x128", "mx_1x32")
    scale = out.scale.t() if is_grouped else out.scale
    is_aligned = out.qdata.data_ptr() % 16 == 0 == out.scale.data_ptr() % 16
    return is_aligned and out.qdata.is_contiguous() and scale.is_contiguous()
