"""Ground truth of norm_quantize: the norm, then the quantizers, one after the other. Device-free torch."""

import torch

from octavo.numerics.scaling import Scaling
from octavo.ops.moe.reference import combine_reference
from octavo.ops.norm import reference as norm
from octavo.ops.quantize import reference as quantizer


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
    keeps_norm: bool = False,
    rows_of: torch.Tensor | None = None,
    row_weights: torch.Tensor | None = None,
) -> tuple[torch.Tensor, ...]:
    """(row codes, scale, column codes, scale, x + residual, stored codes, scale, mean, rstd, norm), unused ones empty.

    The pairs are as the quantizers' own reference makes them.
    """
    if residual is not None and rows_of is not None:
        residual = combine_reference(residual, rows_of, row_weights)
    y, summed, mean, rstd = norm.forward(x, weight, bias, residual, eps, kind, zero_centered_gamma)
    stream = x if residual is None else summed
    nothing = (x.new_empty(0), rstd.new_empty(0))
    rows, columns = quantizer.quantize_matrix(y, scaling, column_scaling, quant_scale, amax_out)
    assert rows is not None, "rows are always made"
    column_parts = nothing if columns is None else (columns.qdata, columns.scale)
    stored = nothing if store_scaling is None else quantizer.rows(stream, store_scaling)
    return (rows.qdata, rows.scale, *column_parts, summed, *stored, mean, rstd, y if keeps_norm else x.new_empty(0))
