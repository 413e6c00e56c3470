"""Triton 16-bit GEMM whose rows do not depend on one another: one walk over K for every M, no split of it.

A program owns a BLOCK_M x BLOCK_N tile and sums over K in steps of BLOCK_K, in the order of K, in fp32. Tiles of 64
rows serve small M and tiles of 128 the rest; both run the same MMA instruction (64 x BLOCK_N), so that a row's bits are
the same in either. Legend: x [M, K], weight [N, K], out [M, N].
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of


class HpTile(NamedTuple):
    """A program's tile, warps, and stages of its loads."""

    block_m: int
    block_n: int
    block_k: int
    num_warps: int
    stages: int


SMALL = HpTile(64, 128, 64, 4, 5)
LARGE = HpTile(128, 128, 64, 4, 4)
GROUP_M = 8  # tiles of rows that run side by side over the same columns, for the L2 cache


@triton.jit
def mm_tiles(
    out, x, weight, bias, stride_x, stride_w, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """One tile of out = x @ weight.t() + bias."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // in_group
    rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + tl.program_id(0) % in_group % rows_in_group
    tile_n = tl.program_id(0) % in_group // rows_in_group
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one: their results are not stored, and no load needs a mask along them.
    x_rows = x + tl.minimum(m, M - 1).to(tl.int64)[:, None] * stride_x
    w_rows = weight + tl.minimum(n, N - 1).to(tl.int64)[:, None] * stride_w
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        is_k = (k < K - start)[None, :]
        a = tl.load(x_rows + start + k[None, :], mask=is_k, other=0.0)
        b = tl.load(w_rows + start + k[None, :], mask=is_k, other=0.0)
        acc = tl.dot(a, tl.trans(b), acc)
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    places = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(places, acc.to(out.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])


def can_run(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether the kernel takes these: 16 bits, rows contiguous."""
    return x.element_size() == 2 and weight.dtype == x.dtype and 0 not in (*x.shape, *weight.shape)


def hp_mm_exact(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x @ weight.t() + bias for what can_run accepts: [M, N] of out_dtype, rounded once from fp32."""
    x, weight = (t if t.stride(1) == 1 else t.contiguous() for t in (x, weight))
    M, K = x.shape
    N = weight.shape[0]
    out = torch.empty(M, N, dtype=out_dtype, device=x.device)
    tile = SMALL if SMALL.block_m >= M else LARGE
    grid = (triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)
    with on_device_of(x):
        launch = launcher_of(
            mm_tiles, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=GROUP_M,
            STAGES=tile.stages, num_warps=tile.num_warps,
        )  # fmt: skip
        launch(grid, out, x, weight, bias, x.stride(0), weight.stride(0), M, N, K)
    return out
