"""Triton MXFP8 and NVFP4 by emulation: x to its format and back in one read and one write, bit-equal to reference.py.

The random Hadamard transform that NVFP4 takes before it is a kernel of its own, in hadamard.py.

x lies in memory as [R, C] with C contiguous: either x itself or its transpose, and so does the result. A block is
BLOCK_R x BLOCK_C there; a program owns NUM blocks, WIDE of them side by side, as values [BLOCK_R, NUM, BLOCK_C].
Values are rounded in fp32 and scaled by powers of two made from bits: no FP8 cast, no fp64.
"""

import functools
import math
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.emulated import E2M1_MAX, MX_BLOCK, NVFP4_BLOCK
from octavo.numerics.emulated_config import ScaleRounding
from octavo.numerics.formats import E4M3, format_of
from octavo.numerics.infinity import infinity_flag
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.adamw.triton import GOLDEN, mix_bits
from octavo.ops.quantize.triton.casts import round_to, widen
from octavo.ops.quantize.triton.device import fold_amax, note_infinite

_E2M1_MAX = tl.constexpr(E2M1_MAX)
_LARGEST_CODES = tl.constexpr(E2M1_MAX * E4M3.max)
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)
# Mantissa bits, exponent of the smallest normal value and of the largest one, largest value.
_E4M3 = tl.constexpr((3, -6, 8, 448.0))
_E2M1 = (1, 0, 2, E2M1_MAX)

ELEMENTS = 4096  # a program's
WARP_BYTES = 32 * 64  # that a warp of it holds: four loads of 16 bytes a thread
ROW_PIECE = 128  # columns of a tile whose blocks lie within rows
AMAX_CHUNKS = 8  # of ELEMENTS that a program of the first pass reads one after the other


@triton.jit
def round_to_format(size, FORMAT: tl.constexpr, noise):
    """Sizes >= 0 to the format's values: the nearest, ties to even, or by noise in [0, 1); saturating. NaN: any."""
    size = tl.minimum(size, FORMAT[3])
    exponent = tl.maximum(size.to(tl.int32, bitcast=True) & 0x7F800000, (FORMAT[1] + 127) << 23)
    if noise is None:
        # Around 2**(exponent + 23 - mantissa bits) fp32 has the format's spacing.
        shift = (exponent + ((23 - FORMAT[0]) << 23)).to(tl.float32, bitcast=True)
        rounded = (size + shift) - shift
    else:
        spacing = exponent - (FORMAT[0] << 23)
        inverse = ((254 << 23) - spacing).to(tl.float32, bitcast=True)
        steps = (size * inverse + noise).to(tl.int32)
        rounded = steps.to(tl.float32) * spacing.to(tl.float32, bitcast=True)
    return rounded


@triton.jit
def mxfp8_scales(amax, FORMAT: tl.constexpr, ROUNDS_UP: tl.constexpr):
    """(encoding, decoding) scale of each amax: 2**-e and 2**e, e at least -127.

    e = floor(log2(amax)) - emax, or, rounded up, ceil(log2(amax / largest)).
    """
    bits = amax.to(tl.int32, bitcast=True)
    exponent = bits >> 23  # biased; a subnormal amax, here 0, ends at e = -127 either way
    if ROUNDS_UP:
        exponent += ((bits & 0x7FFFFF) > 0x600000).to(tl.int32)  # above 1.75, the largest value's mantissa
    biased = tl.maximum(exponent - FORMAT[2], 0)
    biased = tl.where((bits == 0) | (bits == 0x7F800000), 127, biased)
    encode = ((254 - biased) << 23).to(tl.float32, bitcast=True)
    decode = tl.where(biased == 0, 0x00400000, biased << 23).to(tl.float32, bitcast=True)  # 2**-127 is subnormal
    return encode, decode


@triton.jit
def nvfp4_scales(amax, tensor_amax):
    """(encoding, decoding) scale of each block's amax beside the tensor's."""
    quant_scale = tl.minimum(tl.div_rn(_LARGEST_CODES, tensor_amax), _FP32_MAX)
    quant_scale = tl.where((tensor_amax > 0.0) & (tensor_amax < float("inf")), quant_scale, 1.0)
    block_scale = round_to_format(tl.div_rn(amax, _E2M1_MAX) * quant_scale, _E4M3, None)
    decode = block_scale * tl.div_rn(1.0, quant_scale)
    encode = tl.where(decode > 0.0, tl.minimum(tl.div_rn(1.0, decode), _FP32_MAX), 0.0)
    return encode, decode


@triton.jit
def uniform_at(places, seed):
    """Multiples of 2**-20 in [0, 1) by place (uint32) and seed: octavo.numerics.stochastic.random_bits."""
    bits = mix_bits(places ^ mix_bits(tl.cast(seed, tl.uint32) + GOLDEN))
    return (bits >> 12).to(tl.int32).to(tl.float32) * 2.0**-20


@triton.jit
def store_rounded(out, offsets, values, is_nan, is_in):
    """Store fp32 values in out's dtype, NaN as the quiet one, whose bits a GPU's casts do not give."""
    DTYPE: tl.constexpr = out.dtype.element_ty
    if tl.float16 == DTYPE:
        bits = tl.where(is_nan, 0x7E00, values.to(DTYPE).to(tl.int16, bitcast=True))
        tl.store(out.to(tl.pointer_type(tl.int16)) + offsets, bits.to(tl.int16), mask=is_in)
    else:
        bits = tl.where(is_nan, 0x7FC00000, round_to(values, DTYPE).to(tl.int32, bitcast=True))
        if tl.bfloat16 == DTYPE:
            tl.store(out.to(tl.pointer_type(tl.int16)) + offsets, (bits >> 16).to(tl.int16), mask=is_in)
        else:
            tl.store(out.to(tl.pointer_type(tl.int32)) + offsets, bits, mask=is_in)


@triton.jit
def fake_quantize_tiles(
    out, infinite, x, whole, seed, R, C, place_r, place_c, FORMAT: tl.constexpr, ROUNDS_UP: tl.constexpr,
    BLOCK_R: tl.constexpr, BLOCK_C: tl.constexpr, NUM: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """One tile of blocks: MXFP8, or NVFP4 where what scan_all found is given; by noise where a seed is.

    ROUNDS_UP: MXFP8's scales, so that nothing saturates.
    place_r and place_c: what a row and a column in memory add to an element's place in x.
    """
    tiles_c = tl.cdiv(C, WIDE * BLOCK_C)
    first_r = (tl.program_id(0) // tiles_c).to(tl.int64) * (NUM // WIDE * BLOCK_R)
    first_c = (tl.program_id(0) % tiles_c).to(tl.int64) * (WIDE * BLOCK_C)
    block = tl.arange(0, NUM)
    r = (block // WIDE * BLOCK_R)[None, :, None] + tl.arange(0, BLOCK_R)[:, None, None]
    c = (block % WIDE * BLOCK_C)[None, :, None] + tl.arange(0, BLOCK_C)[None, None, :]
    left_r = tl.minimum(R - first_r, NUM // WIDE * BLOCK_R).to(tl.int32)
    left_c = tl.minimum(C - first_c, WIDE * BLOCK_C).to(tl.int32)
    is_in = (r < left_r) & (c < left_c)
    offsets = (first_r * C + first_c) + (r.to(tl.int64) * C + c)
    values = widen(tl.load(x + offsets, mask=is_in, other=0.0))  # [BLOCK_R, NUM, BLOCK_C]
    size = tl.where(values == values, tl.abs(values), 0.0)
    block_amax = tl.max(tl.max(size, axis=2), axis=0)  # [NUM]
    note_infinite(infinite, block_amax)
    if whole is None:
        encode, decode = mxfp8_scales(block_amax, FORMAT, ROUNDS_UP)
    else:
        encode, decode = nvfp4_scales(block_amax, tl.load(whole).to(tl.float32, bitcast=True))
    noise = None
    if seed is not None:
        rows = (first_r.to(tl.uint32) + r.to(tl.uint32)) * tl.cast(place_r, tl.uint32)
        columns = (first_c.to(tl.uint32) + c.to(tl.uint32)) * tl.cast(place_c, tl.uint32)
        noise = uniform_at(rows + columns, tl.cast(seed, tl.uint32) + tl.load(whole + 1).to(tl.uint32, bitcast=True))
    size = round_to_format(tl.abs(values) * encode[None, :, None], FORMAT, noise) * decode[None, :, None]
    signed = size.to(tl.int32, bitcast=True) | (values.to(tl.int32, bitcast=True) & -0x80000000)
    store_rounded(out, offsets, signed.to(tl.float32, bitcast=True), values != values, is_in)


@triton.jit
def scan_all(whole, x, num, HASH: tl.constexpr, BLOCK: tl.constexpr, CHUNKS: tl.constexpr):
    """Fold max|x| over num consecutive elements into whole[0], an fp32's bits, and with HASH their hash into whole[1].

    Sums of integers come out the same in any order, so that the hash does not depend on which program ends first.
    """
    first = tl.program_id(0).to(tl.int64) * (BLOCK * CHUNKS)
    left = tl.minimum(num - first, BLOCK * CHUNKS).to(tl.int32)
    size = tl.zeros([BLOCK], tl.float32)
    mixed = tl.zeros([BLOCK], tl.uint32)
    for i in range(0, left, BLOCK):
        place = i + tl.arange(0, BLOCK)
        values = widen(tl.load(x + first + place, mask=place < left, other=0.0))
        values = tl.where(values == values, values, 0.0)
        size = tl.maximum(size, tl.abs(values))
        if HASH:
            mixed += mix_bits(values.to(tl.uint32, bitcast=True))
    fold_amax(whole, tl.max(size, axis=0), None)
    if HASH:
        tl.atomic_add(whole + 1, tl.sum(mixed, axis=0).to(tl.int32, bitcast=True), sem="relaxed")


def mxfp8(x: torch.Tensor, dtype: torch.dtype, scale_rounding: ScaleRounding = "up") -> torch.Tensor:
    """What MXFP8 leaves of x [M, K] (fp32, bf16 or fp16, on a GPU), in its dtype and, where it is dense, its strides.

    Args:
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_rounding: "up" or "down".
    """
    return _fake_quantize(x, (1, MX_BLOCK), _facts(dtype), rounds_up=scale_rounding == "up")


def nvfp4(x: torch.Tensor, square_blocks: bool = False, stochastic_seed: int | None = None) -> torch.Tensor:
    """What NVFP4 leaves of x, as mxfp8; two launches, for a block's scale depends on all of x."""
    block = (NVFP4_BLOCK if square_blocks else 1, NVFP4_BLOCK)
    seed = None if stochastic_seed is None else (stochastic_seed + 2**31) % 2**32 - 2**31  # an int32 of its low bits
    return _fake_quantize(x, block, _E2M1, has_tensor_scale=True, seed=seed)


@functools.cache
def _facts(dtype: torch.dtype) -> tuple[int, int, int, float]:
    """An FP8 format as round_to_format takes it."""
    fmt = format_of(dtype)
    return fmt.mantissa_bits, int(math.log2(fmt.min_normal)), int(math.log2(fmt.max)), fmt.max


@functools.cache
def _tile(block: tuple[int, int]) -> dict[str, int]:
    """The kernel's constants for a block as it lies in memory."""
    num = ELEMENTS // (block[0] * block[1])
    wide = ROW_PIECE // block[1] if block[0] == 1 else num
    return {"BLOCK_R": block[0], "BLOCK_C": block[1], "NUM": num, "WIDE": wide}


def _fake_quantize(
    x: torch.Tensor,
    block: tuple[int, int],
    number_format: tuple[Any, ...],
    *,
    rounds_up: bool = False,
    has_tensor_scale: bool = False,
    seed: int | None = None,
) -> torch.Tensor:
    out = torch.empty_like(x)  # dense, whatever x is
    if not x.numel():
        return out
    if not (x.is_contiguous() or x.t().is_contiguous()):
        x = torch.empty_like(x).copy_(x)
    M, K = x.shape
    is_row_major = x.is_contiguous()
    R, C = (M, K) if is_row_major else (K, M)
    places = (K, 1) if is_row_major else (1, K)
    tile = _tile(block if is_row_major else block[::-1])
    with on_device_of(x):
        whole = _scan(x, hashes=seed is not None) if has_tensor_scale else None
        options = {"num_warps": _num_warps(x), "enable_fp_fusion": False}
        launch = launcher_of(fake_quantize_tiles, FORMAT=number_format, ROUNDS_UP=rounds_up, **tile, **options)
        high, wide = tile["NUM"] // tile["WIDE"] * tile["BLOCK_R"], tile["WIDE"] * tile["BLOCK_C"]
        grid = (triton.cdiv(R, high) * triton.cdiv(C, wide),)
        launch(grid, out, infinity_flag(x.device), x, whole, seed, R, C, *places)
    return out


def _scan(x: torch.Tensor, *, hashes: bool) -> torch.Tensor:
    """[the bits of max|x|, the sum of hashed values or 0], NaN dropped, of a dense x in any order: int32."""
    whole = torch.zeros(2, dtype=torch.int32, device=x.device)
    launch = launcher_of(scan_all, HASH=hashes, BLOCK=ELEMENTS, CHUNKS=AMAX_CHUNKS, num_warps=_num_warps(x))
    launch((triton.cdiv(x.numel(), ELEMENTS * AMAX_CHUNKS),), whole, x, x.numel())
    return whole


def _num_warps(x: torch.Tensor) -> int:
    return ELEMENTS * x.element_size() // WARP_BYTES
