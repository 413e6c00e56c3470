"""RMSNorm, alone and fused with the residual add and the quantization of the next linear's input."""

import torch
import torch.nn.functional as F

from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize
from octavo.ops.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_quantize", "rms_norm_reference"]


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, exact: bool = False) -> torch.Tensor:
    """Root-mean-square normalisation over the last dim.

    Args:
        x: [..., K] bf16 or fp32. weight: [K]. eps: added to the mean square.
        exact: bits of a row depend on that row alone.
    Returns:
        x's shape and dtype; statistics and products in fp32, rounded once.
    Raises:
        ShapeError: if weight is not [K].
    Source: Zhang and Sennrich 2019, equation 4. Exactness: exact=True bitwise within a device.
    """
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"weight must have shape {tuple(x.shape[-1:])} (the last dim of x), got {tuple(weight.shape)}")
    if exact:
        return rms_norm_reference(x, weight, eps)
    return F.rms_norm(x, weight.shape, weight.to(x.dtype), eps)


def rms_norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    eps: float,
    scaling: Scaling,
    *,
    residual: torch.Tensor | None = None,
    exact: bool = False,
) -> tuple[QuantizedTensor, torch.Tensor]:
    """Residual add, RMSNorm and quantization in one call; equal in bits to the three ops one after the other.

    Args:
        x: [T, K]. residual: [T, K] or None, added to x in x's dtype first.
        weight: [K]. scaling: of the next linear's input.
    Returns:
        (quantized norm [T, K], the new residual [T, K]: x, or x + residual).
    """
    if residual is not None:
        if residual.shape != x.shape:
            raise ShapeError(f"residual must have x's shape {tuple(x.shape)}, got {tuple(residual.shape)}")
        x = x + residual
    return quantize(rms_norm(x, weight, eps, exact=exact), scaling), x
