"""Triton SwiGLU and its gradient; their arithmetic and tile loads also serve ops/gelu and the fused ops/activation.

gate_up is [T, 2F], gate half first; T tokens, F width of a half. A program owns a BLOCK_T x BLOCK_F tile of both.
Every kernel built on this arithmetic is launched with enable_fp_fusion=False: the compiler then contracts no product
and sum on its own, so that fused and unfused kernels round alike.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of

LOG2_E = tl.constexpr(1.4426950408889634)
# BLOCK_T, BLOCK_F, num_warps: 8 elements a thread of each half, one 16-byte load of bf16.
PLAIN_TILE = (4, 512, 8)


@triton.jit
def sigmoid(x):
    """1 / (1 + exp(-x)) to about 2**-20; the square of a reciprocal root takes 6 instructions fewer than a division."""
    root = tl.rsqrt(1.0 + tl.exp2(x * -LOG2_E))
    return root * root


@triton.jit
def swiglu_values(gate, up):
    """silu(gate) * up in fp32."""
    return gate * sigmoid(gate) * up


@triton.jit
def swiglu_gradients(grad, gate, up):
    """Gradients of swiglu_values by gate and by up in fp32."""
    s = sigmoid(gate)
    return grad * up * s * tl.fma(gate, 1.0 - s, 1.0), grad * (gate * s)


@triton.jit
def first_of_tile(F, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """First row and first column of this program's tile."""
    pid = tl.program_id(0)
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    return (pid // num_tiles_f).to(tl.int64) * BLOCK_T, (pid % num_tiles_f).to(tl.int64) * BLOCK_F


@triton.jit
def is_inside(t, f, T, F, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Which elements of the tile at (t, f) exist."""
    return (t + tl.arange(0, BLOCK_T) < T)[:, None] & (f + tl.arange(0, BLOCK_F) < F)[None, :]


@triton.jit
def tile_places(x, stride, t, f, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Addresses of the tile at (t, f) of a row-major matrix."""
    # Relative to the tile: a sum in 64 bits for every element would spill registers.
    rows = tl.arange(0, BLOCK_T).to(tl.int64)
    return x + (t * stride + f) + rows[:, None] * stride + tl.arange(0, BLOCK_F)[None, :]


@triton.jit
def load_tile(x, stride, t, f, is_in, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """The tile at (t, f) as fp32, zero outside."""
    return tl.load(tile_places(x, stride, t, f, BLOCK_T, BLOCK_F), mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def store_tile(out, stride, t, f, values, is_in, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """Store the tile at (t, f), rounded to out's dtype."""
    tl.store(tile_places(out, stride, t, f, BLOCK_T, BLOCK_F), values.to(out.dtype.element_ty), mask=is_in)


@triton.jit
def swiglu_tiles(out, gate_up, stride_x, T, F, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """out [T, F] = silu(gate) * up."""
    t, f = first_of_tile(F, BLOCK_T, BLOCK_F)
    is_in = is_inside(t, f, T, F, BLOCK_T, BLOCK_F)
    gate = load_tile(gate_up, stride_x, t, f, is_in, BLOCK_T, BLOCK_F)
    up = load_tile(gate_up, stride_x, t, F + f, is_in, BLOCK_T, BLOCK_F)
    store_tile(out, F, t, f, swiglu_values(gate, up), is_in, BLOCK_T, BLOCK_F)


@triton.jit
def load_saved(x, scale, stride, t, f, is_in, T, width, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """The tile at (t, f) of x [T, width], or of its codes in 1x128 blocks with scale [ceil(width / 128), T].

    A tile starts with a block or lies within one.
    """
    values = load_tile(x, stride, t, f, is_in, BLOCK_T, BLOCK_F)
    if scale is not None:
        GROUPS: tl.constexpr = max(1, BLOCK_F // 128)
        rows, groups = t + tl.arange(0, BLOCK_T).to(tl.int64), f // 128 + tl.arange(0, GROUPS)
        is_group = (rows < T)[:, None] & (groups * 128 < width)[None, :]
        factors = tl.load(scale + groups[None, :] * T + rows[:, None], mask=is_group, other=0.0)
        blocks = tl.reshape(values, [BLOCK_T, GROUPS, BLOCK_F // GROUPS])
        values = tl.reshape(blocks * factors[:, :, None], [BLOCK_T, BLOCK_F])
    return values


@triton.jit
def swiglu_backward_tiles(
    out, grad, gate_up, scale, stride_grad, stride_x, T, F, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr
):
    """out [T, 2F] = gradient by gate_up."""
    t, f = first_of_tile(F, BLOCK_T, BLOCK_F)
    is_in = is_inside(t, f, T, F, BLOCK_T, BLOCK_F)
    wide = load_tile(grad, stride_grad, t, f, is_in, BLOCK_T, BLOCK_F)
    gate = load_saved(gate_up, scale, stride_x, t, f, is_in, T, 2 * F, BLOCK_T, BLOCK_F)
    up = load_saved(gate_up, scale, stride_x, t, F + f, is_in, T, 2 * F, BLOCK_T, BLOCK_F)
    grad_gate, grad_up = swiglu_gradients(wide, gate, up)
    store_tile(out, 2 * F, t, f, grad_gate, is_in, BLOCK_T, BLOCK_F)
    store_tile(out, 2 * F, t, F + f, grad_up, is_in, BLOCK_T, BLOCK_F)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up of gate_up [T, 2F] (fp32, bf16 or fp16, on a GPU), as [T, F] of its dtype."""
    gate_up = rows_contiguous(gate_up)
    T, F = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty(T, F, dtype=gate_up.dtype, device=gate_up.device)
    if out.numel():
        with on_device_of(out):
            launch = launcher_of(swiglu_tiles, **plain_options())
            launch(plain_grid(T, F), out, gate_up, gate_up.stride(0), T, F)
    return out


def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor | None = None) -> torch.Tensor:
    """Gradient by gate_up [T, 2F] from grad [T, F], as [T, 2F] of grad's dtype.

    Args:
        scale: [T, 2F / 128] where gate_up is codes in 1x128 blocks; F is then a multiple of 128.
    """
    grad, gate_up = rows_contiguous(grad), rows_contiguous(gate_up)
    T, F = grad.shape
    out = torch.empty(T, 2 * F, dtype=grad.dtype, device=grad.device)
    scale = None if scale is None else scale.t().contiguous()  # no copy, as quantize lays it out
    if out.numel():
        with on_device_of(out):
            launch = launcher_of(swiglu_backward_tiles, **plain_options())
            launch(plain_grid(T, F), out, grad, gate_up, scale, grad.stride(0), gate_up.stride(0), T, F)
    return out


def plain_grid(T: int, F: int) -> tuple[int]:
    """Programs of a plain elementwise kernel."""
    block_t, block_f, _ = PLAIN_TILE
    return (triton.cdiv(T, block_t) * triton.cdiv(F, block_f),)


def plain_options() -> dict[str, Any]:
    """Tile and compiler options of a plain elementwise kernel."""
    block_t, block_f, num_warps = PLAIN_TILE
    return {"BLOCK_T": block_t, "BLOCK_F": block_f, "num_warps": num_warps, "enable_fp_fusion": False}


def rows_contiguous(x: torch.Tensor) -> torch.Tensor:
    """x itself where its last dim is contiguous, else a copy."""
    return x if x.stride(-1) == 1 else x.contiguous()
