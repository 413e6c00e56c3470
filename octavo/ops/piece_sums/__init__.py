"""Sums of a row's numbers, or of their squares, whose order is fixed by the row alone: one a piece of 4096 elements.

A library's sum takes an order that also depends on how many rows there are, on their address and on the threads, so a
shard's row may give other bits than the same row of the whole tensor.
"""

import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.piece_sums import reference
from octavo.ops.piece_sums.reference import PIECE

__all__ = ["PIECE", "row_sums"]


def _fake(x: torch.Tensor, is_squared: bool) -> torch.Tensor:
    return x.new_empty((x.shape[0], -(-x.shape[1] // PIECE)), dtype=torch.float32)


_op = register(
    "piece_sums(Tensor x, bool is_squared) -> Tensor",
    reference=reference.piece_sums,
    fake=_fake,
    cuda=kernel_or_reference("piece_sums.triton.piece_sums", reference.piece_sums),
    has_gradient=False,
)


def row_sums(x: torch.Tensor, *, is_squared: bool) -> torch.Tensor:
    """The sum of each row, in an order that is the same for every row of this length, wherever it lies.

    Args:
        x: [R, L] of any float dtype, L >= 1.
        is_squared: sum the squares.
    Returns:
        [R] fp32. inf and NaN show, as does a square beyond fp32's range.
    Raises:
        ShapeError: x is no matrix, or its rows are empty.
    Exactness: bitwise the reference, on CPU and GPU: the sum of neighbouring halves, over and over, in fp32.
    """
    if x.dim() != 2 or x.shape[1] == 0:
        raise ShapeError(f"row_sums takes a matrix [R, L] with L >= 1, got {tuple(x.shape)}")
    sums = _op(x.detach().contiguous(), is_squared)
    while sums.shape[1] > 1:
        sums = _op(sums, False)
    return sums.view(-1)
