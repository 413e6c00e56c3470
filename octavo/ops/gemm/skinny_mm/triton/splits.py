"""What GEMMs for few tokens share: scales, their end, and ranges of K that have a program each.

The last program of a tile to arrive adds the ranges in their order, so that the bits do not depend on who was last.
"""

import functools
from typing import Any, NamedTuple

import torch
import triton
import triton.language as tl

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.arrivals import arrivals_of

BLOCK_K = 128  # summed by the matrix units, then added in fp32, with the blocks' scales where there are any
PROGRAMS = 132  # one an SM


class Scales(NamedTuple):
    """Scales of two operands, as kernels take them.

    Attributes:
        tensors: a's [K / 128, M] or [M, 1], b's.
        strides: of their first dims, 0 where the scales are no blocks'.
        kind: the kernel's constants IS_BLOCK and IS_TENSOR, the latter of b.
    """

    tensors: tuple[torch.Tensor, torch.Tensor]
    strides: tuple[int, int]
    kind: dict[str, Any]

    @classmethod
    def of(cls, a: QuantizedTensor, b: QuantizedTensor) -> "Scales":
        is_block = a.scaling.kind == "block_1x128"
        a_scale = a.scale.t().contiguous() if is_block else a.scale  # no copy, as quantize lays it out
        strides = (a.shape[0], b.scale.stride(0)) if is_block else (0, 0)
        return cls((a_scale, b.scale), strides, {"IS_BLOCK": is_block, "IS_TENSOR": b.scaling.is_per_tensor})


@triton.jit
def leave_part(parts, arrivals, acc, tile, split, num_splits):
    """Leave the sum over one range; whether others of the tile are still to come."""
    inside = tl.arange(0, acc.shape[0])[:, None] * acc.shape[1] + tl.arange(0, acc.shape[1])[None, :]
    places = (tile * num_splits + split).to(tl.int64) * (acc.shape[0] * acc.shape[1])
    tl.store(parts + places + inside, acc)
    tl.debug_barrier()  # every thread's part is written before the program reports itself
    return tl.atomic_add(arrivals + tile, 1, sem="acq_rel") < num_splits - 1


@triton.jit
def add_parts(parts, arrivals, tile, num_splits, ROWS: tl.constexpr, COLS: tl.constexpr):
    """The sum [ROWS, COLS] of a tile's ranges, by the program that came last."""
    tl.debug_barrier()
    tl.store(arrivals + tile, 0)  # as the next call wants it
    inside = tl.arange(0, ROWS)[:, None] * COLS + tl.arange(0, COLS)[None, :]
    acc = tl.zeros([ROWS, COLS], tl.float32)
    places = parts + (tile * num_splits).to(tl.int64) * (ROWS * COLS) + inside
    for split in range(0, num_splits, 2):  # two are fetched at once, and added one after the other
        part = tl.load(places + split * (ROWS * COLS), cache_modifier=".cg")
        has_next = split + 1 < num_splits
        next_part = tl.load(places + (split + 1) * (ROWS * COLS), mask=has_next, other=0.0, cache_modifier=".cg")
        acc = acc + part + next_part
    return acc


@triton.jit
def store_product(out, acc, a_scale, b_scale, bias, m, n, M, N, IS_BLOCK: tl.constexpr, IS_TENSOR: tl.constexpr):
    """Store a tile of sums with what is left to do, scales a row and the bias; m and n lie along the sides of acc."""
    if not IS_BLOCK:
        weight_scale = tl.load(b_scale) if IS_TENSOR else tl.load(b_scale + n, mask=n < N, other=0.0)
        acc = acc * weight_scale * tl.load(a_scale + m, mask=m < M, other=0.0)  # as the library does
    if bias is not None:
        acc += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)
    tl.store(out + m.to(tl.int64) * N + n, acc.to(out.dtype.element_ty), mask=(m < M) & (n < N))


@functools.lru_cache(maxsize=1024)
def split_of(wanted: int, slabs: int, unroll: int) -> tuple[int, int]:
    """(ranges of K, slabs of 128 in each, a multiple of unroll), for as many ranges as are wanted or fewer."""
    wanted = max(1, min(slabs // unroll, wanted))
    each = -(-slabs // (wanted * unroll)) * unroll
    return -(-slabs // each), each


def new_parts(
    device: torch.device, tiles: int, splits: int, elements: int
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Room for the ranges' sums of tiles of so many elements, and counters; None where there is one range."""
    if splits == 1:
        return None, None
    assert tiles <= PROGRAMS, "K is split where there are fewer tiles than multiprocessors"
    return torch.empty(tiles * splits * elements, dtype=torch.float32, device=device), arrivals_of(device, PROGRAMS)
