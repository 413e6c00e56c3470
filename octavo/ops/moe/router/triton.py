"""Triton product of a router for few tokens: parts over ranges of K, which choose_experts adds up in their order.

A program owns BLOCK_T tokens, all experts and one range of K, so that 512 tokens are one wave of programs. The weight
takes the matrix instruction's long side. A row's bits depend on that row alone: tiles and ranges never change with T.
Legend: T tokens, E experts, K in; x [T, K], weight [E, K], parts [NUM_PARTS, T, E].
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import (
    can_begin_early,
    is_hopper,
    launcher_of,
    let_next_begin,
    on_device_of,
    wait_for_last,
)
from octavo.ops.moe.router.reference import NUM_PARTS, part_columns
from octavo.ops.moe.triton import FEW_TOKENS

MAX_EXPERTS = 256
BLOCK_T, WARPS = 32, 8
LEAST_ROWS = 64  # of the weight: the matrix instruction's long side
TILE_ELEMENTS = 128 * 256  # of the weight, which a program holds at once: 64 registers a thread


@triton.jit(do_not_specialize=("T",))  # which differs from step to step
def router_tiles(
    parts, x, weight, stride_x, stride_w, T, E, K,
    RANGE: tl.constexpr, BLOCK_T: tl.constexpr, EXPERTS: tl.constexpr, BLOCK_K: tl.constexpr, EARLY: tl.constexpr,
):  # fmt: skip
    """One part of BLOCK_T tokens' logits. EARLY: the weight is read while the kernel before, which makes x, runs."""
    first = tl.program_id(1) * RANGE
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    e = tl.arange(0, EXPERTS)
    k = tl.arange(0, BLOCK_K)
    width = tl.minimum(RANGE, K - first)  # below 1 where there are fewer ranges than parts
    # Rows past the end read the last one: their results are not stored.
    x_rows = x + first + (tl.minimum(t, T - 1).to(tl.int64)[:, None] * stride_x + k[None, :])
    w_rows = weight + first + (tl.minimum(e, E - 1)[:, None] * stride_w + k[None, :])
    own = tl.load(w_rows, mask=(k < width)[None, :], other=0.0)
    wait_for_last(EARLY)
    let_next_begin()
    acc = tl.zeros([EXPERTS, BLOCK_T], tl.float32)
    for start in tl.static_range(0, RANGE, BLOCK_K):
        is_k = (k < width - start)[None, :]
        tokens = tl.load(x_rows + start, mask=is_k, other=0.0)
        if start > 0:
            own = tl.load(w_rows + start, mask=is_k, other=0.0)
        acc = tl.dot(own, tl.trans(tokens), acc)
    places = parts + (tl.program_id(1) * T + t).to(tl.int64)[None, :] * E + e[:, None]
    tl.store(places, acc, mask=(t < T)[None, :] & (e < E)[:, None])


def can_run(x: torch.Tensor, weight: torch.Tensor) -> bool:
    """Whether router_parts takes these: few tokens of 16 bits, rows contiguous, on Hopper."""
    fits = x.element_size() == 2 and weight.dtype == x.dtype and x.stride(1) == weight.stride(1) == 1
    return fits and 0 < x.shape[0] <= FEW_TOKENS and weight.shape[0] <= MAX_EXPERTS and is_hopper(x.device)


def router_parts(x: torch.Tensor, weight: torch.Tensor, reads_ahead: bool) -> torch.Tensor:
    """As reference.router_parts_reference, for what can_run accepts.

    Args:
        reads_ahead: the kernel before this one has not written the weight.
    """
    (T, K), E = x.shape, weight.shape[0]
    parts = torch.empty(NUM_PARTS, T, E, dtype=torch.float32, device=x.device)
    width, early = part_columns(K), reads_ahead and can_begin_early(x.device)
    rows = max(LEAST_ROWS, triton.next_power_of_2(E))
    block_k = min(triton.next_power_of_2(width), TILE_ELEMENTS // max(rows, 128))
    with on_device_of(x):
        launch = launcher_of(
            router_tiles, RANGE=width, BLOCK_T=BLOCK_T, EXPERTS=rows, BLOCK_K=block_k, EARLY=early, launch_pdl=early,
            num_warps=WARPS,
        )  # fmt: skip
        grid = (triton.cdiv(T, BLOCK_T), NUM_PARTS)
        launch(grid, parts, x, weight, x.stride(0), weight.stride(0), T, E, K)
    return parts
