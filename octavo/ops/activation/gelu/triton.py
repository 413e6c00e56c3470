"""Triton bias + GeLU (tanh form) and its gradients; their arithmetic also serves the fused ops (ops/activation).

x is [T, F], bias [F] or absent; T tokens. A program owns a BLOCK_T x BLOCK_F tile. Launched with
enable_fp_fusion=False, as ops/swiglu/triton.py says. The bias gradient is deterministic: every tile of
BIAS_TILE_ROWS tokens leaves its column sums, and torch adds these up in one order.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.activation.gelu import reference
from octavo.ops.activation.swiglu.triton import (
    first_of_tile,
    is_inside,
    load_saved,
    load_tile,
    plain_grid,
    plain_options,
    rows_contiguous,
    sigmoid,
    store_tile,
)

A = tl.constexpr(reference.A)
B = tl.constexpr(reference.B)
MAX_SQUARE = tl.constexpr(reference.MAX_SQUARE)
BIAS_LEVELS = 7
BIAS_TILE_ROWS = 2**BIAS_LEVELS  # the same in every kernel: it decides the order of the bias gradient's sum
BIAS_TILE = (BIAS_TILE_ROWS, 64, 8)  # BLOCK_T, BLOCK_F, num_warps of the plain backward with a bias


@triton.jit
def gelu_values(z):
    """gelu(z) in fp32."""
    square = tl.minimum(z * z, MAX_SQUARE)
    return z * sigmoid(z * tl.fma(square, B, A))


@triton.jit
def gelu_gradients(grad, z):
    """Gradient of gelu_values by z in fp32."""
    square = tl.minimum(z * z, MAX_SQUARE)
    s = sigmoid(z * tl.fma(square, B, A))
    return grad * (s * tl.fma(z * (1.0 - s), tl.fma(square, 3.0 * B, A), 1.0))


@triton.jit
def add_bias(x, bias, f, F, HAS_BIAS: tl.constexpr, BLOCK_F: tl.constexpr):
    """x + bias in fp32, for the columns from f on."""
    if HAS_BIAS:
        cols = f + tl.arange(0, BLOCK_F)
        x += tl.load(bias + cols, mask=cols < F, other=0.0).to(tl.float32)[None, :]
    return x


@triton.jit
def sum_pairs(x, LEVELS: tl.constexpr, BLOCK_F: tl.constexpr):
    """Sum over 2**LEVELS rows, neighbours first: one order whatever the layout, which tl.sum alone does not give."""
    for level in tl.static_range(LEVELS):
        x = tl.sum(tl.reshape(x, [2 ** (LEVELS - 1 - level), 2, BLOCK_F]), axis=1)
    return tl.reshape(x, [BLOCK_F])


@triton.jit
def gelu_tiles(out, x, bias, stride_x, T, F, HAS_BIAS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr):
    """out [T, F] = gelu(x + bias)."""
    t, f = first_of_tile(F, BLOCK_T, BLOCK_F)
    is_in = is_inside(t, f, T, F, BLOCK_T, BLOCK_F)
    z = add_bias(load_tile(x, stride_x, t, f, is_in, BLOCK_T, BLOCK_F), bias, f, F, HAS_BIAS, BLOCK_F)
    store_tile(out, F, t, f, gelu_values(z), is_in, BLOCK_T, BLOCK_F)


@triton.jit
def gelu_backward_tiles(
    out, bias_sums, grad, x, scale, bias, stride_grad, stride_x, T, F,
    HAS_BIAS: tl.constexpr, LEVELS: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """out [T, F] = gradient by x; bias_sums [ceil(T/BLOCK_T), F] = its column sums, tile by tile."""
    t, f = first_of_tile(F, BLOCK_T, BLOCK_F)
    is_in = is_inside(t, f, T, F, BLOCK_T, BLOCK_F)
    wide = load_tile(grad, stride_grad, t, f, is_in, BLOCK_T, BLOCK_F)
    values = load_saved(x, scale, stride_x, t, f, is_in, T, F, BLOCK_T, BLOCK_F)
    z = add_bias(values, bias, f, F, HAS_BIAS, BLOCK_F)
    rounded = gelu_gradients(wide, z).to(out.dtype.element_ty)
    store_tile(out, F, t, f, rounded, is_in, BLOCK_T, BLOCK_F)
    if HAS_BIAS:
        cols = f + tl.arange(0, BLOCK_F)
        sums = sum_pairs(rounded.to(tl.float32), LEVELS, BLOCK_F)
        tl.store(bias_sums + t // BLOCK_T * F + cols, sums, mask=cols < F)


def gelu(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gelu(x + bias) of x [T, F] (fp32, bf16 or fp16, on a GPU), in its dtype."""
    x = rows_contiguous(x)
    T, F = x.shape
    out = torch.empty(T, F, dtype=x.dtype, device=x.device)
    if out.numel():
        with on_device_of(out):
            launch = launcher_of(gelu_tiles, HAS_BIAS=bias is not None, **plain_options())
            launch(plain_grid(T, F), out, x, bias, x.stride(0), T, F)
    return out


def gelu_backward(
    grad: torch.Tensor, x: torch.Tensor, scale: torch.Tensor | None, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Gradients by x ([T, F] of grad's dtype) and by bias ([F] fp32; empty without one).

    Args:
        scale: [T, ceil(F / 128)] where x is codes in 1x128 blocks.
    """
    grad, x = rows_contiguous(grad), rows_contiguous(x)
    scale = None if scale is None else scale.t().contiguous()  # no copy, as quantize lays it out
    T, F = grad.shape
    out = torch.empty(T, F, dtype=grad.dtype, device=grad.device)
    sums = new_bias_sums(grad, bias)
    if out.numel():
        options: dict[str, Any] = plain_options()
        grid = plain_grid(T, F)
        if bias is not None:
            block_t, block_f, num_warps = BIAS_TILE
            options |= {"BLOCK_T": block_t, "BLOCK_F": block_f, "num_warps": num_warps}
            grid = (triton.cdiv(T, block_t) * triton.cdiv(F, block_f),)
        with on_device_of(out):
            launch = launcher_of(gelu_backward_tiles, HAS_BIAS=bias is not None, LEVELS=BIAS_LEVELS, **options)
            launch(grid, out, sums, grad, x, scale, bias, grad.stride(0), x.stride(0), T, F)
    return out, sums.sum(dim=0)


def new_bias_sums(grad: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Room for the column sums of every tile of tokens: [ceil(T/128), F] fp32; [0, 0] without a bias."""
    T, F = grad.shape
    shape = (0, 0) if bias is None else (triton.cdiv(T, BIAS_TILE_ROWS), F)
    return torch.empty(shape, dtype=torch.float32, device=grad.device)
