"""One program that makes a linear's scales from its amax history and rolls the history, bit-equal to reference.py.

history is [LEN, N]: row 0 stages the current step's amax, row i + 1 moves to row i, the staged row becomes the last.
"""

import functools

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import Launcher, is_on_current_device, launcher_of
from octavo.ops.quantize.delayed.reference import GRAD_SLOT

MAX_HISTORY = 4096  # rows that one program can hold
FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


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
    slots = tl.arange(0, N_BLOCK)
    rows = tl.arange(0, LEN_BLOCK)
    is_slot = slots < N
    is_in = (rows < LEN)[:, None] & is_slot[None, :]
    staged = tl.load(history + slots, mask=is_slot, other=0.0)  # [N]
    # a NaN is no zero: its step is not a skipped one
    is_skipped = tl.max((staged != 0.0).to(tl.int32), axis=0) == 0
    successors = tl.where(rows + 1 == LEN, 0, rows + 1)
    shifted = tl.load(history + successors[:, None] * N + slots[None, :], mask=is_in, other=0.0)  # [LEN, N]
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
        tl.store(history + rows[:, None] * N + slots[None, :], rolled, mask=is_in)


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
def _launcher(
    num_rows: int, num_slots: int, forward_max: float, grad_max: float, margin: int, most_recent: bool
) -> Launcher:
    part = 2.0**-margin
    return launcher_of(
        update_history, FORWARD_MAX=forward_max * part, GRAD_MAX=grad_max * part, GRAD_SLOT=GRAD_SLOT,
        MOST_RECENT=most_recent,
        LEN=num_rows, N=num_slots, LEN_BLOCK=triton.next_power_of_2(num_rows),
        N_BLOCK=triton.next_power_of_2(num_slots), num_warps=8,
    )  # fmt: skip
