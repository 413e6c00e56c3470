"""Grouped GEMMs one group after the other: the ground truth, and the path of devices and operands without a library's.

Legend: E groups, R rows of all groups, N out, K in. It waits for the offsets: on a GPU that is one synchronization.
"""

from collections.abc import Iterator, Sequence

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.gemm.scaled_mm import scaled_mm


def groups(offsets: torch.Tensor) -> Iterator[tuple[int, slice]]:
    """(index, rows) of each group that has rows."""
    start = 0
    for index, end in enumerate(offsets.tolist()):
        if end > start:
            yield index, slice(start, end)
        start = max(start, end)


def grouped_mm_reference(
    x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor, out_dtype: torch.dtype, exact: bool
) -> torch.Tensor:
    """x [R, K] times each group's weight [N, K] -> [R, N] of out_dtype; rows of no group are zero."""
    out = torch.zeros(x.shape[0], weights.shape[1], dtype=out_dtype, device=x.device)
    for index, rows in groups(offsets):
        out[rows] = hp_mm(x[rows], weights[index], out_dtype=out_dtype, exact=exact)
    return out


def grouped_mm_columns_reference(
    a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor, out_dtype: torch.dtype
) -> torch.Tensor:
    """a [N, R] times b [K, R] over each group's columns -> [E, N, K] of out_dtype."""
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for index, rows in groups(offsets):
        out[index] = hp_mm(a[:, rows], b[:, rows], out_dtype=out_dtype)
    return out


def scaled_grouped_mm_reference(
    a: QuantizedTensor,
    weights: Sequence[QuantizedTensor],
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    exact: bool,
    fast_accum: bool,
) -> torch.Tensor:
    """a's codes [R, K] times each group's codes [N, K] -> [R, N] of out_dtype; rows of no group are zero."""
    num_out = weights[0].shape[0] // (offsets.shape[0] if len(weights) == 1 else 1)
    out = torch.zeros(a.shape[0], num_out, dtype=out_dtype, device=a.device)
    for index, rows in groups(offsets):
        scale = a.scale if a.scaling.is_per_tensor else a.scale[rows]
        left = QuantizedTensor(a.qdata[rows], scale, a.scaling)
        right = weights[index] if len(weights) > 1 else row_slice(weights[0], index, num_out)
        out[rows] = scaled_mm(left, right, out_dtype=out_dtype, exact=exact, fast_accum=fast_accum)
    return out


def gather_codes(a: QuantizedTensor, slots: torch.Tensor, slots_per_row: int) -> QuantizedTensor:
    """Codes [R, K], of which each row r is a's row slots[r] // slots_per_row; no scale is of several rows but all."""
    rows = slots // slots_per_row
    scale = a.scale if a.scaling.is_per_tensor else a.scale.t()[:, rows].t()  # the layout of a quantizer
    return QuantizedTensor(a.qdata.view(torch.uint8)[rows].view(a.qdata.dtype), scale, a.scaling)


def row_slice(q: QuantizedTensor, index: int, num_rows: int) -> QuantizedTensor:
    """Rows [index * num_rows, ...) of codes whose blocks do not cross from one group into the next."""
    start, block = index * num_rows, q.scaling.block_size[0]
    scale = q.scale if block == -1 else q.scale[start // block : -(-(start + num_rows) // block)]
    return QuantizedTensor(q.qdata[start : start + num_rows], scale, q.scaling)


def scaled_grouped_mm_columns_reference(
    a: QuantizedTensor, b: QuantizedTensor, offsets: torch.Tensor, out_dtype: torch.dtype, fast_accum: bool
) -> torch.Tensor:
    """Codes a [N, R] times b [K, R] over each group's columns -> [E, N, K] of out_dtype."""
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], dtype=out_dtype, device=a.device)
    for index, columns in groups(offsets):
        left, right = (column_slice(q, columns) for q in (a, b))
        out[index] = scaled_mm(left, right, out_dtype=out_dtype, fast_accum=fast_accum)
    return out


def column_slice(q: QuantizedTensor, columns: slice) -> QuantizedTensor:
    """Columns of codes whose blocks begin and end with them."""
    block, scale = q.scaling.block_size[1], q.scale
    if block != -1:
        scale = scale[:, columns.start // block : -(-columns.stop // block)]
    return QuantizedTensor(q.qdata[:, columns].contiguous(), scale, q.scaling)
