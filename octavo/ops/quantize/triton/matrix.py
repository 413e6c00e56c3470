"""Quantizers of a plain matrix, rows, columns or both: launches of quantize_tiles and quantize_whole_rows (device.py).

What one shape takes is worked out once (`_quantizer_of`); a call allocates what it is not given, and launches by
addresses.
"""

import functools
from typing import Any

import torch
import triton

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import Prepared, is_on_current_device, is_unobserved, launcher_of, whole_grid
from octavo.ops._runtime.launch.triton import current_stream as triton_stream
from octavo.ops.quantize.triton.device import quantize_tiles, quantize_whole_rows
from octavo.ops.quantize.triton.plan import (
    OFFSET_LIMIT,
    Output,
    Take,
    fill_empty_scales,
    plan_emission,
    rule_of_rows,
)
from octavo.ops.quantize.triton.zeros import MOST_TAKEN, take_zeros

WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8


# What triton's driver calls, without the two Python functions around it.
current_stream = getattr(torch._C, "_cuda_getCurrentRawStream", triton_stream)
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_MOST_KEPT = 4096


def row_codes(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    *,
    shares_zeros: bool = False,
) -> QuantizedTensor:
    """Quantize the rows of x.

    Args:
        x: [M, K] bf16, fp16 or fp32, last dim contiguous (else it is copied), on a GPU.
        scaling: any.
        quant_scale: one fp32 value on x's device, per tensor only; without it, x's own amax decides.
        amax_out: one fp32 value into which max|x| is folded; with quant_scale only.
        shares_zeros: amaxes may lie in a slab that later calls share, which an allocator for this call alone, as
            torch.compile's CUDA graphs have one, would not know of.

    Returns:
        qdata [M, K] FP8, contiguous, and decode scale [row blocks, column blocks] fp32, M-major for 1xB blocks.
    """
    rows, _ = codes_of(x, scaling, None, quant_scale, amax_out, shares_zeros)
    assert rows is not None, "rows were asked for"
    return rows


def column_codes(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    *,
    shares_zeros: bool = False,
) -> QuantizedTensor:
    """Quantize x.t() from x [M, K] as stored: qdata [K, M] and its decode scale; arguments as in row_codes."""
    _, columns = codes_of(x, None, scaling, quant_scale, amax_out, shares_zeros)
    assert columns is not None, "columns were asked for"
    return columns


def both_codes(
    x: torch.Tensor,
    scaling: Scaling,
    column_scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    *,
    shares_zeros: bool = False,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both of the above from one read of x."""
    return codes_of(x, scaling, column_scaling, quant_scale, amax_out, shares_zeros)  # type: ignore[return-value]


def codes_of(
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    shares_zeros: bool,
    row_place: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    """(rows, columns) of x, each None where it has no scaling; arguments as in row_codes.

    Args:
        row_place: the rows' operand, laid out as a new one, where they are to be written into it.
    """
    is_known, observe, is_aligned = quant_scale is not None, amax_out is not None, x.data_ptr() % 16 == 0
    # By the scalings' ids, as their hash takes a call of Python each.
    key = (x.shape, x.stride(), x.dtype, id(scaling), id(column_scaling), is_known, observe, is_aligned)
    kept = _kept.get(key)
    if kept is None:
        if x.stride(1) != 1 and x.shape[1] > 1:
            x = x.contiguous()
            return codes_of(x, scaling, column_scaling, quant_scale, amax_out, shares_zeros, row_place)
        if len(_kept) >= _MOST_KEPT:
            _kept.clear()
        quantizer = _quantizer_of(
            *x.shape, x.stride(0), x.dtype, scaling, column_scaling, is_known, observe, is_aligned
        )
        kept = _kept[key] = quantizer, scaling, column_scaling
    if is_on_current_device(x):
        return kept[0](x, quant_scale, amax_out, shares_zeros, row_place)
    with torch.cuda.device(x.device):
        return kept[0](x, quant_scale, amax_out, shares_zeros, row_place)


@functools.lru_cache(maxsize=1024)
def _quantizer_of(
    M: int,
    K: int,
    stride: int,
    dtype: torch.dtype,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    is_known: bool,
    observe: bool,
    is_aligned: bool,
) -> "_Tiles | _WholeRows":
    """What quantizes matrices of one shape, stride, dtype and alignment."""
    if scaling is not None and column_scaling is None and scaling.block_size == (1, -1) and M * K:
        return _WholeRows(M, K, stride, dtype, scaling)
    return _Tiles(M, K, stride, dtype, scaling, column_scaling, is_known, observe, is_aligned)


class _Tiles:
    """Launches of quantize_tiles on matrices of one shape, stride, dtype and alignment, with one pair of scalings."""

    def __init__(
        self,
        M: int,
        K: int,
        stride: int,
        dtype: torch.dtype,
        scaling: Scaling | None,
        column_scaling: Scaling | None,
        is_known: bool,
        observe: bool,
        is_aligned: bool,
    ) -> None:
        # Triton specializes what is a multiple of 16, and moves 16 bytes at once where all of these are.
        is_wide = is_aligned and not (stride % 16 or M % 16 or K % 16)
        is_long = max(M, K, stride) > OFFSET_LIMIT
        plan = plan_emission(M, K, dtype, scaling, column_scaling, is_known, observe, is_wide, is_long, None)
        self._plan, self._rows, self._columns, self._num_zeros = plan, plan.rows, plan.columns, plan.num_zeros
        self._row_place, self._col_place = plan.amax_places
        self._sizes = (stride, M, K)
        # the flag's address, and the launches
        self._kept: dict[object, tuple[int, list[tuple[Prepared, tuple[int, int, int], Take]]]] = {}

    def __call__(
        self,
        x: torch.Tensor,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        shares_zeros: bool,
        row_place: QuantizedTensor | None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """(rows, columns) of x, which is on the current device."""
        device = x.get_device()
        kinds: object = device
        static = observed = None  # addresses
        if quant_scale is not None:
            static = quant_scale.data_ptr()
            kinds = (device, quant_scale.dtype, quant_scale.get_device(), static % 16 == 0)
            if amax_out is not None:
                observed = amax_out.data_ptr()
                kinds = (kinds, amax_out.dtype, amax_out.get_device(), observed % 16 == 0)
        kept = self._kept.get(kinds)
        if kept is None or not is_unobserved(quantize_tiles):
            return self._launch_by_key(kinds, x, quant_scale, amax_out, row_place)
        infinite, launches = kept
        stream = current_stream(device)
        rows = columns = row_q = row_s = col_q = col_s = row_amax = col_amax = None
        if self._rows is not None:
            rows = self._rows.allocate(x.device, True) if row_place is None else row_place
            row_q, row_s = rows.qdata.data_ptr(), rows.scale.data_ptr()
        if self._columns is not None:
            columns = self._columns.allocate(x.device, True)
            col_q, col_s = columns.qdata.data_ptr(), columns.scale.data_ptr()
        if self._num_zeros:
            if shares_zeros and self._num_zeros <= MOST_TAKEN and not is_capturing():
                zeros, _held = take_zeros(self._num_zeros, x.device, stream)
            else:
                _held = self._plan.zero_numbers(x.device, True)
                zeros = _held.data_ptr()
            row_amax = None if self._row_place is None else zeros + self._row_place
            col_amax = None if self._col_place is None else zeros + self._col_place
        out = (row_q, row_s, col_q, col_s, row_amax, col_amax, static, observed, infinite, None)
        address, sizes = x.data_ptr(), self._sizes
        for prepared, grid, take in launches:
            prepared.launch(grid, stream, take(out), address, *sizes)
        return rows, columns

    def _launch_by_key(
        self,
        kinds: object,
        x: torch.Tensor,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        row_place: QuantizedTensor | None,
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """Launch as everybody does, and keep what was launched for these kinds of what a caller gives."""
        steps = self._plan.steps
        rows, columns, out = self._plan.allocate(x.device, x.get_device() >= 0, quant_scale, amax_out, row_place)
        used = [step.quantize(step.grid, step.take(out), x, *self._sizes) for step in steps]
        kept = [(p, whole_grid(s.grid), s.take) for p, s in zip(used, steps, strict=True) if p is not None]
        if steps and len(kept) == len(steps):
            self._kept[kinds] = infinity_flag(x.device).data_ptr(), kept
        if not steps:
            fill_empty_scales(rows, columns, quant_scale)
        return rows, columns


class _WholeRows:
    """The launch of quantize_whole_rows on matrices of one shape, stride, dtype and alignment."""

    def __init__(self, M: int, K: int, stride: int, dtype: torch.dtype, scaling: Scaling) -> None:
        rule = rule_of_rows(scaling, dtype)
        block_k = min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
        self._launch = launcher_of(quantize_whole_rows, RULE=rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS)
        self._output = Output.of(M, K, scaling)
        self._grid, self._sizes = (M, 1, 1), (stride, K)
        self._kept: dict[int, tuple[int, Prepared]] = {}  # the flag's address, and the launch

    def __call__(
        self,
        x: torch.Tensor,
        quant_scale: torch.Tensor | None,
        amax_out: torch.Tensor | None,
        shares_zeros: bool,
        row_place: QuantizedTensor | None,
    ) -> tuple[QuantizedTensor, None]:
        """Codes and scales of x, which is on the current device; a row has no known scale and needs no zeros."""
        device = x.get_device()
        out = self._output.allocate(x.device, device >= 0) if row_place is None else row_place
        kept = self._kept.get(device)
        if kept is not None and is_unobserved(quantize_whole_rows):
            infinite, prepared = kept
            addresses = (out.qdata.data_ptr(), out.scale.data_ptr(), infinite, x.data_ptr())
            prepared.launch(self._grid, current_stream(device), *addresses, *self._sizes)
            return out, None
        launched = self._launch(self._grid, out.qdata, out.scale, infinity_flag(x.device), x, *self._sizes)
        if launched is not None:
            self._kept[device] = infinity_flag(x.device).data_ptr(), launched
        return out, None


# With the scalings, so that no others get their ids.
_kept: dict[Any, tuple[_Tiles | _WholeRows, Scaling | None, Scaling | None]] = {}
