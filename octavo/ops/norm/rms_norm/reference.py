"""Ground truth of RMSNorm: an exact sum of squares a row, everything else in fp32, one rounding. Device-free torch."""

import torch

from octavo.numerics.fixed_point import bits_for_dot, to_fixed


def rms_norm_reference(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    """x / sqrt(mean(x**2) + eps) * weight.

    Args:
        x: [..., K].
        weight: [K].
    Returns:
        x's shape and dtype.
    """
    x_int, unit = to_fixed(x, bits_for_dot(x.shape[-1]))
    sum_squares = (x_int * x_int).sum(dim=-1, keepdim=True) * (unit * unit)  # exact: integers below 2**53
    mean = (sum_squares / x.shape[-1]).float()
    rstd = torch.ones_like(mean) / torch.sqrt(mean + eps)  # [..., 1]; sqrt and division round correctly
    return (x.float() * rstd * weight.float()).to(x.dtype)
