"""Blocks of 128 elements on their way between ranks: pieces of codes and scales in a buffer, decoded, summed, rounded.

P pieces, B blocks a piece. Codes and scales are views into one buffer, so pieces are apart by more than their sizes.
"""

import torch

from octavo.errors import ShapeError
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.packed import reference
from octavo.ops.packed.reference import mark_non_finite

__all__ = ["decode_pieces", "mark_non_finite", "round_pieces_", "sum_pieces"]

_decode = register(
    "decode_pieces(Tensor codes, Tensor scales, ScalarType dtype) -> Tensor",
    reference=reference.decode_pieces,
    fake=lambda codes, _, dtype: codes.new_empty(codes.numel(), dtype=dtype),
    cuda=kernel_or_reference("packed.triton.decode_pieces", reference.decode_pieces),
)
_sum = register(
    "sum_pieces(Tensor codes, Tensor scales) -> Tensor",
    reference=reference.sum_pieces,
    fake=lambda codes, _: codes.new_empty(codes[0].numel(), dtype=torch.float32),
    cuda=kernel_or_reference("packed.triton.sum_pieces", reference.sum_pieces),
)
_round = register(
    "round_pieces(Tensor x, Tensor(a!) codes, Tensor(b!) scales, Tensor seed, int start) -> ()",
    reference=reference.round_pieces,
    fake=lambda *_: None,
    cuda=kernel_or_reference("packed.triton.round_pieces", reference.round_pieces),
)


@torch.no_grad()
def decode_pieces(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """codes * scale in fp32, rounded once to `dtype`.

    Args:
        codes: [P, B, 128] float8_e4m3fn.
        scales: [P, B] fp32.
        dtype: fp32 or bf16.
    Returns:
        [P * B * 128].
    Exactness: bitwise, CPU and GPU.
    """
    _check(codes, scales)
    return _decode(codes, scales, dtype)  # type: ignore[no-any-return]


@torch.no_grad()
def sum_pieces(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """The decoded pieces, added one after the other in fp32.

    Args:
        codes: [P, B, 128] float8_e4m3fn.
        scales: [P, B] fp32.
    Returns:
        [B * 128] fp32.
    Exactness: bitwise, CPU and GPU: products and sums are rounded one by one.
    """
    _check(codes, scales)
    return _sum(codes, scales)  # type: ignore[no-any-return]


@torch.no_grad()
def round_pieces_(
    x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int = 0
) -> None:
    """Quantize to E4M3 with the contract's scale a block, rounded stochastically: the mean of the result is x.

    Args:
        x: [P, n] fp32 or bf16, rows contiguous; the last block of a piece is filled with zeros.
        codes: [P, ceil(n / 128), 128] float8_e4m3fn, written.
        scales: [P, ceil(n / 128)] fp32, written; NaN for a block that holds NaN or an infinity.
        seed: int32 scalar on x's device.
        start: element i of piece p has the random bits of place start + p * n + i (numerics.stochastic.random_bits).
    Exactness: bitwise, CPU and GPU.
    """
    _check(codes, scales)
    if x.dim() != 2 or codes.shape[:2] != (len(x), -(-x.shape[1] // reference.BLOCK)):
        raise ShapeError(f"{tuple(codes.shape)} codes must be the blocks of x's pieces, got x {tuple(x.shape)}")
    if codes.numel():
        _round(x, codes, scales, seed, start)


def _check(codes: torch.Tensor, scales: torch.Tensor) -> None:
    if codes.dim() != 3 or codes.shape[2] != reference.BLOCK or scales.shape != codes.shape[:2]:
        raise ShapeError(
            f"codes must be [pieces, blocks, 128] and scales [pieces, blocks], got {tuple(codes.shape)} and "
            f"{tuple(scales.shape)}"
        )
