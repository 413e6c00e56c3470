"""GEMM in high precision: lm_head, routers, and linears that a recipe leaves in bf16."""

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.ops.gemm.hp_mm.library import hp_mm_library
from octavo.ops.gemm.hp_mm.reference import hp_mm_reference

__all__ = ["hp_mm", "hp_mm_reference"]


def hp_mm(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype | None = None,
    exact: bool = False,
) -> torch.Tensor:
    """x @ weight.t() + bias, accumulated in fp32.

    Args:
        x: [M, K] bf16, fp16 or fp32.
        weight: [N, K], same dtype.
        bias: [N] or None.
        out_dtype: dtype of the result; None for x's.
        exact: bits of a row depend on that row alone, whatever M or library: on a GPU one Triton kernel for 16-bit
            operands, else fixed-point sums.
    Returns:
        [M, N] of out_dtype.
    Raises:
        ShapeError: if K differs.
    Exactness: exact=True bitwise within a device; else SQNR >= 45 dB to it for bf16 output.
    """
    if x.dim() != 2 or weight.dim() != 2 or x.shape[1] != weight.shape[1]:
        raise ShapeError(f"x [M, K] and weight [N, K] must agree in K, got {tuple(x.shape)} and {tuple(weight.shape)}")
    run = hp_mm_library
    if exact:
        run = hp_mm_reference
        if x.is_cuda and not env.force_reference():
            from octavo.ops.gemm.hp_mm import triton

            run = triton.hp_mm_exact if triton.can_run(x, weight) else hp_mm_reference
    return run(x, weight, bias, out_dtype or x.dtype)
