"""Triton: the bias of a product that the library's GEMM cannot add, in one pass. Legend: M tokens, N out."""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.activation.swiglu.triton import first_of_tile, is_inside, load_tile, store_tile

# BLOCK_M, BLOCK_N, num_warps: 8 elements a thread, two 16-byte loads of fp32 and one such store of 16 bits each.
TILE = (4, 512, 8)


@triton.jit
def bias_tiles(out, x, bias, stride_x, M, N, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr):
    """out [M, N] = x + bias in fp32, rounded once."""
    m, n = first_of_tile(N, BLOCK_M, BLOCK_N)
    is_in = is_inside(m, n, M, N, BLOCK_M, BLOCK_N)
    cols = n + tl.arange(0, BLOCK_N)
    addend = tl.load(bias + cols, mask=cols < N, other=0.0).to(tl.float32)
    values = load_tile(x, stride_x, m, n, is_in, BLOCK_M, BLOCK_N) + addend[None, :]
    store_tile(out, N, m, n, values, is_in, BLOCK_M, BLOCK_N)


def add_bias(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> torch.Tensor:
    """x + bias in fp32, rounded once.

    Args:
        x: [M, N] fp32 on a GPU, each row contiguous; rows of a cut matrix lie further apart than N.
        bias: [N].
    Returns:
        [M, N] of out_dtype, contiguous; the bits of (x + bias.float()).to(out_dtype).
    """
    M, N = x.shape
    out = torch.empty(M, N, dtype=out_dtype, device=x.device)
    if out.numel():
        block_m, block_n, num_warps = TILE
        grid = (triton.cdiv(M, block_m) * triton.cdiv(N, block_n),)
        with on_device_of(out):
            launch = launcher_of(bias_tiles, BLOCK_M=block_m, BLOCK_N=block_n, num_warps=num_warps)
            launch(grid, out, x, bias.contiguous(), x.stride(0), M, N)
    return out
