"""The AdamW step as one Triton kernel: reads and writes each byte of parameter, gradient and state once.

N elements of a parameter, in memory order. A program owns ROWS blocks of BLOCK elements that share a moment's scale.
Sums and products are rounded one by one as in reference.py, nothing is fused to an fma, so that moments are equal in
bits. The update's root and quotient are the GPU's fast ones (2 units in the last place each; exact ones would take a
quarter more instructions), so that weights differ from the reference's by 2**-20 of their update at most.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.adamw.state import BLOCK, UE5M3_MAX, UE5M3_OFFSET, WEIGHT_FACTOR

# 16 elements a thread: all moves are 16 bytes wide, and what a thread does once (offsets, scales) is shared by many.
ROWS = 16
NUM_WARPS = 4

_E4M3_MAX = tl.constexpr(448.0)
_E4M3_MIN_NORMAL = tl.constexpr(2.0**-6)
_UE5M3_MAX = tl.constexpr(UE5M3_MAX)
_UE5M3_OFFSET = tl.constexpr(UE5M3_OFFSET)
GOLDEN = tl.constexpr(0x9E3779B9)
_WEIGHT_FACTOR = tl.constexpr(WEIGHT_FACTOR)
_FP32_MAX = tl.constexpr(torch.finfo(torch.float32).max)


@triton.jit
def mix_bits(x):
    """octavo.numerics.stochastic.mix_bits of uint32."""
    x = x ^ (x >> 16)
    x = x * 0x7FEB352D
    x = x ^ (x >> 15)
    x = x * 0x846CA68B
    return x ^ (x >> 16)


@triton.jit
def _truncate_with(x, random, MASK: tl.constexpr):
    bits = x.to(tl.uint32, bitcast=True) + (random & MASK)
    return (bits & (0xFFFFFFFF - MASK)).to(tl.float32, bitcast=True)


@triton.jit
def _round_to_bf16(x, random):
    return tl.where(x == x, _truncate_with(x, random, 0xFFFF), x).to(tl.bfloat16)


@triton.jit
def _quant_scale(amax, LARGEST: tl.constexpr):
    # Zero, infinite, or NaN where a block is NaN alone (else the maximum drops it): the quotient is exactly 1.
    amax = tl.where((amax > 0.0) & (amax < float("inf")), amax, LARGEST)
    quant_scale = tl.div_rn(LARGEST, amax)
    return tl.where(quant_scale < float("inf"), quant_scale, _FP32_MAX)


@triton.jit
def encode_first(x, random):
    """octavo.ops.adamw.state.encode_first of [ROWS, BLOCK] fp32 with random uint32."""
    quant_scale = _quant_scale(tl.max(tl.abs(x), axis=1), _E4M3_MAX)  # [ROWS]
    scaled = x * quant_scale[:, None]
    size = tl.minimum(tl.abs(scaled), _E4M3_MAX)  # NaN saturates
    lift = tl.where(size < _E4M3_MIN_NORMAL, _E4M3_MIN_NORMAL, 0.0)
    size = _truncate_with(size + lift, random, 0xFFFFF) - lift
    sign = scaled.to(tl.uint32, bitcast=True) & 0x80000000
    rounded = (size.to(tl.uint32, bitcast=True) | sign).to(tl.float32, bitcast=True)
    return rounded.to(tl.float8e4nv), tl.div_rn(1.0, quant_scale)


@triton.jit
def _encode_second(x, random):
    amax = tl.max(x, axis=1)
    quant_scale = _quant_scale(amax, _UE5M3_MAX)  # [ROWS]
    scaled = tl.minimum(x * quant_scale[:, None], _UE5M3_MAX)
    bits = scaled.to(tl.int32, bitcast=True) + (random >> 12).to(tl.int32) - (_UE5M3_OFFSET << 20)
    codes = tl.maximum(bits >> 20, 0).to(tl.uint8)
    return codes, tl.where(amax > 0.0, tl.div_rn(1.0, quant_scale), 0.0)


@triton.jit
def _decode_second(codes, scale):
    return ((codes.to(tl.int32) + _UE5M3_OFFSET) << 20).to(tl.float32, bitcast=True) * scale


@triton.jit
def adamw_blocks(
    param,
    exp_avg,
    exp_avg_sq,
    exp_avg_scale,
    exp_avg_sq_scale,
    master,
    grad,
    hyper,
    N,
    offset,
    beta1,
    one_minus_beta1,
    beta2,
    one_minus_beta2,
    eps,
    FP8: tl.constexpr,
    MASTER: tl.constexpr,
    ROWS: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """One step of ROWS blocks; MASTER is "param" (its own), "fp32" or "remainder"; element 0 has place `offset`."""
    first_row = tl.program_id(0).to(tl.int64) * ROWS
    start = first_row * BLOCK
    rows = tl.arange(0, ROWS)
    places = rows[:, None] * BLOCK + tl.arange(0, BLOCK)[None, :]  # relative: 64-bit ones would take registers
    is_in = places < N - start
    row_is_in = rows * BLOCK < N - start

    decay = tl.load(hyper)
    step_size = tl.load(hyper + 1)
    inv_sqrt_correction = tl.load(hyper + 2)
    grad_scale = tl.load(hyper + 3)
    step = tl.load(hyper + 4).to(tl.int32).to(tl.uint32)
    seed = (start + offset).to(tl.uint32) * GOLDEN + mix_bits(step + GOLDEN)
    random = places.to(tl.uint32) * GOLDEN + seed

    gradient = tl.load(grad + start + places, mask=is_in, other=0.0).to(tl.float32) * grad_scale
    first = tl.load(exp_avg + start + places, mask=is_in, other=0.0).to(tl.float32)
    if FP8:
        first = first * tl.load(exp_avg_scale + first_row + rows, mask=row_is_in, other=1.0)[:, None]
        scale = tl.load(exp_avg_sq_scale + first_row + rows, mask=row_is_in, other=1.0)[:, None]
        second = _decode_second(tl.load(exp_avg_sq + start + places, mask=is_in, other=0), scale)
    else:
        second = tl.load(exp_avg_sq + start + places, mask=is_in, other=0.0).to(tl.float32)
    first = first * beta1 + gradient * one_minus_beta1
    second = second * beta2 + gradient * gradient * one_minus_beta2
    update = tl.fdiv(first, tl.sqrt(second) * inv_sqrt_correction + eps)

    if FP8:
        codes, scale = encode_first(first, random)
        tl.store(exp_avg + start + places, codes, mask=is_in)
        tl.store(exp_avg_scale + first_row + rows, scale, mask=row_is_in)
        codes, scale = _encode_second(second, random)
        tl.store(exp_avg_sq + start + places, codes, mask=is_in)
        tl.store(exp_avg_sq_scale + first_row + rows, scale, mask=row_is_in)
    elif exp_avg.dtype.element_ty == tl.bfloat16:
        tl.store(exp_avg + start + places, _round_to_bf16(first, random), mask=is_in)
        tl.store(exp_avg_sq + start + places, _round_to_bf16(second, random >> 16), mask=is_in)
    else:
        tl.store(exp_avg + start + places, first, mask=is_in)
        tl.store(exp_avg_sq + start + places, second, mask=is_in)

    old = tl.load(param + start + places, mask=is_in, other=0.0)
    if MASTER == "remainder":
        low = tl.load(master + start + places, mask=is_in, other=0).to(tl.int32)
        weight = ((old.to(tl.int16, bitcast=True).to(tl.int32) << 16) + low).to(tl.float32, bitcast=True)
    elif MASTER == "fp32":
        weight = tl.load(master + start + places, mask=is_in, other=0.0)
    else:
        weight = old.to(tl.float32)
    weight = weight * decay - update * step_size
    if MASTER == "param" and param.dtype.element_ty == tl.bfloat16:
        rounded = _round_to_bf16(weight, (random * _WEIGHT_FACTOR) >> 16)
    else:
        rounded = weight.to(param.dtype.element_ty)
    tl.store(param + start + places, rounded, mask=is_in)
    if MASTER == "remainder":
        low = weight.to(tl.int32, bitcast=True) - (rounded.to(tl.int16, bitcast=True).to(tl.int32) << 16)
        tl.store(master + start + places, tl.minimum(low, 0x7FFF).to(tl.int16), mask=is_in)
    elif MASTER == "fp32":
        tl.store(master + start + places, weight, mask=is_in)


def adamw_step(
    param: torch.Tensor,
    exp_avg: torch.Tensor,
    exp_avg_sq: torch.Tensor,
    exp_avg_scale: torch.Tensor | None,
    exp_avg_sq_scale: torch.Tensor | None,
    master: torch.Tensor | None,
    grad: torch.Tensor,
    hyper: torch.Tensor,
    beta1: float,
    beta2: float,
    eps: float,
    offset: int = 0,
) -> None:
    """One step in place; arguments as ops.adamw.adamw_step_ takes them, all contiguous and on one GPU."""
    n = param.numel()
    place = (offset + 2**31) % 2**32 - 2**31  # random bits take 32 of its bits, and a wider number a slower launch
    kind = "param" if master is None else "remainder" if master.dtype == torch.int16 else "fp32"
    with on_device_of(param):
        launch = launcher_of(
            adamw_blocks, FP8=exp_avg_scale is not None, MASTER=kind, ROWS=ROWS, BLOCK=BLOCK,
            num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        tensors = (param, exp_avg, exp_avg_sq, exp_avg_scale, exp_avg_sq_scale, master, grad, hyper)
        launch((triton.cdiv(n, ROWS * BLOCK),), *tensors, n, place, beta1, 1.0 - beta1, beta2, 1.0 - beta2, eps)
