"""Pushing: rows of a matrix of 4-byte words, or for each rank its own share of them, to a place in the ranks' memory.

T rows, W words of a row, G ranks, R rows of a rank's share. A program copies a BLOCK_T x BLOCK_W tile to one rank.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.one_shot.triton import base_of

TILES = ((8, 512), (64, 64))  # BLOCK_T, BLOCK_W: of wide rows, of narrow ones
NUM_WARPS = 8
SUM_BLOCK = 2048


@triton.jit
def push_rows(
    x, addresses, stride_xt, stride_out, first_word, rank, T, W, R, G: tl.constexpr, IS_DEALT: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_W: tl.constexpr,
):  # fmt: skip
    """Word w of row t goes to first_word + t * stride_out + w; where dealt, t counts from the rank's first row."""
    peer = (rank + 1 + tl.program_id(1)) % G  # each begins with another one
    num_tiles_w = tl.cdiv(W, BLOCK_W)
    pid = tl.program_id(0)
    first_row = peer * R if IS_DEALT else 0
    num_rows = tl.minimum(T - first_row, R) if IS_DEALT else T
    rows = pid // num_tiles_w * BLOCK_T + tl.arange(0, BLOCK_T)
    cols = pid % num_tiles_w * BLOCK_W + tl.arange(0, BLOCK_W)
    is_in = (rows < num_rows)[:, None] & (cols < W)[None, :]
    places = x + (first_row + rows).to(tl.int64)[:, None] * stride_xt + cols[None, :]
    words = tl.load(places, mask=is_in, other=0)
    out = base_of(addresses, peer, tl.int32) + first_word
    tl.store(out + rows.to(tl.int64)[:, None] * stride_out + cols[None, :], words, mask=is_in)


@triton.jit
def sum_parts(out, parts, stride, N, G: tl.constexpr, BLOCK: tl.constexpr):
    """out [N]: the sum of G parts, so many elements apart, in fp32 in their order."""
    index = tl.program_id(0).to(tl.int64) * BLOCK + tl.arange(0, BLOCK)
    is_in = index < N
    total = tl.zeros((BLOCK,), tl.float32)
    for part in tl.static_range(G):
        total += tl.load(parts + part * stride + index, mask=is_in, other=0.0).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=is_in)


def add(parts: torch.Tensor) -> torch.Tensor:
    """The sum of parts [G, rows, K], each of contiguous rows, in fp32 in their order -> [rows, K] of their dtype."""
    out = torch.empty_like(parts[0], memory_format=torch.contiguous_format)
    if out.numel():
        with on_device_of(out):
            run = launcher_of(sum_parts, G=len(parts), BLOCK=SUM_BLOCK, num_warps=NUM_WARPS // 2)
            run((triton.cdiv(out.numel(), SUM_BLOCK),), out, parts, parts.stride(0), out.numel())
    return out


def push(
    x: torch.Tensor,
    addresses: torch.Tensor,
    rank: int,
    *,
    stride_out: int,
    first_word: int,
    share: int | None = None,
) -> None:
    """Write x into every rank's memory, or into each its share of the rows.

    Args:
        x: [T, W] int32, contiguous rows.
        addresses: [ranks] int64, where each rank's memory begins, a multiple of 16.
        rank: this one.
        stride_out: words between rows there.
        first_word: of the first row there.
        share: rows of a rank, whose first one is the first row there; None for all rows to all ranks.
    """
    (T, W), world = x.shape, len(addresses)
    if not T * W:
        return
    block_t, block_w = TILES[TILES[1][1] >= W]
    tiles = triton.cdiv(T if share is None else share, block_t) * triton.cdiv(W, block_w)
    with on_device_of(x):
        run = launcher_of(
            push_rows, G=world, IS_DEALT=share is not None, BLOCK_T=block_t, BLOCK_W=block_w,
            num_warps=NUM_WARPS,
        )  # fmt: skip
        run((tiles, world), x, addresses, x.stride(0), stride_out, first_word, rank, T, W, share or T)
