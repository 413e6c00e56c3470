"""Pieces of blocks quantized, summed and decoded: Triton kernels that read and write each byte once.

P pieces of N elements in B blocks of BLOCK. A program owns ROWS blocks; grid axis 1 is the piece that is written.
Products and sums are rounded one by one as in reference.py, nothing is fused to an fma.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.scaling import largest_quant_scale
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.adamw.triton import GOLDEN, encode_first, mix_bits
from octavo.ops.packed.reference import BLOCK, SCALING

ROWS = 16  # 16 elements a thread: all moves are 16 bytes wide
NUM_WARPS = 4
_E4M3_MAX = tl.constexpr(448.0)


@triton.jit
def _encode(x, LARGEST: tl.constexpr):
    """The contract's codes and decode scale of [ROWS, BLOCK] fp32; the scale of a block that is not finite is NaN."""
    amax = tl.max(tl.where(x == x, tl.abs(x), 0.0), axis=1)
    quant_scale = tl.div_rn(_E4M3_MAX, tl.where((amax > 0.0) & (amax < float("inf")), amax, _E4M3_MAX))
    quant_scale = tl.where(quant_scale < float("inf"), quant_scale, LARGEST)
    codes = (x * quant_scale[:, None]).to(tl.float8e4nv)
    return codes, _marked(tl.div_rn(1.0, quant_scale), x)


@triton.jit
def _marked(scale, x):
    is_bad = tl.max(tl.where(tl.abs(x) < float("inf"), 0.0, 1.0), axis=1) > 0.0
    return tl.where(is_bad, float("nan"), scale)


@triton.jit
def _lost(x, codes, scale):
    """What codes lack of x, 0 where that is not finite."""
    lost = x - codes.to(tl.float32) * scale[:, None]
    return tl.where(tl.abs(lost) < float("inf"), lost, 0.0)


@triton.jit
def _sum(codes, scales, places, rows, row_is_in, code_stride, scale_stride, NUM: tl.constexpr):
    """NUM pieces, one after the other in fp32: [ROWS, BLOCK]."""
    is_in = row_is_in[:, None]
    total = tl.load(codes + places, mask=is_in, other=0.0).to(tl.float32)
    total = total * tl.load(scales + rows, mask=row_is_in, other=0.0)[:, None]
    for i in range(1, NUM):
        code = tl.load(codes + i * code_stride + places, mask=is_in, other=0.0).to(tl.float32)
        total += code * tl.load(scales + i * scale_stride + rows, mask=row_is_in, other=0.0)[:, None]
    return total


@triton.jit
def quantize_blocks(
    codes, scales, residual, x, code_stride, scale_stride, residual_stride, x_stride, N, B,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [P, N], or of x + residual, which becomes what they lack."""
    piece = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in, row_is_in = places < N, rows < B
    values = tl.load(x + piece * x_stride + places, mask=is_in, other=0.0).to(tl.float32)
    if residual is not None:
        kept = residual + piece * residual_stride + places
        values += tl.load(kept, mask=is_in, other=0.0).to(tl.float32)
    made, scale = _encode(values, LARGEST)
    tl.store(codes + piece * code_stride + places, made, mask=row_is_in[:, None])
    tl.store(scales + piece * scale_stride + rows, scale, mask=row_is_in)
    if residual is not None:
        tl.store(kept, _lost(values, made, scale).to(residual.dtype.element_ty), mask=is_in)


@triton.jit
def round_blocks(
    codes, scales, x, seed, code_stride, scale_stride, x_stride, N, B, start, ROWS: tl.constexpr, BLOCK: tl.constexpr
):
    """Codes and scales of x [P, N]; element i of piece p has the random bits of place start + p * N + i."""
    piece = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_is_in = rows < B
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    values = tl.load(x + piece * x_stride + places, mask=places < N, other=0.0).to(tl.float32)
    key = mix_bits(tl.load(seed).to(tl.uint32) + GOLDEN)
    random = mix_bits((start + piece * N + places).to(tl.uint32) ^ key)
    # what a block that is not finite is rounded to differs from device to device, and is not read
    is_finite = tl.max(tl.where(tl.abs(values) < float("inf"), 0.0, 1.0), axis=1) == 0.0
    made, scale = encode_first(tl.where(is_finite[:, None], values, 0.0), random)
    tl.store(codes + piece * code_stride + places, made, mask=row_is_in[:, None])
    tl.store(scales + piece * scale_stride + rows, _marked(scale, values), mask=row_is_in)


@triton.jit
def requantize_blocks(
    out_codes, out_scales, residual, codes, scales, code_stride, scale_stride, N, B,
    AVERAGE: tl.constexpr, LARGEST: tl.constexpr, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of the sum or the mean of P pieces; what they lack is added to the residual [N]."""
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    row_is_in = rows < B
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = _sum(codes, scales, places, rows, row_is_in, code_stride, scale_stride, P)
    if AVERAGE:
        total = tl.div_rn(total, tl.full((ROWS, BLOCK), P, tl.float32))
    made, scale = _encode(total, LARGEST)
    tl.store(out_codes + places, made, mask=row_is_in[:, None])
    tl.store(out_scales + rows, scale, mask=row_is_in)
    if residual is not None:
        lost = _lost(total, made, scale)
        if AVERAGE:
            lost = lost * P
        kept = tl.load(residual + places, mask=places < N, other=0.0).to(tl.float32) + lost
        tl.store(residual + places, kept.to(residual.dtype.element_ty), mask=places < N)


@triton.jit
def decode_blocks(
    out, codes, scales, out_stride, code_stride, scale_stride, N, B,
    NUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [pieces, N]: each the sum of NUM pieces that follow one another."""
    piece = tl.program_id(1).to(tl.int64)
    rows = tl.program_id(0).to(tl.int64) * ROWS + tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    codes += piece * NUM * code_stride
    scales += piece * NUM * scale_stride
    total = _sum(codes, scales, places, rows, rows < B, code_stride, scale_stride, NUM)
    tl.store(out + piece * out_stride + places, total.to(out.dtype.element_ty), mask=places < N)


def quantize_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, residual: torch.Tensor | None) -> None:
    """As ops.packed.quantize_pieces_, on a GPU."""
    x = _dense(x)
    largest = largest_quant_scale(SCALING, x.dtype if residual is None else torch.float32)
    stride = 0 if residual is None else residual.stride(0)
    strides = codes.stride(0), scales.stride(0), stride, x.stride(0)
    _launch(quantize_blocks, codes, codes, scales, residual, x, *strides, x.shape[1], codes.shape[1], LARGEST=largest)


def round_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int) -> None:
    """As ops.packed.round_pieces_, on a GPU."""
    x = _dense(x)
    strides = codes.stride(0), scales.stride(0), x.stride(0)
    _launch(round_blocks, codes, codes, scales, x, seed, *strides, x.shape[1], codes.shape[1], start)


def requantize_pieces(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_codes: torch.Tensor,
    out_scales: torch.Tensor,
    average: bool,
    residual: torch.Tensor | None,
) -> None:
    """As ops.packed.requantize_pieces_, on a GPU."""
    numel = 0 if residual is None else residual.shape[1]
    sizes = codes.stride(0), scales.stride(0), numel, codes.shape[1]
    fixed = {"AVERAGE": average, "LARGEST": largest_quant_scale(SCALING, torch.float32), "P": len(codes)}
    _launch(requantize_blocks, out_codes, out_codes, out_scales, residual, codes, scales, *sizes, **fixed)


def decode_pieces(codes: torch.Tensor, scales: torch.Tensor, out: torch.Tensor) -> None:
    """As ops.packed.decode_pieces_, on a GPU."""
    num_summed = len(codes) // len(out)
    sizes = out.stride(0), codes.stride(0), scales.stride(0), out.shape[1], codes.shape[1]
    _launch(decode_blocks, codes[::num_summed], out, codes, scales, *sizes, NUM=num_summed)


def _launch(kernel: Any, written: torch.Tensor, *arguments: Any, **fixed: Any) -> None:
    """Over all blocks of the pieces [P, B, 128] that are written."""
    with on_device_of(written):
        options = {"ROWS": ROWS, "BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        launch = launcher_of(kernel, **fixed, **options)
        launch((triton.cdiv(written.shape[1], ROWS), len(written)), *arguments)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
