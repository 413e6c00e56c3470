"""Residual add, norm and a feed-forward block as one step in FP8: what lies between its GEMMs exists in 8 bits alone.

`norm_mlp` takes this road where the recipe allows and the modules themselves otherwise, with the same bits forward.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.nn.autocast_context import effective_recipe
from octavo.nn.linear import Linear
from octavo.nn.linear_function import (
    check_backward,
    grad_input_gemm,
    grad_weight_gemm,
    known_scale,
    output_gemm,
    quantize_grad_output,
    quantize_input,
)
from octavo.nn.norm_linear import Norm, can_fuse, can_infer, norm_input, norm_kind
from octavo.nn.quantized_weight import DelayedState
from octavo.nn.saved_operands import only_needed, save_operands, saved_operands
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.activation import (
    activation,
    activation_backward,
    activation_backward_quantize,
    activation_quantize,
)
from octavo.ops.gemm.mm_gelu import mm_gelu
from octavo.ops.norm.norm_quantize import norm_backward
from octavo.ops.quantize import quantize_columns

# Whether, without gradients and exact off, bias, GeLU and a static quantization run in the epilogue of a GEMM of our
# own instead of behind the library's. Off until it is measured on a card.
GELU_IN_GEMM = False


def norm_mlp(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm | None, fc1: Linear, fc2: Linear, kind: str
) -> tuple[torch.Tensor, torch.Tensor]:
    """fc2(activation(fc1(norm(x + residual)))), and the sum.

    Args:
        x: [T, K]. residual: [T, K] of x's dtype, or None for nothing to add.
        norm: None for none. kind: "swiglu" (fc1 makes gate and up) or "gelu" (tanh form).
    Returns:
        (output [T, K], x + residual [T, K]: what the residual stream goes on with).
    """
    recipe = effective_recipe(fc1.recipe)
    takes_bias = kind == "gelu" or fc1.bias is None
    if takes_bias and can_infer(recipe, norm, fc1, fc2):
        return _infer(x, residual, norm, fc1, fc2, kind, recipe)
    if takes_bias and can_fuse(recipe, norm, fc1, fc2):
        fc1.begin_forward(recipe)
        fc2.begin_forward(recipe)
        norm_weights = (None, None) if norm is None else (norm.weight, getattr(norm, "bias", None))
        weights, training = (fc1.weight, fc1.bias, fc2.weight, fc2.bias), torch.is_grad_enabled()
        return NormMLPFunction.apply(x, residual, *norm_weights, *weights, norm, fc1, fc2, kind, recipe, training)
    stream = x if residual is None else x + residual
    normed = stream if norm is None else norm(stream)
    if kind == "gelu":
        return fc2(ActivationFunction.apply(fc1(normed, add_bias=False), fc1.bias, kind)), stream
    return fc2(ActivationFunction.apply(fc1(normed), None, kind)), stream


def _infer(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm | None,
    fc1: Linear,
    fc2: Linear,
    kind: str,
    recipe: Recipe,
) -> tuple[torch.Tensor, torch.Tensor]:
    """norm_mlp without gradients: four launches, or five."""
    fc1.begin_forward(recipe)
    fc2.begin_forward(recipe)
    if norm is not None:
        normed = norm_input(x, residual, norm, fc1, recipe, training=False, columns=False)
        rows, stream = normed.rows, x if normed.summed is None else normed.summed
    else:
        stream = x if residual is None else x + residual
        rows, _ = quantize_input(stream, fc1, recipe, columns=False, observe=False)
    return infer_mlp(rows, fc1, fc2, kind, recipe, x.dtype), stream


def infer_mlp(
    rows: QuantizedTensor, fc1: Linear, fc2: Linear, kind: str, recipe: Recipe, dtype: torch.dtype
) -> torch.Tensor:
    """The block without gradients of an input [T, K] that is codes already, where can_infer allows -> [T, K]."""
    assert recipe.input is not None, "can_infer wants an output GEMM in FP8"
    known = known_scale(fc2, recipe, DelayedState.INPUT, observe=False)
    whole = fc1.whole_operand(recipe) if _has_epilogue(kind, recipe, fc1, fc2) else None
    if whole is not None:
        activated = mm_gelu(rows, whole, bias=fc1.bias, scaling=recipe.input, hidden_dtype=dtype, **known)
    else:
        hidden = output_gemm(rows, None, fc1, recipe, dtype, training=False)  # [T, 2F or F]
        activated = activation_quantize(hidden, kind=kind, bias=fc1.bias, scaling=recipe.input, **known).rows
    return output_gemm(activated, fc2.bias, fc2, recipe, dtype, training=False)


def _has_epilogue(kind: str, recipe: Recipe, fc1: Linear, fc2: Linear) -> bool:
    """Whether GeLU and the quantization by fc2's known scale may be fc1's GEMM's epilogue; exact, nothing trains so."""
    is_exact = fc1.exact or fc2.exact
    return GELU_IN_GEMM and kind == "gelu" and recipe.static_input and not is_exact


class ActivationFunction(torch.autograd.Function):
    """An activation with its gradient; saves its input alone."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, bias: torch.Tensor | None, kind: str) -> torch.Tensor:
        """x [T, 2F or F] -> [T, F]."""
        ctx.save_for_backward(x, bias)
        ctx.kind = kind
        return activation(x, kind=kind, bias=bias)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (x, bias)."""
        x, bias = ctx.saved_tensors
        grad_x, grad_bias = activation_backward(grad.contiguous(), x, kind=ctx.kind, bias=bias)
        return grad_x, grad_bias, None


class NormMLPFunction(torch.autograd.Function):
    """See norm_mlp. Saves the transposed codes of both linears' inputs, and the inputs of norm and activation.

    Those two are saved in FP8 by the recipe. Where it keeps the activation's input as it is, the transposed codes of
    its output are made again from it.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor | None,
        norm_bias: torch.Tensor | None,
        weight1: torch.Tensor,
        bias1: torch.Tensor | None,
        weight2: torch.Tensor,
        bias2: torch.Tensor | None,
        norm: Norm | None,
        fc1: Linear,
        fc2: Linear,
        kind: str,
        recipe: Recipe,
        training: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (output [T, K], stream [T, K])."""
        assert recipe.input is not None, "the road is for recipes in FP8"
        if training:
            check_backward(recipe, x)
        trains1, trains2 = (training and ctx.needs_input_grad[i] for i in (4, 6))
        mean = rstd = stored_x = None
        stream = x
        if norm is not None:
            normed = norm_input(x, residual, norm, fc1, recipe, training=training, columns=trains1)
            rows, columns, mean, rstd = normed.rows, normed.columns, normed.mean, normed.rstd
            stream = x if normed.summed is None else normed.summed
            stored_x = stream if normed.stored is None else normed.stored
        else:
            stream = x if residual is None else x + residual
            rows, columns = quantize_input(stream, fc1, recipe, columns=trains1, observe=training and fc1.training)
        hidden = output_gemm(rows, None, fc1, recipe, x.dtype, training=training)  # [T, 2F or F]
        activated = activation_quantize(
            hidden,
            kind=kind,
            bias=bias1,
            scaling=recipe.input,
            column_scaling=recipe.wgrad_input if trains2 and recipe.saved_activations is not None else None,
            store_scaling=recipe.saved_activations if training else None,
            **known_scale(fc2, recipe, DelayedState.INPUT, observe=training and fc2.training),
        )
        out = output_gemm(activated.rows, bias2, fc2, recipe, x.dtype, training=training)
        if training:
            ctx.modules, ctx.kind, ctx.recipe = (norm, fc1, fc2), kind, recipe
            ctx.observes = fc1.training, fc2.training
            ctx.bias2_dtype = None if bias2 is None else bias2.dtype
            stored_hidden = hidden if activated.stored is None else activated.stored
            of_norm, of_hidden = (stored_x, norm_weight, mean, rstd), (stored_hidden, activated.columns, bias1)
            save_operands(ctx, columns, *of_norm, *of_hidden, weight1, weight2)
            ctx.set_materialize_grads(False)
        return out, stream

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_stream: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (x, residual, norm weight and bias, weight1, bias1, weight2, bias2)."""
        columns, stored_x, norm_weight, mean, rstd, *of_hidden, weight1, weight2 = saved_operands(ctx)
        if grad is None:
            return only_needed(ctx, grad_stream, grad_stream)
        grad, recipe, (norm, fc1, fc2) = grad.contiguous(), ctx.recipe, ctx.modules
        wants2, observes2 = ctx.needs_input_grad[6], ctx.observes[1]
        grad_rows, grad_columns = quantize_grad_output(grad, fc2, recipe, columns=wants2, observe=observes2)
        grad_h = grad_input_gemm(grad_rows, fc2.backward_operands(recipe), recipe, grad.dtype, None)  # [T, F]
        hidden_rows, hidden_columns, grad_bias1, h_columns = _activation_backward(
            ctx, grad_h, *of_hidden, columns_wanted=columns is not None
        )
        del grad_h  # half a gigabyte at a large layer's size
        grad_weight1 = grad_weight2 = None
        if grad_columns is not None:
            assert h_columns is not None, "saved or made again for a weight that is trained"
            grad_weight2 = grad_weight_gemm(grad_columns, h_columns, recipe, weight2.dtype)
        grad_x = grad_input_gemm(hidden_rows, fc1.backward_operands(recipe), recipe, grad.dtype, None)  # [T, K]
        if hidden_columns is not None:
            grad_weight1 = grad_weight_gemm(hidden_columns, columns, recipe, weight1.dtype)
        grad_gamma = grad_beta = None
        if norm is not None:
            grad_x, grad_gamma, grad_beta = norm_backward(
                grad_x,
                stored_x,
                norm_weight,
                mean,
                rstd,
                kind=norm_kind(norm),
                zero_centered_gamma=norm.zero_centered_gamma,
                grad_residual=grad_stream,
            )
        elif grad_stream is not None:
            grad_x = grad_x + grad_stream
        grad_bias2 = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias2_dtype) if ctx.needs_input_grad[7] else None
        grads = (grad_gamma, grad_beta, grad_weight1, grad_bias1, grad_weight2, grad_bias2)
        return only_needed(ctx, grad_x, grad_x, *grads)


def _activation_backward(
    ctx: Any,
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    h_columns: QuantizedTensor | None,
    bias: torch.Tensor | None,
    *,
    columns_wanted: bool,
) -> tuple[QuantizedTensor, QuantizedTensor | None, torch.Tensor | None, QuantizedTensor | None]:
    """Codes of the gradient before the activation; the bias's gradient; the output's transposed codes for fc2."""
    (_, fc1, fc2), recipe, observes = ctx.modules, ctx.recipe, ctx.observes[0]
    if h_columns is None and ctx.needs_input_grad[6]:
        assert isinstance(stored, torch.Tensor) and recipe.wgrad_input is not None, "saved as it was"
        known = known_scale(fc2, recipe, DelayedState.INPUT, observe=False)
        h_columns = quantize_columns(activation(stored, kind=ctx.kind, bias=bias), recipe.wgrad_input, **known)
    if columns_wanted:
        known = known_scale(fc1, recipe, DelayedState.GRAD_OUTPUT, observe=observes)
        found = activation_backward_quantize(
            grad, stored, kind=ctx.kind, bias=bias, scaling=recipe.grad_output, **known
        )
        return found.rows, found.columns, found.grad_bias, h_columns
    grad_hidden, grad_bias = activation_backward(grad, stored, kind=ctx.kind, bias=bias)
    rows, _ = quantize_grad_output(grad_hidden, fc1, recipe, columns=False, observe=observes)
    return rows, None, grad_bias, h_columns
