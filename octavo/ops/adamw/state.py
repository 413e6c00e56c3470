"""What AdamW keeps of a parameter, in few bytes: 8-bit moments by block, and the fp32 master beside a bf16 parameter.

Moments are rounded stochastically. A moment changes by (1 - beta) of itself a step, less than half of an 8-bit
format's spacing, so that rounding to nearest holds it where it is: under one steady outlier a block, the second moment
of gradients that had fallen to 0.3 stayed 14 to 28 times too large for good (COAT's too), and this one within 7 %.
"""

import torch
import torch.nn.functional as F

from octavo.numerics.formats import E4M3
from octavo.numerics.scaling import reciprocal
from octavo.numerics.stochastic import truncate_with

BLOCK = 128
STATE_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp8": torch.float8_e4m3fn}
WEIGHT_FACTOR = 0x2C1B3C6D  # odd; makes a weight's random bits from its moments'
_CUT_BITS = 20  # bits of an fp32 mantissa beyond the three that both 8-bit formats keep

# UE5M3, the second moment's format: no sign (it has none), five exponent and three mantissa bits, a code c being the
# fp32 number of bits (c + 888) << 20. 31.9 powers of two lie between its ends, so between gradients of a block 15.9.
# It has no zero: what is smaller than code 0, zero too, becomes code 0, so that no step divides by a second moment
# that was lost. A block of zeros has scale 0.
UE5M3_OFFSET = 8 * (127 - 16)
UE5M3_MAX = 61440.0  # code 255: 2**15 * 1.875


def to_blocks(x: torch.Tensor) -> torch.Tensor:
    """A parameter-shaped tensor as [ceil(n / 128), 128] in memory order, padded with zeros."""
    flat = x.reshape(-1)
    return F.pad(flat, (0, -flat.numel() % BLOCK)).view(-1, BLOCK)


def from_blocks(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    """to_blocks undone."""
    return blocks.reshape(-1)[: like.numel()].view(like.shape)


def encode_first(x: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a first moment: E4M3 with the contract's scale a block, rounded stochastically.

    Args:
        x: [blocks, 128] fp32.
        random: int32, x's shape; the low 20 bits are used.
    Returns:
        (codes [blocks, 128] float8_e4m3fn, decode scale [blocks] fp32). NaN is left out of the block's amax and
        saturates (the weight that it made NaN shows it); an infinite amax gives scale 1.
    """
    quant_scale = _quant_scale(x.abs(), E4M3.max)  # [blocks, 1]
    scaled = x * quant_scale
    size = _saturate(scaled.abs(), E4M3.max)
    # Below the smallest normal the spacing is even: there the rounding happens one binade of that spacing higher.
    lift = torch.where(size < E4M3.min_normal, E4M3.min_normal, 0.0)
    size = truncate_with(size + lift, random, _CUT_BITS) - lift
    return torch.copysign(size, scaled).to(E4M3.dtype), reciprocal(quant_scale).view(-1)


def decode_first(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] fp32 from what encode_first made."""
    return codes.float() * scale[:, None]


def encode_second(x: torch.Tensor, random: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize a second moment: UE5M3 by block, the largest value on the largest code, rounded stochastically.

    Args:
        x: [blocks, 128] fp32, >= 0.
        random: int32, x's shape; the high 20 bits are used.
    Returns:
        (codes [blocks, 128] uint8, decode scale [blocks] fp32, 0 for a block of zeros). NaN saturates.
    """
    quant_scale = _quant_scale(x, UE5M3_MAX)  # [blocks, 1]
    scaled = _saturate(x * quant_scale, UE5M3_MAX)
    codes = (scaled.view(torch.int32) + ((random >> 12) & 0xFFFFF) - (UE5M3_OFFSET << _CUT_BITS)) >> _CUT_BITS
    scale = torch.where((x > 0.0).any(dim=1), reciprocal(quant_scale).view(-1), 0.0)
    return codes.clamp_min(0).to(torch.uint8), scale


def decode_second(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """[blocks, 128] fp32 from what encode_second made."""
    return ((codes.to(torch.int32) + UE5M3_OFFSET) << _CUT_BITS).view(torch.float32) * scale[:, None]


def _quant_scale(size: torch.Tensor, largest: float) -> torch.Tensor:
    """The contract's rule for blocks [blocks, 128] of fp32 magnitudes and a format that ends at `largest`."""
    amax = torch.where(torch.isnan(size), 0.0, size).amax(dim=1, keepdim=True)
    quant_scale = torch.full_like(amax, largest) / amax
    quant_scale = torch.where(torch.isinf(quant_scale), torch.finfo(torch.float32).max, quant_scale)
    return torch.where((amax == 0.0) | torch.isinf(amax), 1.0, quant_scale)


def _saturate(size: torch.Tensor, largest: float) -> torch.Tensor:
    return torch.where(size < largest, size, largest)


def split_master(master: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """An fp32 master as the bf16 parameter that it rounds to (nearest even) and what is left, in 16 bits.

    The remainder is the difference of their bits as integers, -2**15 to 2**15: one value too many for 16 bits. It is
    2**15 where a master lies exactly midway above an even bf16 number; those masters move by one fp32 unit towards it.

    Args:
        master: fp32.
    Returns:
        (parameter bf16, remainder int16); join_master of them is the master, bit for bit, but for those midpoints.
    """
    param = master.to(torch.bfloat16)
    remainder = master.view(torch.int32) - _shifted(param)
    return param, remainder.clamp_max(0x7FFF).to(torch.int16)


def join_master(param: torch.Tensor, remainder: torch.Tensor) -> torch.Tensor:
    """The fp32 master of a bf16 parameter and its int16 remainder; split_master of it gives both back."""
    return (_shifted(param) + remainder.to(torch.int32)).view(torch.float32)


def _shifted(param: torch.Tensor) -> torch.Tensor:
    return param.view(torch.int16).to(torch.int32) << 16
