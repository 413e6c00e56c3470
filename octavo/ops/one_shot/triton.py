"""One-shot exchanges: a program pushes its part of the message to the others, waits for theirs, and writes the result.

G ranks, N elements of a message, W elements of a row, S of what follows the rows. A program has BLOCK elements of the
message, a region of its own for each rank and of two turns (staging: [2, G, MOST, REGION_BYTES] on each rank), and a
flag of each rank (flags: [G, MOST] int32), which counts its turns. So programs never touch what another one uses, and a
rank that is a turn ahead writes into the other turn's region: it cannot be two ahead, since a turn ends with all flags.
Counters live on the GPU, so that a CUDA graph can replay a launch. All programs of a launch must run at once.

Short messages travel in packets instead: 4 bytes and the turn's count in one word of 8, which arrives as a whole, so
that there is no flag to wait for after the data (packets: [2, G, FEW, PACKETS] int64, apart from the regions, for
whatever lies there must be a packet).
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.one_shot import Places
from octavo.ops.quantize.triton.casts import round_to

MIN_BLOCK = 1024  # elements: 2 to 4 KiB, which a program moves in a few hundred nanoseconds
REGION_BYTES = 16 << 10
MOST = 256  # programs: two on each of an H100's 132 multiprocessors
FEW, PACKETS = 32, 4096  # programs that send packets, and how many each
NUM_WARPS = 4
_REGION_BITS, _MOST = tl.constexpr(8 * REGION_BYTES), tl.constexpr(MOST)
_FEW, _PACKETS = tl.constexpr(FEW), tl.constexpr(PACKETS)


@triton.jit
def base_of(addresses, peer, dtype: tl.constexpr):
    """Where a rank's part of what is shared begins: whole 16 bytes go into one instruction."""
    return tl.multiple_of(tl.load(addresses + peer).to(tl.pointer_type(dtype)), 16)


@triton.jit
def _region(turn, peer, program, G: tl.constexpr, BITS: tl.constexpr):
    """Elements of so many bits from the beginning of a rank's staging to a region of it."""
    return ((turn * G + peer) * _MOST + program) * (_REGION_BITS // BITS)


@triton.jit
def _send(staging, values, turn, rank, program, offsets, is_in, G: tl.constexpr):
    """Write this program's values into its region on every other rank."""
    place = _region(turn, rank, program, G, values.dtype.primitive_bitwidth)
    for peer in tl.static_range(G):
        base = base_of(staging, peer, values.dtype)
        tl.store(base + place + offsets, values, mask=is_in & (peer != rank))


@triton.jit
def _receive(own, values, turn, rank, peer, program, offsets, is_in, G: tl.constexpr):
    """What a rank has written into its region here, after _meet; this rank's are the values themselves."""
    place = _region(turn, peer, program, G, values.dtype.primitive_bitwidth)
    found = tl.load(own + place + offsets, mask=is_in & (peer != rank), other=0.0, cache_modifier=".cg")
    return tl.where(peer == rank, values, found)


@triton.jit
def _meet(flags, rank, program, count, G: tl.constexpr):
    """Tell every other rank that this program has written for the count-th time, and wait until all have."""
    tl.debug_barrier()  # the writes of all threads come before the flag that one of them sets
    for peer in tl.static_range(G):
        if peer != rank:
            theirs = base_of(flags, peer, tl.int32)
            tl.atomic_xchg(theirs + rank * _MOST + program, count, sem="release", scope="sys")
    own = base_of(flags, rank, tl.int32)
    for peer in tl.static_range(G):
        if peer != rank:
            seen = tl.atomic_add(own + peer * _MOST + program, 0, sem="acquire", scope="sys")
            while seen - count < 0:  # by difference: the count wraps around
                seen = tl.atomic_add(own + peer * _MOST + program, 0, sem="acquire", scope="sys")
    tl.debug_barrier()


@triton.jit
def _send_packets(packets, words, turn, rank, program, offsets, is_in, count, G: tl.constexpr):
    """Write these words of 4 bytes into this program's packets on every rank."""
    place = ((turn * G + rank) * _FEW + program) * _PACKETS + offsets
    made = (count.to(tl.int64) << 32) | (words.to(tl.int64) & 0xFFFFFFFF)
    for peer in tl.static_range(G):
        base = base_of(packets, peer, tl.int64)
        tl.store(base + place, made, mask=is_in, cache_modifier=".wt")


@triton.jit
def _receive_packets(packets, turn, rank, sender, program, offsets, is_in, count, G: tl.constexpr):
    """The words at these places of a sender's packets, once they are those of this turn."""
    base = base_of(packets, rank, tl.int64)
    places = base + (((turn * G + sender) * _FEW + program) * _PACKETS + offsets)
    found = tl.load(places, mask=is_in, other=0, volatile=True)
    while tl.sum((is_in & ((found >> 32).to(tl.int32) != count)).to(tl.int32), axis=None) > 0:
        found = tl.load(places, mask=is_in, other=0, volatile=True)
    return found.to(tl.int32)


@triton.jit
def _halves(words):
    """The two bf16 numbers of words [ROWS, N], in fp32: the first ones and the second ones."""
    return (words << 16).to(tl.float32, bitcast=True), (words & -65536).to(tl.float32, bitcast=True)


@triton.jit
def gather_columns(
    out, out_rest, x, rest, staging, flags, packets, counters, rank, N, W, S, G: tl.constexpr, BLOCK: tl.constexpr,
    BY_PACKETS: tl.constexpr,
):  # fmt: skip
    """out [N / W, G * W] of every rank's x [N / W, W], and out_rest [G, S] of their rest [S]; int32."""
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    offsets = tl.arange(0, BLOCK)
    index = program * BLOCK + offsets
    is_row = index < N
    is_in = index < N + S
    words = tl.load(x + index, mask=is_row, other=0)
    if rest is not None:
        words = tl.where(is_row, words, tl.load(rest + (index - N), mask=is_in & (index >= N), other=0))
    if BY_PACKETS:
        _send_packets(packets, words, turn, rank, program, offsets, is_in, count, G)
    else:
        _send(staging, words, turn, rank, program, offsets, is_in, G)
        _meet(flags, rank, program, count, G)
    own = base_of(staging, rank, words.dtype)
    row, column = index // W, index % W
    for peer in tl.static_range(G):
        if BY_PACKETS:
            found = _receive_packets(packets, turn, rank, peer, program, offsets, is_in, count, G)
        else:
            found = _receive(own, words, turn, rank, peer, program, offsets, is_in, G)
        tl.store(out + row * (G * W) + peer * W + column, found, mask=is_row)
        if rest is not None:
            tl.store(out_rest + peer * S + (index - N), found, mask=is_in & (index >= N))
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
    own = base_of(staging, rank, values.dtype)
    # not from 0.0 on, which would make 0.0 of all ranks' -0.0
    total = _receive(own, values, turn, rank, 0, program, offsets, is_in, G).to(tl.float32)
    for peer in tl.static_range(1, G):
        total += _receive(own, values, turn, rank, peer, program, offsets, is_in, G).to(tl.float32)
    tl.store(out + index, total.to(out.dtype.element_ty), mask=is_in)
    tl.store(counters + program, count)


@triton.jit
def exchange_few_rows(
    x, exchange, stride_xm, first_row, rows, cols, row_is_in, G: tl.constexpr, IS_SUM: tl.constexpr
):  # fmt: skip
    """exchange_rows of bf16 in packets, in fp32."""
    _, _, packets, counters, rank, width = exchange
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    HALF: tl.constexpr = cols.shape[0] // 2
    pairs = tl.arange(0, HALF)
    own = x.to(tl.pointer_type(tl.int32)) + first_row * (stride_xm // 2)
    is_own = row_is_in[:, None] & (pairs < width // 2)[None, :]
    words = tl.load(own + rows[:, None] * (stride_xm // 2) + pairs[None, :], mask=is_own, other=0)
    from_row = rows[:, None] * HALF
    _send_packets(packets, words, turn, rank, program, from_row + pairs[None, :], is_own, count, G)
    if IS_SUM:
        first = tl.zeros([words.shape[0], HALF], tl.float32)
        second = first
        for peer in tl.static_range(G):
            found = _receive_packets(packets, turn, rank, peer, program, from_row + pairs[None, :], is_own, count, G)
            low, high = _halves(found)
            first += low
            second += high
    else:
        half_width = width // 2
        is_in = row_is_in[:, None] & (pairs < half_width * G)[None, :]
        offsets = from_row + (pairs % half_width)[None, :]
        found = _receive_packets(packets, turn, rank, (pairs // half_width)[None, :], program, offsets, is_in, count, G)
        first, second = _halves(found)
    tl.store(counters + program, count)
    made = tl.reshape(tl.join(first, second), [words.shape[0], cols.shape[0]])
    return round_to(made, tl.bfloat16)


@triton.jit
def exchange_rows(
    x, exchange, stride_xm, first_row, rows, cols, is_in, G: tl.constexpr, IS_SUM: tl.constexpr
):  # fmt: skip
    """A program's rows [ROWS, COLS] of what all ranks' x make, in x's dtype: their sum, or their columns by rank.

    exchange: (staging, flags, packets, counters, this rank, columns of its x). rows and cols from 0, first_row
    before them.
    """
    staging, flags, _, counters, rank, width = exchange
    program = tl.program_id(0)
    count = tl.load(counters + program) + 1
    turn = count & 1
    is_own = is_in & (cols < width)[None, :]
    places = first_row * stride_xm + rows[:, None] * stride_xm + cols[None, :]
    values = tl.load(x + places, mask=is_own, other=0.0)
    from_row = rows[:, None] * cols.shape[0]
    _send(staging, values, turn, rank, program, from_row + cols[None, :], is_own, G)
    _meet(flags, rank, program, count, G)
    own = base_of(staging, rank, values.dtype)
    if IS_SUM:
        total = tl.zeros_like(values).to(tl.float32)
        for peer in tl.static_range(G):
            offsets = from_row + cols[None, :]
            total += _receive(own, values, turn, rank, peer, program, offsets, is_in, G).to(tl.float32)
        made = round_to(total, values.dtype).to(values.dtype)
    else:
        sender = (cols // width)[None, :]
        place = _region(turn, sender, program, G, values.dtype.primitive_bitwidth) + (cols % width)[None, :]
        made = tl.load(own + from_row + place, mask=is_in & (sender != rank), other=0.0, cache_modifier=".cg")
        own_places = first_row * stride_xm + rows[:, None] * stride_xm + (cols % width)[None, :]
        made = tl.where(sender == rank, tl.load(x + own_places, mask=is_in & (sender == rank), other=0.0), made)
    tl.store(counters + program, count)
    return made


def gather(
    x: torch.Tensor, out: torch.Tensor, rest: torch.Tensor | None, out_rest: torch.Tensor | None, places: Places
) -> None:
    """Write out [T, ranks * W] of every rank's x [T, W], and out_rest of their rest [S]; int32, contiguous."""
    num_rest = 0 if rest is None else rest.numel()
    block, programs = _blocks(x.numel() + num_rest)
    sizes = x.numel(), x.shape[1], num_rest
    with on_device_of(x):
        run = launcher_of(gather_columns, G=places.world, BLOCK=block, BY_PACKETS=programs <= FEW, num_warps=NUM_WARPS)
        run((programs,), out, out_rest, x, rest, *places[:5], *sizes)


def add(part: torch.Tensor, out: torch.Tensor, places: Places) -> None:
    """Write the sum of every rank's part; contiguous."""
    block, programs = _blocks(part.numel())
    staging, flags, _, counters, rank, world = places
    with on_device_of(part):
        run = launcher_of(add_parts, G=world, BLOCK=block, num_warps=NUM_WARPS)
        run((programs,), out, part, staging, flags, counters, rank, part.numel())


def _blocks(num_elements: int) -> tuple[int, int]:
    """(elements of a program, programs)."""
    block = max(MIN_BLOCK, triton.next_power_of_2(triton.cdiv(num_elements, MOST)))
    return block, triton.cdiv(num_elements, block)
