"""A program a linear makes its scales from its amax history and rolls the history, bit-equal to reference.py.

history is [LEN, N]: row 0 stages the current step's amax, row i + 1 moves to row i, the staged row becomes the last.
"""

import functools
from collections.abc import Sequence
from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import Launcher, is_on_current_device, launcher_of, on_device_of
from octavo.ops.quantize.delayed.reference import GRAD_SLOT

MAX_HISTORY = 4096  # rows that one program can hold
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def _update(
    history,
    quant_scale,
    staging,
    LEN,
    N,
    FORWARD_MAX: tl.constexpr,
    GRAD_MAX: tl.constexpr,
    GRAD_SLOT: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LEN_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    slots = tl.arange(0, N_BLOCK)
    rows = tl.arange(0, LEN_BLOCK)
    is_slot = slots < N
    staged = tl.load(staging + slots, mask=is_slot, other=0.0)  # [N]
    # a NaN is no zero: its step is not a skipped one
    is_skipped = tl.max((staged != 0.0).to(tl.int32), axis=0) == 0
    is_past = (rows + 1 < LEN)[:, None] & is_slot[None, :]
    past = tl.load(history + (rows + 1)[:, None] * N + slots[None, :], mask=is_past, other=0.0)
    shifted = tl.where((rows + 1 == LEN)[:, None], staged[None, :], past)  # [LEN, N]
    old_scale = tl.load(quant_scale + slots, mask=is_slot, other=1.0)

    sizes = tl.where(shifted == shifted, shifted, 0.0)
    amax = tl.max(sizes, axis=0)
    if MOST_RECENT:
        amax = tl.where(staged == staged, staged, 0.0)
    fp8_max = tl.where(slots == GRAD_SLOT, GRAD_MAX, FORWARD_MAX)
    is_usable = (amax > 0.0) & (amax < float("inf"))
    fresh = tl.div_rn(fp8_max, tl.where(is_usable, amax, 1.0))
    fresh = tl.where(fresh < float("inf"), fresh, FP32_MAX)
    scale = tl.where(is_usable, fresh, old_scale)

    if not is_skipped:
        tl.debug_barrier()  # every row is read before one is written
        tl.store(quant_scale + slots, scale, mask=is_slot)
        rolled = tl.where((rows == 0)[:, None], 0.0, shifted)
        is_in = (rows < LEN)[:, None] & is_slot[None, :]
        tl.store(history + rows[:, None] * N + slots[None, :], rolled, mask=is_in)


@triton.jit
def update_history(
    history,
    quant_scale,
    FORWARD_MAX: tl.constexpr,
    GRAD_MAX: tl.constexpr,
    GRAD_SLOT: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LEN: tl.constexpr,
    N: tl.constexpr,
    LEN_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    _update(
        history, quant_scale, history, LEN, N, FORWARD_MAX, GRAD_MAX, GRAD_SLOT, MOST_RECENT, LEN_BLOCK, N_BLOCK
    )  # fmt: skip


@triton.jit
def update_histories(
    anchor,  # fp32: what all others lie so many elements from
    table,  # [linears, 5] int64: history, quant_scale, staged row, LEN, N
    FORWARD_MAX: tl.constexpr,
    GRAD_MAX: tl.constexpr,
    GRAD_SLOT: tl.constexpr,
    MOST_RECENT: tl.constexpr,
    LEN_BLOCK: tl.constexpr,
    N_BLOCK: tl.constexpr,
):
    entry = table + tl.program_id(0) * 5
    _update(
        anchor + tl.load(entry), anchor + tl.load(entry + 1), anchor + tl.load(entry + 2),
        tl.load(entry + 3).to(tl.int32), tl.load(entry + 4).to(tl.int32),
        FORWARD_MAX, GRAD_MAX, GRAD_SLOT, MOST_RECENT, LEN_BLOCK, N_BLOCK,
    )  # fmt: skip


def update(
    history: torch.Tensor,
    quant_scale: torch.Tensor,
    forward_max: float,
    grad_max: float,
    margin: int,
    most_recent: bool,
) -> None:
    """The step of delayed scaling in place; see octavo.ops.quantize.delayed.update_delayed_."""
    launch = _launcher(*history.shape, forward_max, grad_max, margin, most_recent)
    if is_on_current_device(history):
        launch((1, 1, 1), history, quant_scale)
        return
    with torch.cuda.device(history.device):
        launch((1, 1, 1), history, quant_scale)


@functools.lru_cache(maxsize=256)
def _launcher(num_rows: int, num_slots: int, *rules: Any) -> Launcher:
    return launcher_of(
        update_history, **_constants(*rules), LEN=num_rows, N=num_slots,
        LEN_BLOCK=triton.next_power_of_2(num_rows), N_BLOCK=triton.next_power_of_2(num_slots), num_warps=8,
    )  # fmt: skip


class Table:
    """Where the histories, scales and staged rows of several linears are, kept on their device for update_many.

    Args:
        histories: each [LEN, N], all on one device.
        quant_scales: each [N].
        staged: each [N].
    """

    def __init__(
        self, histories: Sequence[torch.Tensor], quant_scales: Sequence[torch.Tensor], staged: Sequence[torch.Tensor]
    ) -> None:
        self.anchor = quant_scales[0]
        begin, size = self.anchor.data_ptr(), self.anchor.element_size()
        places = zip(histories, quant_scales, staged, strict=True)
        rows = [[*((t.data_ptr() - begin) // size for t in place), *place[0].shape] for place in places]
        self.entries = torch.tensor(rows, dtype=torch.int64, device=self.anchor.device)
        self.blocks = tuple(triton.next_power_of_2(max(h.shape[dim] for h in histories)) for dim in (0, 1))


def update_many(table: Table, forward_max: float, grad_max: float, margin: int, most_recent: bool) -> None:
    """update of each linear of a table, in one launch."""
    launch = _many_launcher(*table.blocks, forward_max, grad_max, margin, most_recent)
    with on_device_of(table.anchor):
        launch((len(table.entries), 1, 1), table.anchor, table.entries)


@functools.lru_cache(maxsize=256)
def _many_launcher(len_block: int, n_block: int, *rules: Any) -> Launcher:
    return launcher_of(update_histories, **_constants(*rules), LEN_BLOCK=len_block, N_BLOCK=n_block, num_warps=8)


def _constants(forward_max: float, grad_max: float, margin: int, most_recent: bool) -> dict[str, Any]:
    part = 2.0**-margin
    limits = {"FORWARD_MAX": forward_max * part, "GRAD_MAX": grad_max * part}
    return limits | {"GRAD_SLOT": GRAD_SLOT, "MOST_RECENT": most_recent}
