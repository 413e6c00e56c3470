"""RMSNorm: the common norm kernels; in exact mode on a CPU the order-free reference. norm_quantize/ fuses it."""

import torch

from octavo.errors import ShapeError
from octavo.ops.norm import has_exact_kernel, norm_forward
from octavo.ops.norm.reference import gamma_of
from octavo.ops.norm.rms_norm.reference import rms_norm_reference

__all__ = ["rms_norm", "rms_norm_reference"]


def rms_norm(
    x: torch.Tensor, weight: torch.Tensor, eps: float, *, exact: bool = False, zero_centered_gamma: bool = False
) -> torch.Tensor:
    """Root-mean-square normalisation over the last dim; not differentiable by itself (nn.RMSNorm is).

    Args:
        x: [..., K] fp32, bf16 or fp16.
        weight: [K].
        eps: added to the mean square.
        exact: bits of a row depend on that row alone, which on a GPU they always do.
        zero_centered_gamma: multiply by 1 + weight.
    Returns:
        x's shape and dtype; statistics and products in fp32, rounded once.
    Raises:
        ShapeError: if weight is not [K].
        DtypeError: if x is of another dtype.
    Source:
        Zhang and Sennrich 2019, equation 4.
    Exactness: exact=True bitwise within a device.
    """
    if weight.shape != x.shape[-1:]:
        raise ShapeError(f"weight must have shape {tuple(x.shape[-1:])} (the last dim of x), got {tuple(weight.shape)}")
    if exact and not has_exact_kernel(x):
        return rms_norm_reference(x, gamma_of(weight, zero_centered_gamma), eps)
    rows = x.reshape(-1, x.shape[-1])
    normed = norm_forward(rows, weight, eps=eps, kind="rms_norm", zero_centered_gamma=zero_centered_gamma)
    return normed.y.view(x.shape)
