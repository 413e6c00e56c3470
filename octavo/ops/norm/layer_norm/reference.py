"""Ground truth of LayerNorm in exact mode: exact sums a row, all else in fp32, one rounding. Device-free torch."""

import torch

from octavo.numerics.fixed_point import bits_for_dot, exact_sum, to_fixed


def row_statistics(x: torch.Tensor, eps: float) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, 1 / sqrt(variance + eps)) of each row, [..., 1] fp32; a row's bits its own affair.

    Args:
        x: [..., K].
    """
    width = x.shape[-1]
    mean = (exact_sum(x, 2 * bits_for_dot(width)) / width).float()
    d_int, unit = to_fixed(x.float() - mean, bits_for_dot(width))
    sum_squares = (d_int * d_int).sum(dim=-1, keepdim=True) * (unit * unit)  # exact: integers below 2**53
    variance = (sum_squares / width).float()
    return mean, torch.ones_like(variance) / torch.sqrt(variance + eps)  # sqrt and division round correctly


def layer_norm_reference(x: torch.Tensor, gamma: torch.Tensor, bias: torch.Tensor | None, eps: float) -> torch.Tensor:
    """(x - mean) / sqrt(variance + eps) * gamma + bias.

    Args:
        x: [..., K].
        gamma: [K].
        bias: [K] or None.
    Returns:
        x's shape and dtype.
    """
    mean, rstd = row_statistics(x, eps)
    y = (x.float() - mean) * rstd * gamma.float()
    return (y if bias is None else y + bias.float()).to(x.dtype)
