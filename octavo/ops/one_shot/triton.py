"""One-shot exchanges: a program pushes its part of the message to all ranks, waits for theirs, and writes the result.

G ranks, N elements of a message, W elements of a row, S of what follows the rows. A program has REGION elements of the
message, a region of its own for each rank and of two turns (staging: [2, G, MOST, REGION] on each rank), and a flag of
each rank (flags: [G, MOST] int32), which counts its turns. So programs never touch what another one uses, and a rank
that is a turn ahead writes into the other turn's region: it cannot be two ahead, since a turn ends with all flags.
Counters live on the GPU, so that a CUDA graph can replay a launch. All programs of a launch must run at once.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of

REGION = 1024  # elements: 2 to 4 KiB, which a program moves in a few hundred nanoseconds
MOST = 128  # programs: each needs a multiprocessor of its own, and H100 has 132
NUM_WARPS = 4
_REGION, _MOST = tl.constexpr(REGION), tl.constexpr(MOST)


@triton.jit
def _send(staging, values, turn, rank, program, offsets, is_in, G: tl.constexpr):
    """Write this program's values into its region on every rank."""
    place = ((turn * G + rank) * _MOST + program) * _REGION
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
def gather_columns(out, out_rest, x, rest, staging, flags, counters, rank, N, W, S, G: tl.constexpr):
    """out [N / W, G * W] of every rank's x [N / W, W], and out_rest [G, S] of their rest [S]; of 4 or 2 bytes."""
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    offsets = tl.arange(0, _REGION)
    index = program * _REGION + offsets
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
        place = ((turn * G + peer) * _MOST + program) * _REGION
        found = tl.load(own + place + offsets, mask=index < N + S, other=0, cache_modifier=".cg")
        tl.store(out + row * (G * W) + peer * W + column, found, mask=is_row)
        if rest is not None:
            tl.store(out_rest + peer * S + (index - N), found, mask=is_rest)
    tl.store(counters + program, count)


@triton.jit
def add_parts(out, x, staging, flags, counters, rank, N, G: tl.constexpr):
    """out [N]: the sum of every rank's x in fp32, in the order of the ranks."""
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    offsets = tl.arange(0, _REGION)
    index = program * _REGION + offsets
    is_in = index < N
    values = tl.load(x + index, mask=is_in, other=0.0)
    _send(staging, values, turn, rank, program, offsets, is_in, G)
    _meet(flags, rank, program, count, G)
    own = tl.load(staging + rank).to(tl.pointer_type(values.dtype))
    total = tl.zeros((_REGION,), tl.float32)
    for peer in tl.static_range(G):
        place = ((turn * G + peer) * _MOST + program) * _REGION
        found = tl.load(own + place + offsets, mask=is_in, other=0.0, cache_modifier=".cg")
        total += found.to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=is_in)
    tl.store(counters + program, count)


def launch(kernel: Any, num_elements: int, world: int, like: torch.Tensor, *arguments: Any) -> None:
    """Launch one program for each REGION elements of a message."""
    with on_device_of(like):
        run = launcher_of(kernel, G=world, num_warps=NUM_WARPS)
        run((triton.cdiv(num_elements, REGION),), *arguments)
