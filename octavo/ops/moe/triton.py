"""Triton routing: two launches for any number of tokens, one to sort rows by expert, one to add them up again.

A counting sort in a fixed order instead of atomics. Of few tokens every program of `place_few_rows` reads all choices
and places the rows of one expert. Of more `choose_experts` counts the experts of each of its blocks of tokens, and
every program of `place_rows` adds these counts up for itself, so that no third launch has to.
Legend: T tokens, E experts, S slots (TOP_K), R rows of the sorted batch, H width, W words of a row.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import (
    can_begin_early,
    launcher_of,
    let_next_begin,
    on_device_of,
    wait_for_last,
)
from octavo.ops.moe.reference import num_rows, scale_layout

MAX_EXPERTS = 512  # a program holds every expert of a few tokens
FEW_TOKENS, FEW_SLOTS = 512, 16  # up to here latency counts: a warp a token, then a program an expert
TOKENS_A_PASS = 256  # of place_few_rows: one a thread
CHOOSE_WARPS, PLACE_FEW_WARPS, PLACE_WARPS, COPY_WARPS = 4, 8, 4, 4
COUNTS_A_CHUNK = 4096
PLACE_PROGRAMS = 256  # one wave, in which each adds up all counts
PLACES_A_TILE = 16384  # a slot has a place for every expert
MOST_SLOTS_A_TILE = 128
FILL = 256
ROWS_A_COPY, COPY_BYTES, SUM_WIDTH = 4, 2048, 1024

SUM_UNIT = tl.constexpr(2.0**39)  # as exact_sum with 40 bits has it, where the largest exponential is 1
ROUNDER = tl.constexpr(1.5 * 2.0**52)  # added to an fp64 and taken off again, it leaves a whole number
LARGEST_KEY = tl.constexpr(0x7FC00000)  # of a NaN, which a sort puts above all numbers
NO_EXPERT = tl.constexpr(0x7FFF)


@triton.jit
def _softmax(logits, stride, t, e, E):
    """The reference's probabilities of tokens t [BLOCK_T] for experts e [EXPERTS]; 0 from E on."""
    is_expert = (e < E)[None, :]
    x = tl.load(logits + t.to(tl.int64)[:, None] * stride + e[None, :], mask=is_expert, other=float("-inf"))
    x = x.to(tl.float32)
    distance = (x - tl.max(x, axis=1)[:, None]).to(tl.float64)
    exponentials = tl.where(is_expert, tl.exp(distance).to(tl.float32), 0.0)
    integers = (exponentials.to(tl.float64) * SUM_UNIT + ROUNDER) - ROUNDER
    total = (tl.sum(integers, axis=1) * (1.0 / SUM_UNIT)).to(tl.float32)  # by a power of two: exact, and no division
    return tl.div_rn(exponentials, total[:, None])


@triton.jit(do_not_specialize=("T", "R", "share"))  # which differ from step to step
def choose_experts(
    weights, experts, short_experts, probs, counts, slots, logits, stride, T, E, R, share,
    TOP_K: tl.constexpr, NORMALIZE: tl.constexpr, BLOCK_T: tl.constexpr, EXPERTS: tl.constexpr, SLOTS: tl.constexpr,
    FILL: tl.constexpr,
):  # fmt: skip
    """A block of tokens: probabilities, the S likeliest experts, and for place_rows how many tokens chose each.

    place_few_rows has the experts as int16 instead. On the way every program marks `share` rows of the sorted batch as
    padding.
    """
    let_next_begin()
    pid = tl.program_id(0)
    t = pid * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, EXPERTS)
    slot = tl.arange(0, SLOTS)[None, :]
    is_in = (t < T)[:, None] & (e < E)[None, :]
    p = _softmax(logits, stride, tl.minimum(t, T - 1), e, E)
    tl.store(probs + t.to(tl.int64)[:, None] * E + e[None, :], p, mask=is_in)
    # A probability's bits rise with it. A warp finds the largest, and the lowest expert of it, in one instruction each,
    # as it could not find both in one number of 64 bits.
    keys = tl.where(p == p, p.to(tl.int32, bitcast=True), LARGEST_KEY)
    keys = tl.where((e < E)[None, :], keys, -1)
    chosen = tl.zeros([BLOCK_T, SLOTS], tl.int32)
    best = tl.zeros([BLOCK_T, SLOTS], tl.float32)
    total = tl.zeros([BLOCK_T], tl.float32)
    for s in tl.static_range(TOP_K):
        top = tl.max(keys, axis=1)
        expert = tl.min(tl.where(keys == top[:, None], e[None, :], EXPERTS), axis=1)  # of equal ones the lowest
        keys = tl.where(e[None, :] == expert[:, None], -1, keys)
        value = top.to(tl.float32, bitcast=True)
        chosen = tl.where(slot == s, expert[:, None], chosen)
        best = tl.where(slot == s, value[:, None], best)
        total += value
    if NORMALIZE:
        best = tl.div_rn(best, total[:, None])
    places = t.to(tl.int64)[:, None] * TOP_K + slot
    is_slot = (t < T)[:, None] & (slot < TOP_K)
    tl.store(weights + places, best, mask=is_slot)
    tl.store(experts + places, chosen.to(tl.int64), mask=is_slot)
    if short_experts is not None:
        tl.store(short_experts + places, chosen.to(tl.int16), mask=is_slot)
    if counts is not None:
        count = tl.sum((is_in & (keys == -1)).to(tl.int32), axis=0)
        tl.store(counts + pid * E + e, count.to(tl.int8), mask=e < E)
    for start in range(0, share, FILL):
        index = start + tl.arange(0, FILL)
        row = pid * share + index
        padding = tl.zeros([FILL], tl.int64) + T * TOP_K
        tl.store(slots + row, padding, mask=(index < share) & (row < R))


@triton.jit
def _experts_of(short_experts, t, T, TOP_K: tl.constexpr, SLOTS: tl.constexpr):
    """What tokens t [TOKENS] chose: [TOKENS, SLOTS] int32, NO_EXPERT from T and TOP_K on."""
    slot = tl.arange(0, SLOTS)[None, :]
    is_slot = (t < T)[:, None] & (slot < TOP_K)
    return tl.load(short_experts + t[:, None] * TOP_K + slot, mask=is_slot, other=NO_EXPERT).to(tl.int32)


@triton.jit(do_not_specialize=("T",))
def place_few_rows(
    rows, slots, offsets, short_experts, T,
    ALIGNMENT: tl.constexpr, TOP_K: tl.constexpr, TOKENS: tl.constexpr, SLOTS: tl.constexpr, EXPERTS: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """The rows of one expert, past those of all lower ones, TOKENS tokens at a time.

    Where they begin is where the expert before ends: one program more than experts stores the last end.
    """
    wait_for_last(EARLY)
    own = tl.program_id(0)
    i = tl.arange(0, TOKENS)
    if ALIGNMENT == 1:
        lower = tl.zeros([TOKENS], tl.int32)
        for start in range(0, T, TOKENS):
            expert = _experts_of(short_experts, start + i, T, TOP_K, SLOTS)
            lower += tl.sum((expert < own).to(tl.int32), axis=1)
    else:
        lower = tl.zeros([EXPERTS], tl.int32)
        for start in range(0, T, TOKENS):
            expert = tl.ravel(_experts_of(short_experts, start + i, T, TOP_K, SLOTS), can_reorder=True)
            lower += tl.histogram(expert, EXPERTS, mask=expert < own)
        lower = (lower + (ALIGNMENT - 1)) // ALIGNMENT * ALIGNMENT
    row = tl.sum(lower, axis=0)
    tl.store(offsets + own - 1, row, mask=own > 0)
    for start in range(0, T, TOKENS):
        t = start + i
        is_own = _experts_of(short_experts, t, T, TOP_K, SLOTS) == own
        place = tl.sum(tl.where(is_own, tl.arange(0, SLOTS)[None, :] + 1, 0), axis=1)  # a token has an expert once
        is_chosen = (place > 0).to(tl.int32)
        slot, own_row = t * TOP_K + place - 1, row + tl.cumsum(is_chosen, axis=0) - 1
        tl.store(rows + slot, own_row.to(tl.int64), mask=place > 0)
        tl.store(slots + own_row, slot.to(tl.int64), mask=place > 0)
        if start + TOKENS < T:
            row += tl.sum(is_chosen, axis=0)


@triton.jit(do_not_specialize=("num_slots", "num_counts", "own_counts", "span"))
def place_rows(
    rows, slots, offsets, counts, experts, num_slots, E, alignment, num_counts, own_counts, span,
    TILE: tl.constexpr, EXPERTS: tl.constexpr, CHUNK: tl.constexpr,
):  # fmt: skip
    """The rows of `span` slots, which `own_counts` counts are of, TILE at a time; program 0 also stores where rows end.

    A slot's row is the first of its expert, past the slots of earlier programs and tiles, and past those before it in
    its own tile.
    """
    pid = tl.program_id(0)
    e = tl.arange(0, EXPERTS)
    is_expert = (e < E)[None, :]
    sums = tl.zeros([CHUNK, EXPERTS], tl.int32)  # of threads' own counts, which meet once
    earlier_sums = tl.zeros([CHUNK, EXPERTS], tl.int32)
    for start in range(0, num_counts, CHUNK):
        block = start + tl.arange(0, CHUNK)
        places = counts + block[:, None] * E + e[None, :]
        part = tl.load(places, mask=(block < num_counts)[:, None] & is_expert, other=0).to(tl.int32)
        sums += part
        earlier_sums += tl.where((block < pid * own_counts)[:, None], part, 0)
    every, earlier = tl.sum(sums, axis=0), tl.sum(earlier_sums, axis=0)
    padded = (every + alignment - 1) // alignment * alignment
    ends = tl.cumsum(padded, axis=0)
    if pid == 0:
        tl.store(offsets + e, ends, mask=e < E)
    free = ends - padded + earlier  # the next row of each expert
    i = tl.arange(0, TILE)
    for start in range(0, span, TILE):
        own = pid.to(tl.int64) * span + start + i
        is_in = (start + i < span) & (own < num_slots)
        expert = tl.load(experts + own, mask=is_in, other=-1).to(tl.int32)
        is_chosen = expert[:, None] == e[None, :]
        is_before = (expert[:, None] == expert[None, :]) & (i[:, None] > i[None, :])
        row = tl.sum(tl.where(is_chosen, free[None, :], 0), axis=1) + tl.sum(is_before.to(tl.int32), axis=1)
        tl.store(rows + own, row.to(tl.int64), mask=is_in)
        tl.store(slots + row, own, mask=is_in)
        free += tl.sum(is_chosen.to(tl.int32), axis=0)


@triton.jit
def _gather_scales(out_scale, scale, r, token, is_real, stride_row, stride_group, R, G, GROUPS: tl.constexpr):
    """The rows' scales, by the first programs alone."""
    if tl.program_id(1) == 0:
        g = tl.arange(0, GROUPS)[None, :]
        places = scale + token[:, None] * stride_row + g * stride_group
        value = tl.load(places, mask=is_real & (g < G), other=1.0)
        tl.store(out_scale + g.to(tl.int64) * R + r[:, None], value, mask=(r < R)[:, None] & (g < G))


@triton.jit(do_not_specialize=("num_slots", "R"))
def gather_rows(
    out, out_scale, x, scale, slots, stride, stride_row, stride_group, num_slots, R, W, G,
    TOP_K: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_W: tl.constexpr, GROUPS: tl.constexpr,
):  # fmt: skip
    """Each row its token's words, and its scales where it has any (GROUPS > 0); padding has zeros and the scale 1."""
    r = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    w = tl.program_id(1) * BLOCK_W + tl.arange(0, BLOCK_W)
    slot = tl.load(slots + r, mask=r < R, other=num_slots)
    token = slot // TOP_K
    is_real = (slot < num_slots)[:, None]
    words = tl.load(x + token[:, None] * stride + w[None, :], mask=is_real & (w < W)[None, :], other=0)
    tl.store(out + r.to(tl.int64)[:, None] * W + w[None, :], words, mask=(r < R)[:, None] & (w < W)[None, :])
    if GROUPS > 0:
        _gather_scales(out_scale, scale, r, token, is_real, stride_row, stride_group, R, G, GROUPS)


@triton.jit
def add_rows(y, out, rows, weights, stride, H, TOP_K: tl.constexpr, BLOCK_H: tl.constexpr):
    """Part of one token's sum of its rows, times their weights where there are any, in slot order."""
    first = tl.program_id(0).to(tl.int64) * TOP_K
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    total = tl.zeros([BLOCK_H], tl.float32)
    for s in tl.static_range(TOP_K):
        row = tl.load(rows + first + s)
        part = tl.load(out + row * stride + h, mask=h < H, other=0.0).to(tl.float32)
        if weights is not None:
            part = part * tl.load(weights + first + s)
        total += part
    tl.store(y + tl.program_id(0).to(tl.int64) * H + h, total.to(y.dtype.element_ty), mask=h < H)


def can_route(logits: torch.Tensor) -> bool:
    """Whether moe_routing takes these logits."""
    return logits.shape[0] > 0 and logits.shape[1] <= MAX_EXPERTS and logits.element_size() <= 4


def moe_routing(
    logits: torch.Tensor, top_k: int, normalize: bool, alignment: int
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.moe_routing_reference, for what can_route accepts."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    (T, E), device = logits.shape, logits.device
    R, width = num_rows(T * top_k, E, alignment), triton.next_power_of_2(E)
    is_few = T <= FEW_TOKENS and top_k <= FEW_SLOTS
    block, warps = (1, 1) if is_few else (min(16, 2048 // width), CHOOSE_WARPS)
    programs, num_slots, places = triton.cdiv(T, block), T * top_k, triton.next_power_of_2(top_k)
    experts, rows = (torch.empty(T, top_k, dtype=torch.int64, device=device) for _ in range(2))
    weights = torch.empty(T, top_k, dtype=torch.float32, device=device)
    probs = torch.empty(T, E, dtype=torch.float32, device=device)
    slots = torch.empty(R, dtype=torch.int64, device=device)
    offsets = torch.empty(E, dtype=torch.int32, device=device)
    short_experts = torch.empty(T, top_k, dtype=torch.int16, device=device) if is_few else None
    counts = None if is_few else torch.empty(programs, E, dtype=torch.int8, device=device)
    with on_device_of(logits):
        launch = launcher_of(
            choose_experts, TOP_K=top_k, NORMALIZE=normalize, BLOCK_T=block, EXPERTS=width, SLOTS=places, FILL=FILL,
            num_warps=warps, enable_fp_fusion=False,
        )  # fmt: skip
        made = (weights, experts, short_experts, probs, counts, slots)
        share = triton.cdiv(R, programs) if alignment > 1 else 0  # where each row has a slot, none only pads
        launch((programs,), *made, logits, logits.stride(0), T, E, R, share)
        if is_few:
            early = can_begin_early(device)
            launch = launcher_of(
                place_few_rows, ALIGNMENT=alignment, TOP_K=top_k, TOKENS=TOKENS_A_PASS, SLOTS=places, EXPERTS=width,
                EARLY=early, launch_pdl=early, num_warps=PLACE_FEW_WARPS,
            )  # fmt: skip
            launch((E + 1,), rows, slots, offsets, short_experts, T)
        else:
            tile, chunk = min(MOST_SLOTS_A_TILE, PLACES_A_TILE // width), max(1, COUNTS_A_CHUNK // width)
            launch = launcher_of(place_rows, TILE=tile, EXPERTS=width, CHUNK=chunk, num_warps=PLACE_WARPS)
            own_counts = triton.cdiv(programs, PLACE_PROGRAMS)
            grid, span = (triton.cdiv(programs, own_counts),), own_counts * block * top_k
            launch(grid, rows, slots, offsets, counts, experts, num_slots, E, alignment, programs, own_counts, span)
    return weights, experts, probs, rows, slots, offsets


def dispatch_rows(x: torch.Tensor, slots: torch.Tensor, num_slots: int) -> torch.Tensor:
    """As reference.dispatch_reference, for at least one token."""
    x = x if x.stride(1) == 1 else x.contiguous()
    out = torch.empty(slots.shape[0], x.shape[1], dtype=x.dtype, device=x.device)
    _gather(out, None, x, None, slots, num_slots)
    return out


def dispatch_codes(
    codes: torch.Tensor, scale: torch.Tensor, slots: torch.Tensor, num_slots: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.dispatch_codes_reference, for at least one token."""
    R, width = slots.shape[0], codes.shape[1]
    out = torch.empty(R, width, dtype=codes.dtype, device=codes.device)
    out_scale = scale.new_empty_strided(*scale_layout(R, scale.shape[1]))
    word = torch.int32 if width % 4 == 0 else torch.uint8
    _gather(out.view(word), out_scale, codes.view(word), scale, slots, num_slots)
    return out, out_scale


def _gather(
    out: torch.Tensor,
    out_scale: torch.Tensor | None,
    x: torch.Tensor,
    scale: torch.Tensor | None,
    slots: torch.Tensor,
    num_slots: int,
) -> None:
    (R, W), num_groups = out.shape, 0 if scale is None else scale.shape[1]
    if not R:
        return
    block = min(triton.next_power_of_2(W), COPY_BYTES // x.element_size())
    strides = (x.stride(0), *((0, 0) if scale is None else scale.stride()))
    with on_device_of(x):
        launch = launcher_of(
            gather_rows, TOP_K=num_slots, BLOCK_R=ROWS_A_COPY, BLOCK_W=block,
            GROUPS=triton.next_power_of_2(num_groups) if num_groups else 0, num_warps=COPY_WARPS,
        )  # fmt: skip
        grid = (triton.cdiv(R, ROWS_A_COPY), triton.cdiv(W, block))
        launch(grid, out, out_scale, x, scale, slots, *strides, x.shape[0] * num_slots, R, W, num_groups)


def combine_rows(out: torch.Tensor, rows: torch.Tensor, weights: torch.Tensor | None) -> torch.Tensor:
    """As reference.combine_reference, for at least one token."""
    out = out if out.stride(1) == 1 else out.contiguous()
    (T, top_k), H = rows.shape, out.shape[1]
    y = torch.empty(T, H, dtype=out.dtype, device=out.device)
    block = min(triton.next_power_of_2(H), SUM_WIDTH)
    with on_device_of(out):
        # no contraction: a product is rounded before it is added, as in the reference
        launch = launcher_of(add_rows, TOP_K=top_k, BLOCK_H=block, num_warps=COPY_WARPS, enable_fp_fusion=False)
        launch((T, triton.cdiv(H, block)), y, out, rows, weights, out.stride(0), H)
    return y
