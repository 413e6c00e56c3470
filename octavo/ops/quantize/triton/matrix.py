"""Quantizers of a plain matrix, rows, columns or both: launches of quantize_tiles and quantize_whole_rows (device.py).

What one shape takes is worked out once (`_tiles_of`, `_whole_rows_of`); a call allocates, and launches by addresses.
"""

import functools

import torch
import triton

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.launch.triton import (
    Prepared,
    current_stream,
    is_on_current_device,
    is_unobserved,
    kind_of,
    launcher_of,
    whole_grid,
)
from octavo.ops.quantize.triton.device import quantize_tiles, quantize_whole_rows
from octavo.ops.quantize.triton.plan import (
    OFFSET_LIMIT,
    Out,
    Output,
    Take,
    fill_empty_scales,
    plan_emission,
    rule_of_rows,
)

WHOLE_ROW_BLOCK = 4096
WHOLE_ROW_WARPS = 8


def row_codes(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None
) -> QuantizedTensor:
    """Quantize the rows of x.

    Args:
        x: [M, K] bf16, fp16 or fp32, last dim contiguous (else it is copied), on a GPU.
        scaling: any.
        quant_scale: one fp32 value on x's device, per tensor only; without it, x's own amax decides.
        amax_out: one fp32 value into which max|x| is folded; with quant_scale only.

    Returns:
        qdata [M, K] FP8, contiguous, and decode scale [row blocks, column blocks] fp32, M-major for 1xB blocks.
    """
    if scaling.block_size == (1, -1) and x.numel():
        return _quantize_whole_rows(x, scaling)
    rows, _ = _quantize_tiles(x, scaling, None, quant_scale, amax_out)
    assert rows is not None, "rows were asked for"
    return rows


def column_codes(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None
) -> QuantizedTensor:
    """Quantize x.t() from x [M, K] as stored: qdata [K, M] and its decode scale; arguments as in row_codes."""
    _, columns = _quantize_tiles(x, None, scaling, quant_scale, amax_out)
    assert columns is not None, "columns were asked for"
    return columns


def both_codes(
    x: torch.Tensor,
    scaling: Scaling,
    column_scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Both of the above from one read of x."""
    rows, columns = _quantize_tiles(x, scaling, column_scaling, quant_scale, amax_out)
    assert rows is not None and columns is not None, "both were asked for"
    return rows, columns


def _quantize_tiles(
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
    stride, step = x.stride()
    if step != 1:
        x = x.contiguous()
        stride = x.stride(0)
    M, K = x.shape
    is_known, observe, is_aligned = quant_scale is not None, amax_out is not None, x.data_ptr() % 16 == 0
    call = _tiles_of(M, K, stride, x.dtype, scaling, column_scaling, is_known, observe, is_aligned)
    if is_on_current_device(x):
        return call(x, quant_scale, amax_out)
    with torch.cuda.device(x.device):
        return call(x, quant_scale, amax_out)


def _quantize_whole_rows(x: torch.Tensor, scaling: Scaling) -> QuantizedTensor:
    stride, step = x.stride()
    if step != 1:
        x = x.contiguous()
        stride = x.stride(0)
    M, K = x.shape
    call = _whole_rows_of(M, K, stride, x.dtype, scaling, x.data_ptr() % 16 == 0)
    if is_on_current_device(x):
        return call(x)
    with torch.cuda.device(x.device):
        return call(x)


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
        self._plan = plan_emission(M, K, dtype, scaling, column_scaling, is_known, observe, is_wide, is_long, None)
        self._sizes = (stride, M, K)
        self._kept: dict[object, list[tuple[Prepared, tuple[int, int, int], Take]]] = {}

    def __call__(
        self, x: torch.Tensor, quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None
    ) -> tuple[QuantizedTensor | None, QuantizedTensor | None]:
        """(rows, columns) of x, which is on the current device."""
        device = x.get_device()
        rows, columns, out = self._plan.allocate(x.device, device >= 0, quant_scale, amax_out)
        kinds = device if quant_scale is None else (device, kind_of(quant_scale), kind_of(amax_out))
        kept = self._kept.get(kinds)
        if kept is None or not is_unobserved(quantize_tiles):
            self._launch_by_key(kinds, out, x)
            if not self._plan.steps:
                fill_empty_scales(rows, columns, quant_scale)
            return rows, columns
        stream, address = current_stream(device), x.data_ptr()
        addresses = [None if tensor is None else tensor.data_ptr() for tensor in out]
        for prepared, grid, take in kept:
            prepared.launch(grid, stream, take(addresses), address, *self._sizes)
        return rows, columns

    def _launch_by_key(self, kinds: object, out: Out, x: torch.Tensor) -> None:
        """Launch as everybody does, and keep what was launched for these kinds of what a caller gives."""
        steps = self._plan.steps
        used = [step.quantize(step.grid, step.take(out), x, *self._sizes) for step in steps]
        kept = [(p, whole_grid(s.grid), s.take) for p, s in zip(used, steps, strict=True) if p is not None]
        if steps and len(kept) == len(steps):
            self._kept[kinds] = kept


_tiles_of = functools.lru_cache(maxsize=1024)(_Tiles)


class _WholeRows:
    """The launch of quantize_whole_rows on matrices of one shape, stride, dtype and alignment."""

    def __init__(self, M: int, K: int, stride: int, dtype: torch.dtype, scaling: Scaling, is_aligned: bool) -> None:
        rule = rule_of_rows(scaling, dtype)
        block_k = min(WHOLE_ROW_BLOCK, triton.next_power_of_2(K))
        self._launch = launcher_of(quantize_whole_rows, RULE=rule, BLOCK_K=block_k, num_warps=WHOLE_ROW_WARPS)
        self._output = Output.of(M, K, scaling)
        self._grid, self._sizes = (M, 1, 1), (stride, K)
        self._kept: dict[int, Prepared] = {}

    def __call__(self, x: torch.Tensor) -> QuantizedTensor:
        """Codes and scales of x, which is on the current device."""
        device = x.get_device()
        out = self._output.allocate(x.device, device >= 0)
        prepared = self._kept.get(device)
        if prepared is not None and is_unobserved(quantize_whole_rows):
            addresses = (out.qdata.data_ptr(), out.scale.data_ptr(), x.data_ptr())
            prepared.launch(self._grid, current_stream(device), *addresses, *self._sizes)
            return out
        prepared = self._launch(self._grid, out.qdata, out.scale, x, *self._sizes)
        if prepared is not None:
            self._kept[device] = prepared
        return out


_whole_rows_of = functools.lru_cache(maxsize=1024)(_WholeRows)
