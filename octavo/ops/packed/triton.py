"""Pieces of blocks quantized, summed and decoded: Triton kernels that read and write each byte once.

P pieces of N elements in B blocks of BLOCK. A tile is ROWS blocks of a piece; pieces take turns, from `first` on, so
that the links to all ranks are busy at once. Codes and scales of a piece lie `stride` behind the last one's, or where
`apart` [P] says it: bytes from the first codes, multiples of 16, into the memory of other GPUs too.
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
def _tile(tile, P, first, ROWS: tl.constexpr):
    """(piece, rows) of a tile."""
    piece = tl.full((), 0, tl.int64) + (tile + first) % P  # the interpreter's tile is Python's
    return piece, (tile // P * ROWS + tl.arange(0, ROWS)).to(tl.int64)


@triton.jit
def _piece(codes, scales, apart, piece, code_stride, scale_stride):
    """Where the codes and the scales of a piece begin."""
    if apart is None:
        at, scales_at = codes + piece * code_stride, scales + piece * scale_stride
    else:
        num_bytes = tl.load(apart + piece)
        at, scales_at = tl.multiple_of(codes + num_bytes, 16), scales + num_bytes // 4
    return at, scales_at


@triton.jit
def _decoded(codes, scales, places, rows, row_is_in):
    code = tl.load(codes + places, mask=row_is_in[:, None], other=0.0).to(tl.float32)
    return code * tl.load(scales + rows, mask=row_is_in, other=0.0)[:, None]


@triton.jit
def _sum(codes, scales, apart, begin, places, rows, row_is_in, code_stride, scale_stride, NUM: tl.constexpr):
    """NUM pieces from `begin` on, one after the other in fp32: [ROWS, BLOCK]."""
    at, scales_at = _piece(codes, scales, apart, begin, code_stride, scale_stride)
    total = _decoded(at, scales_at, places, rows, row_is_in)
    for i in range(1, NUM):
        at, scales_at = _piece(codes, scales, apart, begin + i, code_stride, scale_stride)
        total += _decoded(at, scales_at, places, rows, row_is_in)
    return total


@triton.jit
def quantize_blocks(
    codes, scales, residual, x, apart, code_stride, scale_stride, residual_stride, x_stride, N, B, P, first,
    LARGEST: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [P, N], or of x + residual, which becomes what they lack."""
    piece, rows = _tile(tl.program_id(0), P, first, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in, row_is_in = places < N, rows < B
    values = tl.load(x + piece * x_stride + places, mask=is_in, other=0.0).to(tl.float32)
    if residual is not None:
        kept = residual + piece * residual_stride + places
        values += tl.load(kept, mask=is_in, other=0.0).to(tl.float32)
    made, scale = _encode(values, LARGEST)
    at, scales_at = _piece(codes, scales, apart, piece, code_stride, scale_stride)
    tl.store(at + places, made, mask=row_is_in[:, None])
    tl.store(scales_at + rows, scale, mask=row_is_in)
    if residual is not None:
        tl.store(kept, _lost(values, made, scale).to(residual.dtype.element_ty), mask=is_in)


@triton.jit
def round_blocks(
    codes, scales, x, seed, code_stride, scale_stride, x_stride, N, B, P, start,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales of x [P, N]; element i of piece p has the random bits of place start + p * N + i."""
    piece, rows = _tile(tl.program_id(0), P, 0, ROWS)
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
    out_codes, out_scales, residual, codes, scales, apart, out_apart, code_stride, scale_stride, N, B,
    AVERAGE: tl.constexpr, LARGEST: tl.constexpr, P: tl.constexpr, NUM_OUT: tl.constexpr,
    ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Codes and scales, in NUM_OUT copies, of the sum or the mean of P pieces; what they lack is added to the residual
    [N]."""
    _, rows = _tile(tl.program_id(0), 1, 0, ROWS)
    row_is_in = rows < B
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = _sum(codes, scales, apart, 0, places, rows, row_is_in, code_stride, scale_stride, P)
    if AVERAGE:
        total = tl.div_rn(total, tl.full((ROWS, BLOCK), P, tl.float32))
    made, scale = _encode(total, LARGEST)
    for copy in tl.static_range(NUM_OUT):
        at, scales_at = _piece(out_codes, out_scales, out_apart, copy, 0, 0)
        tl.store(at + places, made, mask=row_is_in[:, None])
        tl.store(scales_at + rows, scale, mask=row_is_in)
    if residual is not None:
        lost = _lost(total, made, scale)
        if AVERAGE:
            lost = lost * P
        kept = tl.load(residual + places, mask=places < N, other=0.0).to(tl.float32) + lost
        tl.store(residual + places, kept.to(residual.dtype.element_ty), mask=places < N)


@triton.jit
def decode_blocks(
    out, codes, scales, apart, out_stride, code_stride, scale_stride, N, B, P, first,
    NUM: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """out [P, N]: each the sum of NUM pieces that follow one another."""
    piece, rows = _tile(tl.program_id(0), P, first, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    total = _sum(codes, scales, apart, piece * NUM, places, rows, rows < B, code_stride, scale_stride, NUM)
    tl.store(out + piece * out_stride + places, total.to(out.dtype.element_ty), mask=places < N)


def quantize_pieces(
    x: torch.Tensor,
    codes: torch.Tensor,
    scales: torch.Tensor,
    residual: torch.Tensor | None,
    apart: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """As ops.packed.quantize_pieces_, on a GPU.

    With `apart` the codes and scales are those of one piece.
    """
    x = _dense(x)
    largest = largest_quant_scale(SCALING, x.dtype if residual is None else torch.float32)
    stride = 0 if residual is None else residual.stride(0)
    strides = codes.stride(0), scales.stride(0), stride, x.stride(0)
    sizes = x.shape[1], codes.shape[1], len(x), first
    arguments = codes, scales, residual, x, apart, *strides, *sizes
    _launch(quantize_blocks, codes, len(x), *arguments, LARGEST=largest)


def round_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int) -> None:
    """As ops.packed.round_pieces_, on a GPU."""
    x = _dense(x)
    sizes = codes.stride(0), scales.stride(0), x.stride(0), x.shape[1], codes.shape[1], len(x)
    _launch(round_blocks, codes, len(x), codes, scales, x, seed, *sizes, start)


def requantize_pieces(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out_codes: torch.Tensor,
    out_scales: torch.Tensor,
    average: bool,
    residual: torch.Tensor | None,
    apart: torch.Tensor | None = None,
    out_apart: torch.Tensor | None = None,
) -> None:
    """As ops.packed.requantize_pieces_, on a GPU; with `apart` and `out_apart` of the pieces there, in copies there."""
    numel = 0 if residual is None else residual.shape[1]
    arguments = residual, codes, scales, apart, out_apart, codes.stride(0), scales.stride(0), numel, codes.shape[1]
    fixed: dict[str, Any] = {
        "AVERAGE": average,
        "LARGEST": largest_quant_scale(SCALING, torch.float32),
        "P": len(codes if apart is None else apart),
        "NUM_OUT": 1 if out_apart is None else len(out_apart),
    }
    _launch(requantize_blocks, codes, 1, out_codes, out_scales, *arguments, **fixed)


def decode_pieces(
    codes: torch.Tensor,
    scales: torch.Tensor,
    out: torch.Tensor,
    apart: torch.Tensor | None = None,
    first: int = 0,
) -> None:
    """As ops.packed.decode_pieces_, on a GPU; with `apart` of the pieces there."""
    num_summed = 1 if apart is not None else len(codes) // len(out)
    sizes = out.stride(0), codes.stride(0), scales.stride(0), out.shape[1], codes.shape[1], len(out), first
    arguments = out, codes, scales, apart, *sizes
    _launch(decode_blocks, codes, len(out), *arguments, NUM=num_summed)


def _launch(kernel: Any, codes: torch.Tensor, num_pieces: int, *arguments: Any, **fixed: Any) -> None:
    """Over all blocks of so many pieces; codes [_, B, 128]."""
    options = {"ROWS": ROWS, "BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
    with on_device_of(codes):
        launch_tiles = launcher_of(kernel, **fixed, **options)
        launch_tiles((triton.cdiv(codes.shape[1], ROWS) * num_pieces,), *arguments)


def _dense(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()
