"""The three GEMMs of a linear as autograd Functions: one for recipes in FP8, one for high precision.

output = input @ weight.t(); grad_input = grad_output @ weight; grad_weight = grad_output.t() @ input. A GEMM's FP8
operands are quantized along the dimension that it sums over: K (in), N (out) and T (tokens) respectively.
"""

from typing import Any, Protocol

import torch
from torch.autograd.function import once_differentiable

from octavo.nn.quantized_weight import DelayedState, Operands
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.hp_mm import hp_mm
from octavo.ops.quantize import quantize, quantize_both
from octavo.ops.scaled_mm import scaled_mm


class OperandSource(Protocol):
    """What the Functions ask of a linear: its weight's codes, its delayed-scaling state, whether it is exact."""

    exact: bool

    def forward_operands(self, recipe: Recipe, *, observe: bool = False) -> Operands: ...

    def backward_operands(self, recipe: Recipe) -> Operands: ...

    def delayed_state(self, recipe: Recipe) -> DelayedState: ...


def scaled_linear(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    layer: OperandSource,
    recipe: Recipe,
    *,
    training: bool,
    needs_wgrad: bool,
) -> tuple[torch.Tensor, QuantizedTensor | None]:
    """The output GEMM in FP8.

    Args:
        x: [T, K]. training: observe amaxes (delayed scaling). needs_wgrad: also quantize x for grad_weight.
    Returns:
        (output [T, N] of x's dtype, the operand to save for grad_weight or None).
    """
    rows, saved = _quantize_input(x, layer, recipe, needs_wgrad, observe=training)
    pieces = [
        scaled_mm(rows, w, bias=None if bias is None else bias[r], out_dtype=x.dtype, exact=layer.exact)
        for r, w in layer.forward_operands(recipe, observe=training)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1), saved


class ScaledLinearFunction(torch.autograd.Function):
    """A linear in FP8. Saves FP8 codes for backward, never a high-precision copy of the input."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: OperandSource,
        recipe: Recipe,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        needs_wgrad = weight is not None and ctx.needs_input_grad[1]
        out, saved = scaled_linear(x, bias, layer, recipe, training=True, needs_wgrad=needs_wgrad)
        ctx.layer, ctx.recipe, ctx.in_dtype = layer, recipe, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.weight_dtype = None if weight is None else weight.dtype
        operands = layer.backward_operands if recipe.has_fp8_backward else layer.forward_operands
        ctx.operands = operands(recipe) if ctx.needs_input_grad[0] else []  # of this weight version
        ctx.input_scaling = None if saved is None else saved.scaling
        ctx.save_for_backward(*(() if saved is None else (saved.qdata, saved.scale)))
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        grad = grad.contiguous()
        run = _backward_fp8 if ctx.recipe.has_fp8_backward else _backward_high_precision
        grad_x, grad_weight = run(ctx, grad)
        grad_bias = grad.float().sum(dim=0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None, None


def _quantize_input(
    x: torch.Tensor, layer: OperandSource, recipe: Recipe, needs_wgrad: bool, *, observe: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """The input's codes for the output GEMM (along K), and for grad_weight: codes along T, or the same to decode."""
    assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
    if recipe.has_state:
        rows = layer.delayed_state(recipe).quantize(x, recipe.input, DelayedState.INPUT, observe=observe)
        columns = rows.t() if needs_wgrad and recipe.has_fp8_backward else rows
    elif needs_wgrad and recipe.has_fp8_backward:
        rows, columns = quantize_both(x, recipe.input)
    else:
        rows = columns = quantize(x, recipe.input)
    return rows, columns if needs_wgrad else None


def _backward_fp8(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    scaling = ctx.recipe.grad_output
    delayed = ctx.layer.delayed_state(ctx.recipe) if ctx.recipe.has_state else None
    if delayed is not None:
        rows = delayed.quantize(grad, scaling, DelayedState.GRAD_OUTPUT, observe=True)
        whole, columns = rows, rows.t() if ctx.needs_input_grad[1] else None
    elif ctx.needs_input_grad[1]:
        whole, columns = quantize_both(grad, scaling)
    else:
        whole, columns = quantize(grad, scaling), None
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        grad_x = _grad_input(ctx, grad, whole, scaling)
    if columns is not None:
        codes, scale = ctx.saved_tensors
        saved = QuantizedTensor(codes, scale, ctx.input_scaling)  # [K, T]
        grad_weight = scaled_mm(columns, saved, out_dtype=ctx.weight_dtype)  # [N, K]
    return grad_x, grad_weight


def _grad_input(ctx: Any, grad: torch.Tensor, whole: QuantizedTensor, scaling: Scaling) -> torch.Tensor:
    """Sum over the weight's row ranges of grad[:, range] @ weight[range]: [T, K]."""
    if len(ctx.operands) == 1:
        return scaled_mm(whole, ctx.operands[0][1], out_dtype=ctx.in_dtype)
    total = None
    for rows, w in ctx.operands:
        if scaling.is_per_tensor:
            piece = QuantizedTensor(whole.qdata[:, rows].contiguous(), whole.scale, scaling)
        else:
            piece = quantize(grad[:, rows], scaling)
        out = scaled_mm(piece, w, out_dtype=torch.float32)
        total = out if total is None else total + out
    assert total is not None, "a linear has at least one row range"
    return total.to(ctx.in_dtype)


def _backward_high_precision(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both backward GEMMs in the gradient's dtype over the decoded operands of the forward."""
    grad_x = grad_weight = None
    if ctx.needs_input_grad[0]:
        weight = torch.cat([w.dequantize(grad.dtype) for _, w in ctx.operands])  # [N, K]
        grad_x = hp_mm(grad, weight.t(), out_dtype=ctx.in_dtype)
    if ctx.needs_input_grad[1]:
        codes, scale = ctx.saved_tensors
        x = QuantizedTensor(codes, scale, ctx.input_scaling).dequantize(grad.dtype)  # [T, K]
        grad_weight = hp_mm(grad.t(), x.t(), out_dtype=ctx.weight_dtype)
    return grad_x, grad_weight


class HighPrecisionLinearFunction(torch.autograd.Function):
    """A linear in the input's dtype; exact mode applies to the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, exact: bool
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        ctx.save_for_backward(x, weight)
        ctx.bias_dtype = None if bias is None else bias.dtype
        return hp_mm(x, weight.to(x.dtype), bias=bias, exact=exact)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        x, weight = ctx.saved_tensors
        grad_x = hp_mm(grad, weight.to(grad.dtype).t()) if ctx.needs_input_grad[0] else None
        grad_weight = hp_mm(grad.t(), x.t(), out_dtype=weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.float().sum(dim=0).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        return grad_x, grad_weight, grad_bias, None
