"""Transposes a matrix of bytes, a square tile a program.

M rows, K columns of the source, B side of a tile.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of

BLOCK = 128


@triton.jit
def transpose_tiles(out, codes, M, K, BLOCK: tl.constexpr):
    tiles_k = tl.cdiv(K, BLOCK)
    first_m = (tl.program_id(0) // tiles_k).to(tl.int64) * BLOCK
    first_k = (tl.program_id(0) % tiles_k).to(tl.int64) * BLOCK
    m = first_m + tl.arange(0, BLOCK)
    k = first_k + tl.arange(0, BLOCK)
    tile = tl.load(codes + m[:, None] * K + k[None, :], mask=(m < M)[:, None] & (k < K)[None, :])  # [B, B]
    tl.store(out + k[:, None] * M + m[None, :], tl.trans(tile), mask=(k < K)[:, None] & (m < M)[None, :])


def transpose(codes: torch.Tensor, after: torch.Tensor | None) -> torch.Tensor:
    """codes [M, K] uint8 -> [K, M]; see octavo.ops.quantize.transpose.transpose_codes."""
    rows, cols = codes.shape
    out = codes.new_empty((cols, rows))
    grid = (triton.cdiv(rows, BLOCK) * triton.cdiv(cols, BLOCK), 1, 1)
    if grid[0]:
        with on_device_of(codes):
            launcher_of(transpose_tiles, BLOCK=BLOCK, num_warps=8)(grid, out, codes, rows, cols)
    return out
