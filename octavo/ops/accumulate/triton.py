"""Gradients of many tensors added up by one launch: programs look up in a table whose elements theirs are.

n tensors in chunks of CHUNK elements, numbered one tensor after the other. table [WORDS, n] int64 holds the addresses
of sums, olds and gradients, the numbers of elements, and the first chunk of each. A sum is one addition in fp32.
"""

import itertools
from collections.abc import Sequence

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops._runtime.to_device import send
from octavo.ops.accumulate.reference import Terms

BLOCK = 4096  # 16 elements a thread: all moves are 16 bytes wide
CHUNK = 4 * BLOCK
NUM_WARPS = 8
_TYPES = {torch.float32: tl.float32, torch.bfloat16: tl.bfloat16, torch.float16: tl.float16}

_Kind = tuple[torch.dtype | None, torch.dtype, bool, torch.device]


@triton.jit
def _start(table, start, TYPE: tl.constexpr, ALIGNED: tl.constexpr):
    """The chunk's first element of the tensor whose address lies there."""
    x = tl.load(table).to(tl.pointer_type(TYPE))
    return (tl.multiple_of(x, 16) if ALIGNED else x) + start


@triton.jit
def accumulate_chunks(
    table, n, OLD: tl.constexpr, GRAD: tl.constexpr, ALIGNED: tl.constexpr, WIDTH: tl.constexpr, CHUNK: tl.constexpr,
    BLOCK: tl.constexpr,
):  # fmt: skip
    """One chunk; OLD and GRAD are dtypes, OLD None where there is none yet; WIDTH >= n.

    ALIGNED: addresses and numbers of elements are multiples of 16.
    """
    chunk = tl.program_id(0)
    tensors = tl.arange(0, WIDTH)
    firsts = tl.load(table + 4 * n + tensors, mask=tensors < n, other=0x7FFFFFFF)
    owner = tl.sum((firsts <= chunk).to(tl.int32), axis=0) - 1
    row = table + owner
    start = (chunk - tl.load(row + 4 * n)) * CHUNK
    num_left = tl.minimum(tl.load(row + 3 * n) - start, CHUNK).to(tl.int32)
    if ALIGNED:
        num_left = tl.multiple_of(num_left, 16)
    own = _start(row, start, tl.float32, ALIGNED)
    grad = _start(row + 2 * n, start, GRAD, ALIGNED)
    for first in tl.static_range(0, CHUNK, BLOCK):
        places = first + tl.arange(0, BLOCK)
        is_in = places < num_left
        total = tl.load(grad + places, mask=is_in, other=0.0).to(tl.float32)
        if OLD is not None:
            old = _start(row + n, start, OLD, ALIGNED)
            total = tl.load(old + places, mask=is_in, other=0.0).to(tl.float32) + total
        tl.store(own + places, total, mask=is_in)


def add_gradients(terms: Sequence[Terms]) -> list[Terms]:
    """As octavo.ops.accumulate.add_gradients, of dense tensors; returns those that are left for torch."""
    left, batches = list[Terms](), dict[_Kind, list[Terms]]()
    for own, old, grad in terms:
        tensors = [x for x in (own, old, grad) if x is not None]
        if not all(x.is_contiguous() for x in tensors):
            left.append((own, old, grad))
        elif own.numel():
            is_aligned = own.numel() % 16 == 0 and all(x.data_ptr() % 16 == 0 for x in tensors)
            kind = (None if old is None else old.dtype, grad.dtype, is_aligned, own.device)
            batches.setdefault(kind, []).append((own, old, grad))
    for (old_dtype, grad_dtype, is_aligned, device), batch in batches.items():
        addresses = [[0 if x is None else x.data_ptr() for x in each] for each in zip(*batch, strict=True)]
        sizes = [own.numel() for own, _, _ in batch]
        *firsts, num_chunks = itertools.accumulate((triton.cdiv(size, CHUNK) for size in sizes), initial=0)
        table = send([*addresses, sizes, firsts], torch.int64, device)
        with on_device_of(batch[0][0]):
            launch = launcher_of(
                accumulate_chunks, OLD=old_dtype and _TYPES[old_dtype], GRAD=_TYPES[grad_dtype], ALIGNED=is_aligned,
                WIDTH=triton.next_power_of_2(len(sizes)), CHUNK=CHUNK, BLOCK=BLOCK, num_warps=NUM_WARPS,
            )  # fmt: skip
            launch((num_chunks,), table, len(sizes))
    return left
