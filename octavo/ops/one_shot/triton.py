"""One-shot exchanges: a program pushes its part of the message to all ranks, waits for theirs, and writes the result.

G ranks, N elements of a message, W elements of a row, S of what follows the rows. A program has BLOCK elements of the
message, a region of its own for each rank and of two turns (staging: [2, G, MOST, REGION_BYTES] on each rank), and a
flag of each rank (flags: [G, MOST] int32), which counts its turns. So programs never touch what another one uses, and a
rank that is a turn ahead writes into the other turn's region: it cannot be two ahead, since a turn ends with all flags.
Counters live on the GPU, so that a CUDA graph can replay a launch. All programs of a launch must run at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.quantize.triton.casts import round_to

MIN_BLOCK = 1024  # elements: 2 to 4 KiB, which a program moves in a few hundred nanoseconds
REGION_BYTES = 16 << 10
MOST = 256  # programs: two on each of an H100's 132 multiprocessors
NUM_WARPS = 4
_REGION_BITS, _MOST = tl.constexpr(8 * REGION_BYTES), tl.constexpr(MOST)


@triton.jit
def _region(turn, peer, program, G: tl.constexpr, BITS: tl.constexpr):
    """Elements of so many bits from the beginning of a rank's staging to a region of it."""
    return ((turn * G + peer) * _MOST + program) * (_REGION_BITS // BITS)


@triton.jit
def _send(staging, values, turn, rank, program, offsets, is_in, G: tl.constexpr):
    """Write this program's values into its region on every rank."""
    place = _region(turn, rank, program, G, values.dtype.primitive_bitwidth)
    for peer in tl.static_range(G):
        base = tl.load(staging + peer).to(tl.pointer_type(values.dtype))
        tl.store(base + place + offsets, values, mask=is_in)


@triton.jit
def _meet(flags, rank, program, count, G: tl.constexpr):
    """Tell every rank that this program has written for the count-th time, and wait until all have."""
    tl.debug_barrier()  # the writes of all threads come before the flag that one of them sets
    for peer in tl.static_range(G):
        theirs = tl.load(flags + peer).to(tl.pointer_type(tl.int32))
        tl.atomic_xchg(theirs + rank * _MOST + program, count, sem="release", scope="sys")
    own = tl.load(flags + rank).to(tl.pointer_type(tl.int32))
    for peer in tl.static_range(G):
        seen = tl.atomic_add(own + peer * _MOST + program, 0, sem="acquire", scope="sys")
        while seen - count < 0:  # by difference: the count wraps around
            seen = tl.atomic_add(own + peer * _MOST + program, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def gather_columns(
    out, out_rest, x, rest, staging, flags, counters, rank, N, W, S, G: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """out [N / W, G * W] of every rank's x [N / W, W], and out_rest [G, S] of their rest [S]; of 4 or 2 bytes."""
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    offsets = tl.arange(0, BLOCK)
    index = program * BLOCK + offsets
    is_row = index < N
    is_rest = (index >= N) & (index < N + S)
    values = tl.load(x + index, mask=is_row, other=0)
    if rest is not None:
        values = tl.where(is_row, values, tl.load(rest + (index - N), mask=is_rest, other=0))
    _send(staging, values, turn, rank, program, offsets, index < N + S, G)
    _meet(flags, rank, program, count, G)
    own = tl.load(staging + rank).to(tl.pointer_type(values.dtype))
    row, column = index // W, index % W
    for peer in tl.static_range(G):
        place = _region(turn, peer, program, G, values.dtype.primitive_bitwidth)
        found = tl.load(own + place + offsets, mask=index < N + S, other=0, cache_modifier=".cg")
        tl.store(out + row * (G * W) + peer * W + column, found, mask=is_row)
        if rest is not None:
            tl.store(out_rest + peer * S + (index - N), found, mask=is_rest)
    tl.store(counters + program, count)


@triton.jit
def add_parts(out, x, staging, flags, counters, rank, N, G: tl.constexpr, BLOCK: tl.constexpr):
    """out [N]: the sum of every rank's x in fp32, in the order of the ranks."""
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    offsets = tl.arange(0, BLOCK)
    index = program * BLOCK + offsets
    is_in = index < N
    values = tl.load(x + index, mask=is_in, other=0.0)
    _send(staging, values, turn, rank, program, offsets, is_in, G)
    _meet(flags, rank, program, count, G)
    own = tl.load(staging + rank).to(tl.pointer_type(values.dtype))
    total = tl.zeros((BLOCK,), tl.float32)
    for peer in tl.static_range(G):
        place = _region(turn, peer, program, G, values.dtype.primitive_bitwidth)
        found = tl.load(own + place + offsets, mask=is_in, other=0.0, cache_modifier=".cg")
        total += found.to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=is_in)
    tl.store(counters + program, count)


@triton.jit
def exchange_rows(
    x, exchange, stride_xm, first_row, rows, cols, is_in, G: tl.constexpr, IS_SUM: tl.constexpr
):  # fmt: skip
    """A program's rows [ROWS, COLS] of what all ranks' x make, in x's dtype: their sum, or their columns by rank.

    exchange: (staging, flags, counters, this rank, columns of its x). rows and cols from 0, first_row before them.
    """
    staging, flags, counters, rank, width = exchange
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    is_own = is_in & (cols < width)[None, :]
    places = first_row * stride_xm + rows[:, None] * stride_xm + cols[None, :]
    values = tl.load(x + places, mask=is_own, other=0.0)
    BITS: tl.constexpr = values.dtype.primitive_bitwidth
    from_row = rows[:, None] * cols.shape[0]
    _send(staging, values, turn, rank, program, from_row + cols[None, :], is_own, G)
    _meet(flags, rank, program, count, G)
    own = tl.load(staging + rank).to(tl.pointer_type(values.dtype))
    if IS_SUM:
        total = tl.zeros_like(values).to(tl.float32)
        for peer in tl.static_range(G):
            place = _region(turn, peer, program, G, BITS) + from_row + cols[None, :]
            total += tl.load(own + place, mask=is_in, other=0.0, cache_modifier=".cg").to(tl.float32)
        made = round_to(total, values.dtype).to(values.dtype)
    else:
        place = _region(turn, cols // width, program, G, BITS) + cols % width
        made = tl.load(own + from_row + place[None, :], mask=is_in, other=0.0, cache_modifier=".cg")
    tl.store(counters + program, count)
    return made


def launch(kernel: Any, num_elements: int, world: int, like: torch.Tensor, *arguments: Any) -> None:
    """Launch a program for each block of a message."""
    block = max(MIN_BLOCK, triton.next_power_of_2(triton.cdiv(num_elements, MOST)))
    with on_device_of(like):
        run = launcher_of(kernel, G=world, BLOCK=block, num_warps=NUM_WARPS)
        run((triton.cdiv(num_elements, block),), *arguments)
