"""Formats that Hopper has no GEMM for, emulated: quantize and decode (fake-quantize) for "mxfp8" and "nvfp4".

Blocks lie along the last dim; a ragged last block is a block of fewer elements. NaN has no say in any maximum and
becomes the quiet NaN (torch.nan's bits); infinities saturate; a block of zeros stays zeros.
octavo.ops.quantize.fake_quantize runs the same rule as kernels on a GPU.
"""

import math

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.emulated_config import ScaleRounding, check_scale_rounding
from octavo.numerics.formats import E4M3, format_of
from octavo.numerics.scaling import INPUT_DTYPES, encode, floor_to_power_of_two, to_blocks
from octavo.numerics.stochastic import mix_bits, random_bits

MX_BLOCK = 32
NVFP4_BLOCK = 16
E2M1_MAX = 6.0
_E8M0_MIN, _E8M0_MAX = 2.0**-127, 2.0**127
_FP32_MAX = torch.finfo(torch.float32).max


def check_source(x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn) -> None:
    """Refuse what cannot be fake-quantized: other dtypes than fp32, bf16 and fp16, a scalar, another format's dtype.

    Raises:
        DtypeError: x has another dtype, or dtype is no FP8 format's.
        ShapeError: x is a scalar.
    """
    if x.dtype not in INPUT_DTYPES:
        raise DtypeError(f"x must be float32, bfloat16 or float16, got {x.dtype}; cast it before quantizing")
    if dtype not in (torch.float8_e4m3fn, torch.float8_e5m2):
        raise DtypeError(f"dtype must be float8_e4m3fn or float8_e5m2, got {dtype}")
    if x.dim() == 0:
        raise ShapeError("x must have a dim to lay blocks along, got a scalar")


def check_square(x: torch.Tensor, square_blocks: bool) -> None:
    """Refuse square blocks of anything but a matrix.

    Raises:
        ShapeError: x is no matrix.
    """
    if square_blocks and x.dim() != 2:
        raise ShapeError(f"square_blocks needs a matrix [N, K], got shape {tuple(x.shape)}; flatten leading dims first")


def fake_quantize_mxfp8(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, scale_rounding: ScaleRounding = "up"
) -> torch.Tensor:
    """What MXFP8 leaves of x: blocks of 32, one E8M0 scale each.

    The scale's exponent is ceil(log2(amax / largest)), largest being 448 for E4M3 and 57344 for E5M2: nothing
    saturates, as in octavo's FP8 recipes with scale_format "e8m0". Rounded "down" it is floor(log2(amax)) - emax, emax
    being 8 and 15, and the largest values of a block may saturate (by at most 1/8 of themselves). The scale is cut to
    2**-127..2**127; an infinite amax gives scale 1. What decodes to more than x's dtype holds becomes infinite.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_rounding: "up" or "down".
    Returns:
        x's shape and dtype.
    Raises:
        DtypeError: x has another dtype, or dtype is another.
        ShapeError: x is a scalar.
        RecipeError: scale_rounding is another.
    Source:
        NVIDIA, "Recipes for pre-training LLMs with MXFP8" (arXiv 2506.08027); down: OCP Microscaling Formats 1.0,
        section 6.3.
    Exactness: bitwise on every device.
    """
    check_source(x, dtype)
    check_scale_rounding(scale_rounding)
    blocks = _blocks(x, (1, MX_BLOCK))  # [M, 1, K/32, 32] fp32
    amax = _amax(blocks)
    largest = torch.full_like(amax, format_of(dtype).max)
    scale = _power_of_two(amax) / floor_to_power_of_two(largest).double()  # of 2**emax
    if scale_rounding == "up":
        scale = torch.where(amax.double() > largest.double() * scale, 2.0 * scale, scale)
    scale = torch.where((amax == 0.0) | torch.isinf(amax), 1.0, scale.clamp(_E8M0_MIN, _E8M0_MAX))
    # In fp64: 2**-127 and its reciprocal are subnormal in fp32, which a device may flush. All these steps are exact.
    codes = encode((blocks.double() / scale).float(), torch.ones_like(amax), dtype)
    return _unblocked((codes.double() * scale).float(), x)


def fake_quantize_nvfp4(
    x: torch.Tensor, *, square_blocks: bool = False, stochastic_seed: int | None = None
) -> torch.Tensor:
    """What NVFP4 leaves of x: E2M1 values, an E4M3 scale for each block of 16, one fp32 scale for the tensor.

    quant_scale = 6 * 448 / amax(x), block_scale = E4M3(amax(block) / 6 * quant_scale), rounded to nearest even; an
    element is E2M1(x * (1 / s)) with s = block_scale * (1 / quant_scale), and decodes to its value times s. A block
    whose amax lies below 2**-18.8 of the tensor's has scale 0 and becomes zeros. Where amax(x) is zero or infinite
    quant_scale is 1.

    Args:
        x: [..., K] fp32, bf16 or fp16.
        square_blocks: 16 x 16 blocks, for weights, so that the transposed weight has the same codes; x is a matrix.
        stochastic_seed: round elements stochastically (gradients), by a hash of their place, this seed and all of x:
            the same x has the same rounding whenever it is recomputed, and each step's has another one without a
            counter. None rounds to nearest, ties to even.
    Returns:
        x's shape and dtype.
    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is a scalar, or square_blocks and x is no matrix.
    Source:
        NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149).
    Exactness: bitwise on every device.
    """
    check_source(x)
    check_square(x, square_blocks)
    blocks = _blocks(x, (NVFP4_BLOCK if square_blocks else 1, NVFP4_BLOCK))  # [M/b, b, K/16, 16] fp32
    amax = _amax(blocks)
    # max over blocks; the constant is a tensor because a number over a tensor rounds twice
    quant_scale = _quotient(torch.full_like(amax[:1, :, :1], E2M1_MAX * E4M3.max), _largest(amax))
    scale = torch.ones_like(quant_scale) / quant_scale  # decodes
    block_scale = encode(amax / torch.full_like(amax, E2M1_MAX), quant_scale, E4M3.dtype).float()
    decode = block_scale * scale
    encode_scale = torch.where(decode > 0.0, (torch.ones_like(decode) / decode).clamp_max(_FP32_MAX), 0.0)
    scaled = torch.where(torch.isinf(blocks), blocks, blocks * encode_scale)
    noise = None if stochastic_seed is None else _noise(x, stochastic_seed, blocks)
    return _unblocked(_round_to_e2m1(scaled, noise) * decode, x)


def _round_to_e2m1(x: torch.Tensor, noise: torch.Tensor | None) -> torch.Tensor:
    """Nearest of 0, 0.5, 1, 1.5, 2, 3, 4, 6 and their negatives, ties to the even code; or by noise in [0, 1)."""
    size = torch.where(x.abs() > E2M1_MAX, E2M1_MAX, x.abs())
    spacing = torch.where(size >= 4.0, 2.0, torch.where(size >= 2.0, 1.0, 0.5))
    steps = size / spacing
    rounded = torch.round(steps) if noise is None else torch.floor(steps + noise)
    return torch.copysign(rounded * spacing, x)


def _noise(x: torch.Tensor, seed: int, blocks: torch.Tensor) -> torch.Tensor:
    """Uniform multiples of 2**-20 in [0, 1) for each element of x by its place, in the shape of blocks."""
    whole_seed = torch.tensor(seed, dtype=torch.int64, device=x.device) + _hash_of(x)
    bits = random_bits(x.numel(), whole_seed.to(torch.int32))
    uniform = ((bits >> 12) & 0xFFFFF).float() * 2.0**-20
    return to_blocks(uniform.view(math.prod(x.shape[:-1]), x.shape[-1]), (blocks.shape[1], blocks.shape[3]))


def _hash_of(x: torch.Tensor) -> torch.Tensor:
    """The sum of a hash of each element's bits, whatever their order; NaN, whose bits differ, and 0 add nothing."""
    values = x.float()
    return mix_bits(torch.where(torch.isnan(values), 0.0, values).view(torch.int32)).sum(dtype=torch.int64)


def _blocks(x: torch.Tensor, block_size: tuple[int, int]) -> torch.Tensor:
    return to_blocks(x.reshape(math.prod(x.shape[:-1]), x.shape[-1]).float(), block_size)


def _unblocked(blocks: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    rows, cols = math.prod(like.shape[:-1]), like.shape[-1]
    padded = blocks.reshape(blocks.shape[0] * blocks.shape[1], blocks.shape[2] * blocks.shape[3])
    values = padded[:rows, :cols].reshape(like.shape).to(like.dtype)
    return values.masked_fill(torch.isnan(like), math.nan)  # casts of NaN differ from device to device


def _amax(blocks: torch.Tensor) -> torch.Tensor:
    """[M/b, 1, K/b, 1] fp32; NaN has no say."""
    size = blocks.abs()
    size = torch.where(torch.isnan(size), 0.0, size)
    return size.amax(dim=(1, 3), keepdim=True) if size.numel() else size.new_zeros(size.shape[0], 1, size.shape[2], 1)


def _power_of_two(x: torch.Tensor) -> torch.Tensor:
    """The largest power of two not above x, subnormal x too: fp64."""
    bits = x.double().view(torch.int64) & ~((1 << 52) - 1)
    return bits.view(torch.float64)


def _largest(amax: torch.Tensor) -> torch.Tensor:
    return amax.amax(dim=(0, 2), keepdim=True) if amax.numel() else amax.new_zeros(1, 1, 1, 1)


def _quotient(top: torch.Tensor, amax: torch.Tensor) -> torch.Tensor:
    """top / amax by the contract's edge cases: 1 for zero and infinity, the largest finite fp32 on overflow."""
    quotient = top / amax
    quotient = torch.where(torch.isinf(quotient), _FP32_MAX, quotient)
    return torch.where((amax == 0.0) | torch.isinf(amax), 1.0, quotient)
