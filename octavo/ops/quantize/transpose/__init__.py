"""Transpose FP8 codes whose scales run along neither dimension: the operand of the GEMM over the other one."""

import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.quantize.transpose import reference

__all__ = ["transpose_codes"]

_op = register(
    "transpose_codes(Tensor codes, Tensor? after) -> Tensor",
    reference=reference.transpose,
    fake=lambda codes, after: codes.new_empty(codes.shape[::-1]),
    cuda=kernel_or_reference("quantize.transpose.triton.transpose", reference.transpose),
    has_gradient=False,
)


def transpose_codes(codes: torch.Tensor, after: torch.Tensor | None = None) -> torch.Tensor:
    """codes.t() as a contiguous copy.

    Args:
        codes: [M, K] of an 8-bit dtype, contiguous.
        after: a tensor that must be there first: torch.compile then cannot move the copy to where there is none.
    Returns:
        [K, M] of the same dtype.
    Raises:
        ShapeError: codes are no contiguous matrix of bytes.
    Exactness: bitwise, CPU and GPU.
    """
    if codes.dim() != 2 or codes.element_size() != 1 or not codes.is_contiguous():
        raise ShapeError(
            f"codes must be a contiguous matrix of an 8-bit dtype, got {tuple(codes.shape)} of {codes.dtype}; use .t()"
        )
    return _op(codes.view(torch.uint8), after).view(codes.dtype)  # type: ignore[no-any-return]
