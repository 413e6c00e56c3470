"""Ground truth of the high-precision GEMM in exact mode: fixed-point operands, exact fp64 sums. Device-free torch."""

import torch

from octavo.numerics.fixed_point import bits_for_dot, to_fixed


def hp_mm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x @ weight.t() with sums that no order can change.

    Args:
        x: [M, K]. weight: [N, K].
    Returns:
        [M, N] of out_dtype; error at most that of fp32 accumulation (24 bits relative to each row's largest element).
    """
    bits = bits_for_dot(x.shape[1])
    x_int, x_unit = to_fixed(x, bits)  # [M, K], [M, 1]
    w_int, w_unit = to_fixed(weight, bits)  # [N, K], [N, 1]
    out = ((x_int @ w_int.t()) * (x_unit * w_unit.t())).float()  # [M, N]
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
