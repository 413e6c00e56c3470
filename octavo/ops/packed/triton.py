"""Pieces of blocks decoded, summed and rounded: Triton kernels that read and write each byte once.

P pieces of B blocks of BLOCK elements. A program owns ROWS blocks; grid axis 1 is the piece that is written. Products
and sums are rounded one by one as in reference.py, nothing is fused to an fma.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.adamw.triton import GOLDEN, encode_first, mix_bits
from octavo.ops.packed.reference import BLOCK

ROWS = 32
NUM_WARPS = 4


@triton.jit
def decode_blocks(out, codes, scales, code_stride, scale_stride, B, P: tl.constexpr, ROWS: tl.constexpr, BLOCK: tl.constexpr):  # fmt: skip  # noqa: E501
    """out [pieces, B, BLOCK]: each the sum of P pieces of the input that follow one another."""
    piece = tl.program_id(1).to(tl.int64)
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    rows = first_row + tl.arange(0, ROWS)
    row_is_in = rows < B
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]
    is_in = row_is_in[:, None]
    code = tl.load(codes + piece * P * code_stride + places, mask=is_in, other=0.0).to(tl.float32)
    total = code * tl.load(scales + piece * P * scale_stride + rows, mask=row_is_in, other=0.0)[:, None]
    for i in range(1, P):
        source = piece * P + i
        code = tl.load(codes + source * code_stride + places, mask=is_in, other=0.0).to(tl.float32)
        total += code * tl.load(scales + source * scale_stride + rows, mask=row_is_in, other=0.0)[:, None]
    tl.store(out + piece * B * BLOCK + places, total.to(out.dtype.element_ty), mask=is_in)


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
    rounded, scale = encode_first(values, random)
    is_bad = tl.max(tl.where(tl.abs(values) < float("inf"), 0.0, 1.0), axis=1) > 0.0
    scale = tl.where(is_bad, float("nan"), scale)
    tl.store(codes + piece * code_stride + places, rounded, mask=row_is_in[:, None])
    tl.store(scales + piece * scale_stride + rows, scale, mask=row_is_in)


def decode_pieces(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """As ops.packed.decode_pieces, on a GPU."""
    return _decode(codes, scales, dtype, len(codes))


def sum_pieces(codes: torch.Tensor, scales: torch.Tensor) -> torch.Tensor:
    """As ops.packed.sum_pieces, on a GPU."""
    return _decode(codes, scales, torch.float32, 1)


def _decode(codes: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, num_pieces: int) -> torch.Tensor:
    num_summed, num_blocks = len(codes) // num_pieces, codes.shape[1]
    out = torch.empty(num_pieces * num_blocks * BLOCK, dtype=dtype, device=codes.device)
    if out.numel():
        with on_device_of(codes):
            launch = launcher_of(
                decode_blocks, P=num_summed, ROWS=ROWS, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False
            )
            grid = (triton.cdiv(num_blocks, ROWS), num_pieces)
            launch(grid, out, codes, scales, codes.stride(0), scales.stride(0), num_blocks)
    return out


def round_pieces(x: torch.Tensor, codes: torch.Tensor, scales: torch.Tensor, seed: torch.Tensor, start: int) -> None:
    """As ops.packed.round_pieces_, on a GPU."""
    x = x if x.stride(1) == 1 else x.contiguous()
    num_pieces, num_blocks, _ = codes.shape
    with on_device_of(x):
        launch = launcher_of(round_blocks, ROWS=ROWS, BLOCK=BLOCK, num_warps=NUM_WARPS, enable_fp_fusion=False)
        strides = codes.stride(0), scales.stride(0), x.stride(0)
        grid = (triton.cdiv(num_blocks, ROWS), num_pieces)
        launch(grid, codes, scales, x, seed, *strides, x.shape[1], num_blocks, start)
