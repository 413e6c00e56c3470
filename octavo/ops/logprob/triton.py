"""Triton kernels over rows of logits: statistics of log-softmax, its gradient, and both at once for the loss.

logits is [T, V] fp32 or 16 bits, a program owns one row. A row is read in blocks; each of BLOCK / 4 lanes keeps its
own running maximum, sum and (for the entropy) first moment, so that no block waits for a reduction across threads.
Every sum runs in a fixed order: a row's bits depend on that row alone.

The exact path sums integers, in no order (exact_normalizer), and divides a row among programs.

REACH is how far a row may be read and written: num_cols rounded up to 16 where rows lie that far apart, so that an odd
vocabulary still moves 16 bytes at once; what lies past num_cols counts as -inf and gets a gradient of 0.
"""

import math

import torch
import triton
import triton.language as tl
from triton.language.extra import libdevice

from octavo.ops._runtime.launch.triton import IS_COMPILED, launcher_of, on_device_of

BLOCK = 4096
NUM_WARPS = 8
VECTOR = tl.constexpr(4)  # fp32 numbers that a thread loads at once: a lane's share of a block, no shuffle needed
LOWEST = tl.constexpr(-3.4028234663852886e38)  # of fp32: a maximum that, unlike -inf, can be subtracted
LOG2_E = tl.constexpr(math.log2(math.e))


@triton.jit
def _load_block(row, start, num_cols, reach, BLOCK: tl.constexpr):
    cols = start + tl.arange(0, BLOCK)
    x = tl.load(row + cols, mask=cols < reach, other=0.0).to(tl.float32)
    return cols, tl.where(cols < num_cols, x, float("-inf"))


@triton.jit
def _moved(moment, total, distance, shrink):
    """The moment about a maximum that lies `distance` away; 0 where it is too far, whose product may overflow."""
    return tl.where(shrink == 0.0, 0.0, (moment + total * distance) * shrink)


@triton.jit
def _scan_row(row, num_cols, reach, scale, MOMENT: tl.constexpr, BLOCK: tl.constexpr):
    """Of one row: max(x), sum of e = 2**((x - max) * scale), and the sum of e * (x - max).

    NaN and +inf end as a NaN sum: neither is ever dropped, though the maximum ignores NaN.
    """
    lane_max = tl.full([BLOCK // VECTOR], LOWEST, tl.float32)
    total = tl.zeros([BLOCK // VECTOR], tl.float32)
    moment = tl.zeros([BLOCK // VECTOR], tl.float32)
    for start in range(0, num_cols, BLOCK):
        _, x = _load_block(row, start, num_cols, reach, BLOCK)
        x = tl.reshape(x, [BLOCK // VECTOR, VECTOR])
        new_max = tl.maximum(lane_max, tl.max(x, axis=1))
        shrink = tl.exp2((lane_max - new_max) * scale)
        distance = x - new_max[:, None]
        e = tl.exp2(distance * scale)
        if MOMENT:
            # e is 0 where x is -inf, which adds nothing
            moment = _moved(moment, total, lane_max - new_max, shrink) + tl.sum(
                tl.where(e == 0.0, 0.0, e * distance), axis=1
            )
        total = total * shrink + tl.sum(e, axis=1)
        lane_max = new_max
    row_max = tl.max(lane_max, axis=0)
    shrink = tl.exp2((lane_max - row_max) * scale)
    row_moment = 0.0
    if MOMENT:
        row_moment = tl.sum(_moved(moment, total, lane_max - row_max, shrink), axis=0)
    return row_max, tl.sum(total * shrink, axis=0), row_moment


@triton.jit
def _target_logit(row, target, num_cols):
    """The target's logit; NaN for a target outside the vocabulary, so that it cannot pass unseen."""
    is_in = (target >= 0) & (target < num_cols)
    return tl.load(row + target, mask=is_in, other=float("nan")).to(tl.float32)


@triton.jit
def _write_grads(
    grad_row, row, num_cols, reach, grad_reach, shift, scale, factor, weight, target, target_weight, BLOCK: tl.constexpr
):
    """grad = 2**((x - shift) * scale) * factor, less target_weight at the target; zero where weight is, whatever x."""
    for start in range(0, num_cols, BLOCK):
        cols, x = _load_block(row, start, num_cols, reach, BLOCK)
        grad = tl.exp2((x - shift) * scale) * factor
        grad = tl.where(weight == 0.0, 0.0, grad)
        grad = tl.where(cols == target, grad - target_weight, grad)
        tl.store(grad_row + cols, grad.to(grad_row.dtype.element_ty), mask=cols < grad_reach)


@triton.jit
def logit_rows_kernel(
    lse,
    logprobs,
    entropy,
    logits,
    targets,
    stride,
    num_cols,
    reach,
    inv_temperature,
    ENTROPY: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's logsumexp, its target's log-probability and, where asked for, its entropy."""
    row_id = tl.program_id(0).to(tl.int64)
    row = logits + row_id * stride
    row_max, total, moment = _scan_row(row, num_cols, reach, inv_temperature * LOG2_E, ENTROPY, BLOCK)
    log_total = tl.log(total)
    picked = _target_logit(row, tl.load(targets + row_id), num_cols)
    tl.store(lse + row_id, row_max * inv_temperature + log_total)
    tl.store(logprobs + row_id, (picked - row_max) * inv_temperature - log_total)
    if ENTROPY:
        tl.store(entropy + row_id, log_total - moment * inv_temperature / total)


@triton.jit
def logit_grads_kernel(
    grads,
    logits,
    lse,
    targets,
    weights,
    target_weights,
    grad_stride,
    stride,
    num_cols,
    reach,
    grad_reach,
    first_col,
    inv_temperature,
    BLOCK: tl.constexpr,
):
    """One row's gradient over the vocabulary's columns from first_col on, from its saved logsumexp."""
    row_id = tl.program_id(0).to(tl.int64)
    weight = tl.load(weights + row_id)
    _write_grads(
        grads + row_id * grad_stride,
        logits + row_id * stride,
        num_cols,
        reach,
        grad_reach,
        tl.load(lse + row_id) / inv_temperature,
        inv_temperature * LOG2_E,
        weight,
        weight,
        tl.load(targets + row_id) - first_col,
        tl.load(target_weights + row_id),
        BLOCK,
    )


@triton.jit
def cross_entropy_rows_kernel(
    losses,
    grads,
    logits,
    targets,
    grad_stride,
    stride,
    num_cols,
    reach,
    grad_reach,
    ignore_index,
    z_loss,
    GRADS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One row's loss and its gradient; an ignored row has neither, whatever its logits."""
    row_id = tl.program_id(0).to(tl.int64)
    row = logits + row_id * stride
    target = tl.load(targets + row_id)
    is_ignored = target == ignore_index
    row_max, total, _ = _scan_row(row, num_cols, reach, LOG2_E, False, BLOCK)
    log_total = tl.log(total)
    lse = row_max + log_total
    picked = _target_logit(row, target, num_cols)
    loss = log_total - (picked - row_max) + z_loss * lse * lse
    tl.store(losses + row_id, tl.where(is_ignored, 0.0, loss))
    if GRADS:
        weight = tl.where(is_ignored, 0.0, 1.0 + 2.0 * z_loss * lse)
        target_weight = tl.where(is_ignored, 0.0, 1.0)
        _write_grads(
            grads + row_id * grad_stride,
            row,
            num_cols,
            reach,
            grad_reach,
            row_max,
            LOG2_E,
            weight / total,
            weight,
            target,
            target_weight,
            BLOCK,
        )


@triton.jit
def _exp(x):
    """As torch's on a GPU."""
    return libdevice.exp(x) if IS_COMPILED else tl.exp(x)


@triton.jit
def _scaled_block(
    block, logits, temperatures, stride, temperature_stride, num_cols, reach, BLOCK: tl.constexpr
):  # fmt: skip
    """(columns, z = logits / temperature) of one block of the program's row."""
    row_id = tl.program_id(0).to(tl.int64)
    temperature = tl.load(temperatures + row_id * temperature_stride)
    cols, z = _load_block(logits + row_id * stride, block * BLOCK, num_cols, reach, BLOCK)
    if temperature != 1.0:
        z = tl.div_rn(z, temperature)
    return cols, z


@triton.jit
def block_maxima(
    maxima, total, logits, temperatures, stride, temperature_stride, num_cols, reach, BLOCK: tl.constexpr
):  # fmt: skip
    """max(z) of one block of a row, NaN ignored; the row's sum begins as 0."""
    block = tl.program_id(1)
    _, z = _scaled_block(block, logits, temperatures, stride, temperature_stride, num_cols, reach, BLOCK)
    tl.store(maxima + tl.program_id(0) * tl.num_programs(1) + block, tl.max(z, axis=0))
    if block == 0:
        tl.store(total + tl.program_id(0), 0.0)


@triton.jit
def add_block_units(
    maximum, total, maxima, logits, temperatures, stride, temperature_stride, num_cols, reach, SUM_BITS: tl.constexpr,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Add the sum of exp(z - max of the row) over one block, in whole units of 2**-SUM_BITS, to the row's.

    A row's fp64 sum is of integers and below 2**53: no addition rounds, so that none has to wait for another. NaN,
    +inf and a row of -inf end as a NaN sum.
    """
    row_id, num_blocks = tl.program_id(0), tl.num_programs(1)
    block = num_blocks - 1 - tl.program_id(1)  # what block_maxima has read last is still in the cache
    blocks = tl.arange(0, BLOCKS)
    in_row = tl.load(maxima + row_id * num_blocks + blocks, mask=blocks < num_blocks, other=float("-inf"))
    row_max = tl.max(in_row, axis=0)
    cols, z = _scaled_block(block, logits, temperatures, stride, temperature_stride, num_cols, reach, BLOCK)
    e = tl.where(cols < num_cols, _exp(z - row_max), 0.0)
    is_bad = e != e
    scaled = tl.where(is_bad, 0.0, e) * (1 << SUM_BITS)  # exactly; half to even, as in the reference
    units = tl.sum(_rounded(scaled).to(tl.int64), axis=0).to(tl.float64)
    num_bad = tl.sum(is_bad.to(tl.int32), axis=0)
    tl.atomic_add(total + row_id, tl.where(num_bad > 0, float("nan"), units), sem="relaxed")
    if block == 0:
        tl.store(maximum + row_id, row_max)


@triton.jit
def _rounded(x):
    """fp32 from 0 up to 2**30 as integers, half to even."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise("cvt.rni.s32.f32 $0, $1;", "=r,f", [x], dtype=tl.int32, is_pure=True, pack=1)
    low = tl.floor(x)
    rest = x - low
    whole = low.to(tl.int32)
    return whole + ((rest > 0.5) | ((rest == 0.5) & (whole % 2 == 1))).to(tl.int32)


def exact_normalizer(
    logits: torch.Tensor, temperatures: torch.Tensor, sum_bits: int
) -> tuple[torch.Tensor, torch.Tensor]:
    """As reference.normalizer of z = logits / temperature, with torch's bits on the same GPU.

    Args:
        logits: [T, V] fp32, rows contiguous (else copied).
        temperatures: [1, 1] or [T, 1] fp32.
    """
    logits = _by_rows(logits)
    rows, cols = logits.shape
    maximum = torch.empty(rows, 1, dtype=torch.float32, device=logits.device)
    total = torch.empty(rows, 1, dtype=torch.float64, device=logits.device)
    if rows:
        blocks = triton.cdiv(cols, BLOCK)
        maxima = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
        source = (logits, temperatures, logits.stride(0), int(temperatures.numel() > 1), cols, _reach(logits))
        shape = {"BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        with on_device_of(logits):
            launcher_of(block_maxima, **shape)((rows, blocks), maxima, total, *source)
            launch = launcher_of(add_block_units, SUM_BITS=sum_bits, BLOCKS=triton.next_power_of_2(blocks), **shape)
            launch((rows, blocks), maximum, total, maxima, *source)
    return maximum, torch.log(total * 2.0**-sum_bits).float()


def logit_rows(
    logits: torch.Tensor, targets: torch.Tensor, inv_temperature: float, with_entropy: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Statistics of each row: (lse, logprobs, entropy), [T] fp32 each; entropy is empty where not asked for.

    Args:
        logits: [T, V], rows contiguous (else copied).
        targets: [T] int64.
    """
    logits = _by_rows(logits)
    rows, cols = logits.shape
    lse, logprobs = (torch.empty(rows, dtype=torch.float32, device=logits.device) for _ in range(2))
    entropy = torch.empty(rows if with_entropy else 0, dtype=torch.float32, device=logits.device)
    if rows:
        launch = launcher_of(logit_rows_kernel, ENTROPY=with_entropy, BLOCK=BLOCK, num_warps=NUM_WARPS)
        sizes = logits.stride(0), cols, _reach(logits), inv_temperature
        launch((rows,), lse, logprobs, entropy, logits, targets, *sizes)
    return lse, logprobs, entropy


def logit_grads(
    grads: torch.Tensor,
    logits: torch.Tensor,
    lse: torch.Tensor,
    targets: torch.Tensor,
    weights: torch.Tensor,
    target_weights: torch.Tensor,
    inv_temperature: float,
    first_col: int,
) -> None:
    """Write grads [T, C] = softmax * weights - onehot * target_weights for the columns [first_col, first_col + C).

    Args:
        grads: [T, C], rows contiguous.
        logits: [T, C], rows contiguous; those columns.
        lse: [T] fp32.
        weights: [T] fp32.
        target_weights: [T] fp32.
    """
    logits = _by_rows(logits)
    rows, cols = logits.shape
    if rows:
        launch = launcher_of(logit_grads_kernel, BLOCK=BLOCK, num_warps=NUM_WARPS)
        sizes = grads.stride(0), logits.stride(0), cols, _reach(logits), _reach(grads), first_col, inv_temperature
        launch((rows,), grads, logits, lse, targets, weights, target_weights, *sizes)


def cross_entropy_rows(
    grads: torch.Tensor | None, logits: torch.Tensor, targets: torch.Tensor, ignore_index: int, z_loss: float
) -> torch.Tensor:
    """Each row's cross-entropy plus z_loss * lse**2, [T] fp32; its gradient goes into grads [T, V], where given."""
    logits = _by_rows(logits)
    rows, cols = logits.shape
    losses = torch.empty(rows, dtype=torch.float32, device=logits.device)
    if rows:
        target = logits if grads is None else grads  # not written where GRADS is off
        constants = {"GRADS": grads is not None, "BLOCK": BLOCK, "num_warps": NUM_WARPS}
        sizes = target.stride(0), logits.stride(0), cols, _reach(logits), _reach(target), ignore_index, z_loss
        launcher_of(cross_entropy_rows_kernel, **constants)((rows,), losses, target, logits, targets, *sizes)
    return losses


def _by_rows(x: torch.Tensor) -> torch.Tensor:
    return x if x.stride(1) == 1 or x.shape[1] == 1 else x.contiguous()


def _reach(x: torch.Tensor) -> int:
    """Columns of memory that belong to a row: its own, rounded up to 16 where the next row starts no earlier."""
    reach = triton.cdiv(x.shape[1], 16) * 16
    last = x.storage_offset() + (x.shape[0] - 1) * x.stride(0) + reach
    owns = x.stride(0) % 16 == 0 and last <= x.untyped_storage().nbytes() // x.element_size()
    return reach if owns and x.stride(0) >= reach else x.shape[1]
