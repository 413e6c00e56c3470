"""Ground truth of the quantizers: rows, columns (the transposed matrix), and both. Device-free torch."""

import torch

from octavo.numerics.infinity import note_infinity
from octavo.numerics.quantized import QuantizedTensor, quantize_reference
from octavo.numerics.scaling import Scaling, block_amax

Codes = tuple[torch.Tensor, torch.Tensor]
Operands = tuple[QuantizedTensor | None, QuantizedTensor | None]


def quantize_matrix(
    x: torch.Tensor,
    scaling: Scaling | None,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> Operands:
    """(rows [M, K], columns [K, M]) of x [M, K], each None where it has no scaling; other arguments as in quantize.

    Square blocks transpose their codes, which equals quantizing the transposed source.
    """
    made = None
    if scaling is not None:
        made = QuantizedTensor.trusted(*rows(x, scaling, quant_scale, amax_out), scaling)
        amax_out = None  # it is folded
    placed_rows = placed(made, out)
    if column_scaling is None:
        return placed_rows, None
    if made is not None and scaling == column_scaling and scaling.block_size[0] == scaling.block_size[1]:
        t = made.t()
        scale = t.scale.clone()  # a single number transposes to itself
        return placed_rows, QuantizedTensor.trusted(t.qdata, scale, column_scaling)
    codes = columns(x, column_scaling, quant_scale, amax_out)
    return placed_rows, QuantizedTensor.trusted(*codes, column_scaling)


def placed(made: QuantizedTensor | None, out: QuantizedTensor | None) -> QuantizedTensor | None:
    """What was made, written into `out` where there is one."""
    if out is None or made is None:
        return made
    out.qdata.copy_(made.qdata)
    out.scale.copy_(made.scale)
    return out


def rows(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> Codes:
    """(codes [M, K], scale) of x [M, K]; max|x| is folded into amax_out."""
    if amax_out is not None:
        fold_amax(amax_out, x)
    made = quantize_reference(x, scaling, quant_scale)
    # an infinite amax has the scale 1; a CPU may look first, a GPU would have to be waited for
    if quant_scale is None and (x.is_cuda or bool((made.scale == 1.0).any())):
        note_infinity(x)
    return lay_out(made)


def columns(
    x: torch.Tensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> Codes:
    """(codes [K, M], scale) of x.t(), made from the high-precision source."""
    return rows(x.t(), scaling, quant_scale, amax_out)


def fold_amax(amax_out: torch.Tensor, x: torch.Tensor) -> None:
    """amax_out = max(amax_out, max|x|) in place, NaN of x dropped; an infinite one is noted."""
    amax = block_amax(x, (-1, -1)).reshape(amax_out.shape)
    note_infinity(amax)
    amax_out.copy_(torch.maximum(amax_out, amax))


def lay_out(q: QuantizedTensor) -> Codes:
    """q's codes, and its scale in the strides that GEMMs take: one number an M in a row for 1xB blocks."""
    if q.scaling.block_size not in ((1, 128), (1, 32)):
        return q.qdata, q.scale
    return q.qdata, q.scale.new_empty(q.scale.shape[::-1]).copy_(q.scale.t()).t()  # strides (1, M), whatever the shape
