"""Ground truth of the quantizers: rows, columns (the transposed matrix), and both. Device-free torch."""

import torch

from octavo.numerics.quantized import quantize_reference
from octavo.numerics.scaling import Scaling


def rows(x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [M, K], scale) of x [M, K]."""
    q = quantize_reference(x, scaling, quant_scale)
    return q.qdata, q.scale


def columns(x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """(codes [K, M], scale) of x.t(), made from the high-precision source."""
    return rows(x.t(), scaling, quant_scale)


def both(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """rows(x) and columns(x); square blocks transpose their codes, which equals quantizing the transposed source."""
    q = quantize_reference(x, scaling, quant_scale)
    if scaling.block_size[0] == scaling.block_size[1]:
        t = q.t()
        return q.qdata, q.scale, t.qdata, t.scale
    return (q.qdata, q.scale, *columns(x, scaling, quant_scale))
