"""Facts of the 8-bit floating-point formats: limits, special codes, every value, all from torch.finfo.

Source:
    OCP 8-bit Floating Point Specification 1.0 (E4M3, E5M2), OCP Microscaling Formats 1.0 (E8M0).
"""

import dataclasses
import enum
import functools
import math

import torch

from octavo.errors import DtypeError

NAN_CODE = 0x7F  # the code that octavo writes for every NaN, in E4M3 and in E5M2


@dataclasses.dataclass(frozen=True)
class FloatFormat:
    """One 8-bit format.

    Attributes:
        name: "e4m3", "e5m2" or "e8m0".
        dtype: the torch dtype that stores it.
        exponent_bits: of its layout; value = 2**(e - bias) * (1 + m / 2**mantissa_bits).
        mantissa_bits: of its layout.
        bias: of its layout.
        max: largest finite value.
        min_normal: smallest positive normal value.
        min_subnormal: smallest positive value.
        has_inf: whether it has codes for infinity (E5M2 only).
        signed: whether it has a sign bit (E8M0 has none).
    """

    name: str
    dtype: torch.dtype
    exponent_bits: int
    mantissa_bits: int
    bias: int
    max: float
    min_normal: float
    min_subnormal: float
    has_inf: bool
    signed: bool

    @property
    def decades(self) -> float:
        """Dynamic range in powers of two, from the smallest positive value to the largest."""
        return math.log2(self.max / self.min_subnormal)


def _describe(name: str, dtype: torch.dtype, bits: tuple[int, int, int], has_inf: bool) -> FloatFormat:
    info = torch.finfo(dtype)
    return FloatFormat(
        name=name,
        dtype=dtype,
        exponent_bits=bits[0],
        mantissa_bits=bits[1],
        bias=bits[2],
        max=info.max,
        min_normal=info.smallest_normal,
        min_subnormal=info.smallest_normal * 2.0 ** -bits[1],
        has_inf=has_inf,
        signed=bits[0] != 8,
    )


E4M3 = _describe("e4m3", torch.float8_e4m3fn, (4, 3, 7), has_inf=False)
E5M2 = _describe("e5m2", torch.float8_e5m2, (5, 2, 15), has_inf=True)
E8M0 = _describe("e8m0", torch.float8_e8m0fnu, (8, 0, 127), has_inf=False)

_BY_DTYPE = {f.dtype: f for f in (E4M3, E5M2, E8M0)}


def format_of(dtype: torch.dtype) -> FloatFormat:
    """The facts of an 8-bit dtype.

    Raises:
        DtypeError: for any other dtype.
    """
    if dtype not in _BY_DTYPE:
        raise DtypeError(f"{dtype} is no 8-bit float format; use one of {', '.join(map(str, _BY_DTYPE))}")
    return _BY_DTYPE[dtype]


@functools.cache
def all_values(dtype: torch.dtype) -> torch.Tensor:
    """The value of each of the 256 codes, indexed by code.

    Returns:
        [256] fp32; NaN and inf where the code means them. Do not write to it: it is cached.
    """
    format_of(dtype)
    return torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype).float()  # [256]


class Format(enum.Enum):
    """Which 8-bit formats a recipe uses: (forward operands, grad_output). Names and meaning as in TransformerEngine."""

    E4M3 = (torch.float8_e4m3fn, torch.float8_e4m3fn)
    E5M2 = (torch.float8_e5m2, torch.float8_e5m2)
    HYBRID = (torch.float8_e4m3fn, torch.float8_e5m2)

    @property
    def forward_dtype(self) -> torch.dtype:
        """Format of activations and weights."""
        return self.value[0]

    @property
    def backward_dtype(self) -> torch.dtype:
        """Format of grad_output."""
        return self.value[1]
