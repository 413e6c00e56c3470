"""Ground truth of the high-precision GEMM in exact mode: fixed-point operands, exact fp64 sums. Device-free torch."""

import torch

from octavo.numerics.fixed_point import bits_for_dot, to_fixed

SLAB = 512  # columns of K that share a unit; 22 bits an operand keep their sum exact


def hp_mm_reference(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x @ weight.t() with sums that no order can change: exact within a slab of K, slabs added one after the other.

    Args:
        x: [M, K].
        weight: [N, K].
    Returns:
        [M, N] of out_dtype; operands keep 22 to 24 bits relative to their largest element in the row's slab.
    """
    acc = torch.zeros(x.shape[0], weight.shape[0], dtype=torch.float64, device=x.device)
    for start in range(0, x.shape[1], SLAB):
        columns = slice(start, min(start + SLAB, x.shape[1]))
        bits = bits_for_dot(columns.stop - columns.start)
        x_int, x_unit = to_fixed(x[:, columns], bits)  # [M, S], [M, 1]
        w_int, w_unit = to_fixed(weight[:, columns], bits)  # [N, S], [N, 1]
        acc += (x_int @ w_int.t()) * (x_unit * w_unit.t())  # elementwise: the same bits in any batch
    out = acc.float()
    if bias is not None:
        out = out + bias.float()
    return out.to(out_dtype)
