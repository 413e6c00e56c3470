"""Stochastic rounding without a generator: 32 random bits an element, hashed from its place and a seed.

The same place and seed give the same bits on every device, so that a run that is resumed repeats itself.
"""

import torch

_FACTORS = (0x7FEB352D, 0x846CA68B - (1 << 32))  # two odd factors as signed 32-bit integers
_GOLDEN = 0x9E3779B9 - (1 << 32)


def mix_bits(x: torch.Tensor) -> torch.Tensor:
    """A hash of each 32-bit integer: one to one, and every input bit moves about half of the output's.

    Args:
        x: int32, any shape.
    Returns:
        int32, x's shape.
    Source:
        the two-round multiply-xorshift of C. Wellons' hash prospector.
    Exactness: bitwise on every device.
    """
    x = x ^ _shift(x, 16)
    x = x * _FACTORS[0]
    x = x ^ _shift(x, 15)
    x = x * _FACTORS[1]
    return x ^ _shift(x, 16)


def random_bits(num: int, seed: torch.Tensor, start: int = 0) -> torch.Tensor:
    """Random bits for elements under a seed: independent of each other, for errors that are summed up.

    Args:
        num: elements `start` to start + num - 1.
        seed: int32 scalar, on the device where the bits are wanted.
        start: of a part of a tensor, whose bits are then those of the whole's.
    Returns:
        [num] int32, all 32 bits random.
    """
    return mix_bits(_index(num, seed.device, start) ^ mix_bits(seed + _GOLDEN))


def spread_bits(num: int, seed: torch.Tensor, first: int = 0) -> torch.Tensor:
    """Bits that are random from seed to seed, and evenly spread over the elements of one: a golden-ratio sequence.

    One multiplication an element, for states where each element's own history of errors is all that counts.

    Args:
        num: as in random_bits.
        seed: as in random_bits.
        first: the place of the first of them, of a piece cut out of a tensor.
    Returns:
        As random_bits.
    """
    return _index(num, seed.device, first) * _GOLDEN + mix_bits(seed + _GOLDEN)


def truncate_with(x: torch.Tensor, random: torch.Tensor, num_bits: int) -> torch.Tensor:
    """Round fp32 values stochastically to a mantissa that is `num_bits` shorter: the mean of the result is x.

    Args:
        x: fp32, no NaN; the sign stays.
        random: int32, x's shape; its low `num_bits` bits are used.
        num_bits: 16 leaves bf16's mantissa, 20 that of E4M3.
    """
    mask = (1 << num_bits) - 1
    return ((x.view(torch.int32) + (random & mask)) & ~mask).view(torch.float32)


def round_to_bf16(x: torch.Tensor, random: torch.Tensor) -> torch.Tensor:
    """Round fp32 to bf16 stochastically; NaN stays NaN.

    Args:
        random: int32, x's shape; its low 16 bits are used.
    """
    return torch.where(torch.isnan(x), x, truncate_with(x, random, 16)).to(torch.bfloat16)


def _index(num: int, device: torch.device, start: int = 0) -> torch.Tensor:
    return torch.arange(start, start + num, device=device).to(torch.int32)  # past 2**31 the low 32 bits, as on a GPU


def _shift(x: torch.Tensor, places: int) -> torch.Tensor:
    """A logical shift to the right: torch's keeps the sign."""
    return (x >> places) & ((1 << (32 - places)) - 1)
