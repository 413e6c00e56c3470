"""Ground truth of the ops on pieces of blocks. Device-free torch."""

import math

import torch
from torch.nn.functional import pad

from octavo.numerics.stochastic import random_bits
from octavo.ops.adamw.state import encode_first

BLOCK = 128


def decode_pieces(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """[P * B * 128] of [P, B, 128] codes and [P, B] scales."""
    return (codes.float() * scales[:, :, None]).to(dtype).view(-1)


def sum_pieces(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """[B * 128] fp32 of [P, B, 128] codes and [P, B] scales."""
    total = codes[0].float() * scales[0, :, None]
    for piece, scale in zip(codes[1:], scales[1:], strict=True):
        total += piece.float() * scale[:, None]
    return total.view(-1)


def round_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int) -> None:
    """x [P, n] into codes [P, B, 128] and scales [P, B]."""
    missing = -x.shape[1] % BLOCK
    blocks = pad(x.float(), (0, missing)).view(-1, BLOCK)
    random = pad(random_bits(x.numel(), seed, start).view(x.shape), (0, missing)).view(-1, BLOCK)
    rounded, scale = encode_first(blocks, random)
    mark_non_finite(blocks, scale)
    codes.copy_(rounded.view(codes.shape))
    scales.copy_(scale.view(scales.shape))


def mark_non_finite(blocks: torch.Tensor, scales: torch.Tensor) -> None:
    """Make the scale of each block with a NaN or an infinity NaN: quantizers saturate infinities.

    Args:
        blocks: [..., 128] fp32 or bf16.
        scales: [...] fp32, changed in place.
    """
    largest = torch.linalg.vector_norm(blocks, math.inf, dim=-1)  # NaN where a NaN is
    scales.add_(largest * 0.0)
