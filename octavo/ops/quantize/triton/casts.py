"""Casts between fp32 and 16 bits in the fewest instructions, for kernels that compute in fp32."""

import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import IS_COMPILED  # the interpreter knows no PTX


@triton.jit
def widen(x):
    """x in fp32."""
    if x.dtype == tl.bfloat16 and IS_COMPILED:
        # One instruction an element, where Triton's cast takes two for every other one.
        wide = tl.inline_asm_elementwise(
            "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
            constraints="=r,=r,r",
            args=[x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        wide = x.to(tl.float32)
    return wide


@triton.jit
def round_to(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, in fp32 again."""
    if tl.float32 == DTYPE:
        rounded = x
    elif tl.bfloat16 == DTYPE and IS_COMPILED:
        # Alone, each cast would be one slow conversion instruction; a pair's is a fast one.
        rounded = tl.inline_asm_elementwise(
            "{ .reg .b32 pair; cvt.rn.bf16x2.f32 pair, $3, $2; shl.b32 $0, pair, 16; and.b32 $1, pair, 0xffff0000; }",
            constraints="=r,=r,r,r",
            args=[x],
            dtype=tl.float32,
            is_pure=True,
            pack=2,
        )
    else:
        rounded = x.to(DTYPE).to(tl.float32)
    return rounded


@triton.jit
def rounded_product(a, b):
    """a * b in fp32, which no compiler fuses into a sum."""
    if IS_COMPILED:
        product = tl.inline_asm_elementwise(
            "mul.rn.f32 $0, $1, $2;", constraints="=r,r,r", args=[a, b], dtype=tl.float32, is_pure=True, pack=1
        )
    else:
        product = a * b
    return product


@triton.jit
def hold(x, DTYPE: tl.constexpr):
    """x rounded to DTYPE, in the fewest registers until `widen` is called on it."""
    if tl.bfloat16 == DTYPE and IS_COMPILED:
        # A plain cast of a number that fits the compiler would undo, and keep what it came from.
        held = tl.inline_asm_elementwise(
            "cvt.rn.bf16x2.f32 $0, $2, $1;",
            constraints="=r,r,r",
            args=[x],
            dtype=tl.bfloat16,
            is_pure=False,
            pack=2,
        )
    else:
        held = x.to(DTYPE)
    return held
