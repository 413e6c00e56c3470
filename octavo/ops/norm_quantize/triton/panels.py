"""Triton norm + quantize both ways in one launch that reads memory once: for scales that a tile of 128 x 128 knows.

x is [T, K] in panels of PANEL rows. The grid walks the panels; a program makes the statistics of some rows of its own
panel, and then a tile of an earlier one: its statistics are ready by then, and x is still in the L2 cache. Programs
that start in order never wait; a tile that has waited long makes the statistics itself, so that no order can block.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.scaling import Scaling
from octavo.ops.launch.triton import launcher_of
from octavo.ops.norm.triton import LONGEST_ROW, allow_fusion, load_sum, row_statistics, store_rows
from octavo.ops.quantize.triton import Emission
from octavo.ops.quantize.triton.casts import hold, widen
from octavo.ops.quantize.triton.device import emit_held, emit_tile, even_rows
from octavo.ops.quantize.triton.held import TILE, choose_held

PANEL = tl.constexpr(TILE)
IS_ENABLED = True  # off: the two launches, for comparison
LEAN_ROWS = 4
ROW_ELEMENTS = 16384  # of the rows whose statistics a program makes, as many as a tile has
MAX_POLLS = 1 << 14  # some 10 ms
# Panels between a program's rows and its tile are so many that its tile's rows belong to programs that have ended.
PROGRAMS_AHEAD = 288


@triton.jit
def _statistics_of(
    STORED_OUT, summed, mean_out, rstd_out, x, residual, stride_xm, stride_rm, item, T, K, eps,
    STORED_RULE: tl.constexpr, ROWS: tl.constexpr, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr,
):  # fmt: skip
    """Residual add, statistics and FP8 copy of ROWS whole rows."""
    HAS_MEAN: tl.constexpr = mean_out is not None
    first_row = item.to(tl.int64) * ROWS
    rows = tl.arange(0, ROWS).to(tl.int64)
    cols = tl.arange(0, BLOCK_K).to(tl.int64)
    row_is_in = rows < T - first_row
    col_is_in = cols < (BLOCK_K if IS_WHOLE else K)  # known to the compiler where it can be
    is_in = row_is_in[:, None] & col_is_in[None, :]
    values = load_sum(x, residual, stride_xm, stride_rm, first_row, rows, cols, is_in)
    if residual is not None:
        store_rows(summed, K, first_row, rows, cols, values, is_in)
    mean, rstd = row_statistics(values, col_is_in, K, eps, HAS_MEAN)
    if HAS_MEAN:
        tl.store(mean_out + first_row + rows, mean, mask=row_is_in)
    tl.store(rstd_out + first_row + rows, rstd, mask=row_is_in)
    if STORED_RULE[0] != "none":
        emit_tile(values, STORED_OUT, item, item * 0, T, K, STORED_RULE, ROWS, BLOCK_K)


@triton.jit
def _normed_rows(stream, mean, rstd, gamma, beta, stride, first_t, first_k, t, k, left_t, OFFSET: tl.constexpr):
    """The norm of rows t of a tile, [rows, TILE], 0 outside: normalize's arithmetic."""
    is_row = t < left_t
    is_in = is_row[:, None]
    places = stream + (first_t * stride + first_k) + (t[:, None].to(OFFSET) * stride + k)
    # Past the first-level cache, which other programs' writes do not reach.
    values = widen(tl.load(places, mask=is_in, other=0.0, cache_modifier=".cg"))
    if mean is not None:
        values = values - tl.load(mean + first_t + t, mask=is_row, other=0.0, cache_modifier=".cg")[:, None]
    normed = values * tl.load(rstd + first_t + t, mask=is_row, other=0.0, cache_modifier=".cg")[:, None] * gamma
    if beta is not None:
        normed = tl.where(is_in, normed + beta, 0.0)
    return hold(normed, stream.dtype.element_ty)


@triton.jit
def norm_quantize_panels(
    OUT, STORED_OUT, ready, summed, mean, rstd, x, residual, weight, bias, stride_xm, stride_rm, T, K, eps, ahead,
    RULE: tl.constexpr, STORED_RULE: tl.constexpr, ZERO_CENTERED: tl.constexpr,
    ROWS: tl.constexpr, BLOCK_K: tl.constexpr, IS_WHOLE: tl.constexpr, POLLS: tl.constexpr,
):  # fmt: skip
    """The rows of one panel and a tile of the panel `ahead` panels before it; ready counts each panel's rows."""
    SHARES: tl.constexpr = PANEL // ROWS  # programs that make a panel's statistics
    num_tiles_k = K // PANEL
    programs = tl.maximum(num_tiles_k, SHARES)
    panel = tl.program_id(0) // programs
    share = tl.program_id(0) % programs
    item = panel * SHARES + share
    if (share < SHARES) & (item * ROWS < T):
        _statistics_of(
            STORED_OUT, summed, mean, rstd, x, residual, stride_xm, stride_rm, item, T, K, eps,
            STORED_RULE, ROWS, BLOCK_K, IS_WHOLE,
        )  # fmt: skip
        tl.debug_barrier()
        tl.atomic_add(ready + panel, 1, sem="release")
    tile_t = panel - ahead
    if (tile_t >= 0) & (share < num_tiles_k):
        first_t = tile_t.to(tl.int64) * PANEL
        first_k = share.to(tl.int64) * PANEL
        left_t = tl.minimum(T - first_t, PANEL).to(tl.int32)
        num_items = tl.cdiv(left_t, ROWS)
        found = tl.atomic_add(ready + tile_t, 0, sem="acquire")
        polls = 0
        while (found < num_items) & (polls < POLLS):
            found = tl.atomic_add(ready + tile_t, 0, sem="acquire")
            polls += 1
        if found < num_items:
            for late in range(num_items):
                _statistics_of(
                    STORED_OUT, summed, mean, rstd, x, residual, stride_xm, stride_rm, tile_t * SHARES + late, T, K,
                    eps, STORED_RULE, ROWS, BLOCK_K, IS_WHOLE,
                )  # fmt: skip
        tl.debug_barrier()
        t = even_rows(PANEL, RULE[20])
        k = tl.arange(0, PANEL)[None, :]
        gamma = widen(tl.load(weight + first_k + k))
        if ZERO_CENTERED:
            gamma = gamma + 1.0
        beta = None
        if bias is not None:
            beta = widen(tl.load(bias + first_k + k))
        stream = x
        stride = stride_xm
        if residual is not None:
            stream = summed
            stride = K
        even = _normed_rows(stream, mean, rstd, gamma, beta, stride, first_t, first_k, t, k, left_t, RULE[16])
        odd = _normed_rows(stream, mean, rstd, gamma, beta, stride, first_t, first_k, t + 1, k, left_t, RULE[16])
        emit_held(even, odd, OUT, tile_t, share, T, K, RULE)


def is_for(x: torch.Tensor, scaling: Scaling, column_scaling: Scaling | None, is_known: bool) -> bool:
    """Whether a tile knows the scales, and x [T, K] is read and stored in whole words."""
    T, K = x.shape
    is_fit = x.element_size() == 2 and T % 16 == 0 and K % TILE == 0 and K <= LONGEST_ROW
    is_aligned = x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
    if not (IS_ENABLED and is_fit and is_aligned) or column_scaling is None:
        return False
    return is_known or (scaling.kind == "block_1x128" and column_scaling.kind in ("block_1x128", "block_128x128"))


def launch_panels(
    emission: Emission,
    stored: tuple[tuple[Any, ...], tuple[Any, ...]],
    operands: tuple[Any, ...],
    x: torch.Tensor,
    mean: torch.Tensor | None,
    eps: float,
    zero_centered_gamma: bool,
) -> None:
    """Fill emission, `stored` (OUT, RULE), and the first of the operands.

    Args:
        operands: summed, mean, rstd, x, residual, weight, bias and the row strides of x and the residual.
    """
    T, K = x.shape
    (step,) = emission.steps
    rows, block_k = row_share(K)
    panels, programs = triton.cdiv(T, TILE), max(K // TILE, TILE // rows)
    ahead = min(triton.cdiv(PROGRAMS_AHEAD, programs) + 1, panels)
    ready = torch.zeros(panels + ahead, dtype=torch.int32, device=x.device)
    out, rule = stored
    is_bare = mean is None and rule[0] == "none" and operands[0] is None
    # Beside columns with scales of their own, rows of other widths would spill two registers.
    is_lean = is_bare and (rows == LEAN_ROWS or step.rule[7] != "group")
    held = choose_held(is_busy=False, is_lean=is_lean)
    launch = launcher_of(
        norm_quantize_panels, RULE=held.rule_of(step), STORED_RULE=rule, ZERO_CENTERED=zero_centered_gamma,
        ROWS=rows, BLOCK_K=block_k, IS_WHOLE=block_k == K and mean is not None, POLLS=MAX_POLLS, **held.options,
        enable_fp_fusion=allow_fusion(x, mean),
    )  # fmt: skip
    launch(((panels + ahead) * programs,), step.out, out, ready, *operands, T, K, eps, ahead)


def row_share(K: int) -> tuple[int, int]:
    """ROWS and BLOCK_K of the rows whose statistics one program makes."""
    block_k = max(TILE, triton.next_power_of_2(K))
    return min(TILE, ROW_ELEMENTS // block_k), block_k
