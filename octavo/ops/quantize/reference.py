"""Ground truth of the quantizers: rows, columns (the transposed matrix), and both. Device-free torch."""

import torch

from octavo.numerics.infinity import note_infinity
from octavo.numerics.quantized import QuantizedTensor, quantize_reference
from octavo.numerics.scaling import Scaling, block_amax

Codes = tuple[torch.Tensor, torch.Tensor]


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


def both(
    x: torch.Tensor,
    scaling: Scaling,
    column_scaling: Scaling,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows(x) and columns(x); square blocks transpose their codes, which equals quantizing the transposed source."""
    if scaling != column_scaling or scaling.block_size[0] != scaling.block_size[1]:
        return (*rows(x, scaling, quant_scale, amax_out), *columns(x, column_scaling, quant_scale))
    codes, scale = rows(x, scaling, quant_scale, amax_out)
    t = QuantizedTensor(codes, scale, scaling).t()
    return codes, scale, t.qdata, t.scale.clone()  # a single number transposes to itself


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
