"""Triton random Hadamard transform, bit-equal to octavo.numerics.hadamard.

A program owns one block of 16 rows by BLOCK_C columns, in registers. A step adds and subtracts neighbouring rows and
puts sums before differences; after four of them each bit of a row's number has had its turn and is back in its place.
"""

import torch
import triton
import triton.language as tl

from octavo.numerics.hadamard import HADAMARD_BLOCK, HADAMARD_STEPS, NEGATIVE, result_like
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.quantize.fake_quantize.triton.formats import store_rounded
from octavo.ops.quantize.triton.casts import widen

_BLOCK = tl.constexpr(HADAMARD_BLOCK)
_STEPS = tl.constexpr(HADAMARD_STEPS)
_NEGATIVE = tl.constexpr(NEGATIVE)
_FACTOR = tl.constexpr(HADAMARD_BLOCK**-0.5)

COLUMNS = 128  # a program's
NUM_WARPS = 4


@triton.jit
def hadamard_blocks(out, x, T, C, BLOCK_C: tl.constexpr):
    """One tile [16, BLOCK_C] of out [T rounded up to 16, C] from x [T, C], both contiguous."""
    tiles_c = tl.cdiv(C, BLOCK_C)
    first_t = (tl.program_id(0) // tiles_c).to(tl.int64) * _BLOCK
    t = tl.arange(0, _BLOCK)[:, None]
    c = (tl.program_id(0) % tiles_c) * BLOCK_C + tl.arange(0, BLOCK_C)[None, :]
    offsets = first_t * C + (t.to(tl.int64) * C + c)
    values = widen(tl.load(x + offsets, mask=(t < T - first_t) & (c < C), other=0.0))
    is_negative = (tl.full([_BLOCK, 1], _NEGATIVE, tl.int32) >> t) & 1
    values = values * tl.where(is_negative == 1, -_FACTOR, _FACTOR)
    for _ in tl.static_range(_STEPS):
        pairs = tl.permute(tl.reshape(values, [_BLOCK // 2, 2, BLOCK_C]), [0, 2, 1])
        even, odd = tl.split(pairs)  # [8, BLOCK_C] each
        values = tl.reshape(tl.permute(tl.join(even + odd, even - odd), [2, 0, 1]), [_BLOCK, BLOCK_C])
    store_rounded(out, offsets, values, values != values, (t < _BLOCK) & (c < C))


def random_hadamard(x: torch.Tensor) -> torch.Tensor:
    """x [T, K] (fp32, bf16 or fp16, on a GPU) -> [T rounded up to 16, K], bf16 for bf16 and else fp32."""
    out = result_like(x)
    if not out.numel():
        return out
    x = x.contiguous()
    T, C = x.shape
    launch = launcher_of(hadamard_blocks, BLOCK_C=COLUMNS, num_warps=NUM_WARPS, enable_fp_fusion=False)
    with on_device_of(x):
        launch((out.shape[0] // HADAMARD_BLOCK * triton.cdiv(C, COLUMNS),), out, x, T, C)
    return out
