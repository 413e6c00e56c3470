"""Exact sums: operands as integers times a power of two, so that fp64 adds their products without rounding.

A sum of integers below 2**53 is exact in fp64 whatever its order. The exact reference ops build every sum this way, so
their bits depend on neither batch, chunking, padding, thread count nor the matrix library. See docs/numerics.md.
"""

import math

import torch

FP64_BITS = 53
_FP64_BIAS = 1023


def bits_for_dot(num_terms: int) -> int:
    """Bits that each of two operands may have for a dot product of num_terms terms to be exact in fp64 (24 at most)."""
    return min(24, (FP64_BITS - math.ceil(math.log2(max(num_terms, 2)))) // 2)


def to_fixed(x: torch.Tensor, bits: int, dim: int | tuple[int, ...] = -1) -> tuple[torch.Tensor, torch.Tensor]:
    """Round x to integers of at most `bits` bits, relative to its largest magnitude along dim.

    x ~= integers * unit. Values within 2**(bits - mantissa bits) of the largest are kept exactly: for bf16 and 23 bits,
    everything above 2**-15 of the largest; smaller ones round to nearest even at unit.

    Args:
        x: any float tensor.
        bits: 1 to 52.
        dim: the dims that share a unit (those that will be summed over).
    Returns:
        (integers, unit): fp64; unit has size 1 along dim and is a power of two. inf and NaN stay not finite.
    """
    wide = x.double()
    _, exponent = torch.frexp(wide.abs().amax(dim=dim, keepdim=True))
    unit = ((exponent.long() - bits + _FP64_BIAS) << (FP64_BITS - 1)).view(torch.float64)  # 2**(exponent - bits)
    return torch.round(wide / unit), unit


def exact_sum(x: torch.Tensor, bits: int, dim: int = -1) -> torch.Tensor:
    """Sum along dim, order-free.

    Args:
        x: any float tensor.
        bits: precision kept, relative to the largest term; bits + log2(terms) <= 53.
    Returns:
        fp64, dim kept with size 1.
    """
    integers, unit = to_fixed(x, bits, dim)
    return integers.sum(dim=dim, keepdim=True) * unit
