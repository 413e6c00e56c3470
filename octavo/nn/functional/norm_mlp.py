"""Residual add, norm and a feed-forward block as one step in FP8: what lies between its GEMMs exists in 8 bits alone.

`norm_mlp` takes the fused path where the recipe allows and the modules themselves otherwise, with the same bits
forward.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.distributed.tensor_group import PartialRows, RowShare, whole
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.linear import (
    check_backward,
    grad_input_gemm,
    grad_weight_gemm,
    output_gemm,
    quantize_grad_output,
    quantize_input,
)
from octavo.nn.functional.norm_linear import Norm, NormRule, can_fuse, can_infer, infer_norm, norm_input, norm_operands
from octavo.nn.functional.saved_operands import only_needed, save_operands, saved_operands
from octavo.nn.linear import Linear
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.activation import (
    activation,
    activation_backward,
    activation_backward_quantize,
    activation_quantize,
)
from octavo.ops.norm.norm_quantize import norm_backward
from octavo.ops.quantize import quantize_columns


def norm_mlp(
    x: torch.Tensor | RowShare,
    residual: torch.Tensor | PartialRows | None,
    norm: Norm | None,
    fc1: Linear,
    fc2: Linear,
    kind: str,
    *,
    fused: bool,
) -> tuple[torch.Tensor | PartialRows, torch.Tensor | RowShare]:
    """fc2(activation(fc1(norm(x + residual)))), or this rank's part of it, and the sum.

    Args:
        x: [T, K], or this rank's share of its rows.
        residual: [T, K] of x's dtype, or this rank's part of it; None for nothing to add.
        norm: None for none.
        kind: "swiglu" (fc1 makes gate and up) or "gelu" (tanh form).
        fused: the layer's plan allows it.
    Returns:
        (output [T, K], x + residual [T, K] or this rank's share of its rows: what the residual stream goes on with).
    """
    recipe = effective_recipe(fc1.recipe)
    fused = fused and (kind == "gelu" or fc1.bias is None)
    if fused and can_infer(recipe, norm, fc1, fc2):
        return _infer(x, residual, norm, fc1, fc2, kind, recipe)
    x, residual = whole(x), whole(residual)
    if fused and can_fuse(recipe, norm, fc1, fc2):
        plans = fc1.begin(recipe), fc2.begin(recipe)
        of_norm = (None, None, None) if norm is None else norm_operands(norm)
        weights, sources = (fc1.weight, fc1.bias, fc2.weight, fc2.bias), (fc1.source, fc2.source)
        return NormMLPFunction.apply(x, residual, *of_norm, *weights, sources, plans, kind, torch.is_grad_enabled())
    stream = x if residual is None else x + residual
    normed = stream if norm is None else norm(stream)
    if kind == "gelu":
        bias: list[torch.Tensor | None] = []
        hidden = fc1(normed, bias_to=bias)
        return fc2(ActivationFunction.apply(hidden, *bias, kind)), stream
    return fc2(ActivationFunction.apply(fc1(normed), None, kind)), stream


def _infer(
    x: torch.Tensor | RowShare,
    residual: torch.Tensor | PartialRows | None,
    norm: Norm | None,
    fc1: Linear,
    fc2: Linear,
    kind: str,
    recipe: Recipe,
) -> tuple[torch.Tensor | PartialRows, torch.Tensor | RowShare]:
    """norm_mlp without gradients: four launches, or five."""
    plans = fc1.begin(recipe), fc2.begin(recipe)
    if norm is not None:
        rows, stream = infer_norm(x, residual, *norm_operands(norm), plans[0])
    else:
        x, residual = whole(x), whole(residual)
        stream = x if residual is None else x + residual
        rows, _ = quantize_input(stream, plans[0], columns=False, observe=False)
    return infer_mlp(rows, fc1, fc2, kind, plans, x.dtype), stream


def infer_mlp(
    rows: QuantizedTensor, fc1: Linear, fc2: Linear, kind: str, plans: tuple[LinearPlan, LinearPlan], dtype: torch.dtype
) -> torch.Tensor | PartialRows:
    """The block without gradients of codes [T, K], where can_infer allows -> [T, K], or this rank's part of it."""
    scaling = plans[0].recipe.input
    assert scaling is not None, "can_infer wants an output GEMM in FP8"
    hidden = fc1.infer_codes(rows, plans[0], dtype, with_bias=False)  # [T, 2F or F]
    known = plans[1].known(DelayedState.INPUT, observe=False)
    activated = activation_quantize(hidden, kind=kind, bias=fc1.bias, scaling=scaling, **known).rows
    return fc2.infer_parts(activated, plans[1], dtype)


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
        rule: NormRule | None,
        weight1: torch.Tensor,
        bias1: torch.Tensor | None,
        weight2: torch.Tensor,
        bias2: torch.Tensor | None,
        sources: tuple[WeightSource, WeightSource],
        plans: tuple[LinearPlan, LinearPlan],
        kind: str,
        training: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (output [T, K], stream [T, K])."""
        (source1, source2), (plan1, plan2) = sources, plans
        recipe = plan1.recipe
        assert recipe.input is not None, "the fused path is for recipes in FP8"
        if training:
            check_backward(recipe, x)
        trains1, trains2 = (training and ctx.needs_input_grad[i] for i in (5, 7))
        mean = rstd = stored_x = None
        if rule is not None:
            assert norm_weight is not None, "a norm has a weight"
            of_norm = (norm_weight, norm_bias, rule)
            normed, stream = norm_input(x, residual, *of_norm, plan1, training=training, columns=trains1)
            rows, columns, mean, rstd = normed.rows, normed.columns, normed.mean, normed.rstd
            stored_x = stream if normed.stored is None else normed.stored
        else:
            stream = x if residual is None else x + residual
            rows, columns = quantize_input(stream, plan1, columns=trains1, observe=training and plan1.stages)
        hidden = output_gemm(rows, weight1, None, source1, plan1, x.dtype, training=training)  # [T, 2F or F]
        activated = activation_quantize(
            hidden,
            kind=kind,
            bias=bias1,
            scaling=recipe.input,
            column_scaling=recipe.wgrad_input if trains2 and recipe.saved_activations is not None else None,
            store_scaling=plan1.saved_activations if training else None,
            **plan2.known(DelayedState.INPUT, observe=training and plan2.stages),
        )
        out = output_gemm(activated.rows, weight2, bias2, source2, plan2, x.dtype, training=training)
        if training:
            ctx.rule, ctx.sources, ctx.plans, ctx.kind = rule, sources, plans, kind
            ctx.bias2_dtype = None if bias2 is None else bias2.dtype
            stored_hidden = hidden if activated.stored is None else activated.stored
            of_hidden = (stored_hidden, activated.columns, bias1)
            save_operands(ctx, columns, stored_x, norm_weight, mean, rstd, *of_hidden, weight1, weight2)
            ctx.set_materialize_grads(False)
        return out, stream

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_stream: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (x, residual, norm weight and bias, rule, weight1, bias1, weight2, bias2)."""
        columns, stored_x, norm_weight, mean, rstd, *of_hidden, weight1, weight2 = saved_operands(ctx)
        if grad is None:
            return only_needed(ctx, grad_stream, grad_stream)
        grad, rule, (source1, source2), (plan1, plan2) = grad.contiguous(), ctx.rule, ctx.sources, ctx.plans
        recipe = plan1.recipe
        grad_rows, grad_columns = quantize_grad_output(grad, plan2, columns=ctx.needs_input_grad[7])
        operands = source2.backward(weight2, plan2, after=grad_rows.scale)
        grad_h = grad_input_gemm(grad_rows, operands, recipe, grad.dtype, None)  # [T, F]
        del operands
        hidden_rows, hidden_columns, grad_bias1, h_columns = _activation_backward(
            ctx, grad_h, *of_hidden, columns_wanted=columns is not None
        )
        del grad_h  # half a gigabyte at a large layer's size
        grad_weight1 = grad_weight2 = None
        if grad_columns is not None:
            assert h_columns is not None, "saved or made again for a weight that is trained"
            grad_weight2 = grad_weight_gemm(grad_columns, h_columns, recipe, weight2.dtype)
        operands = source1.backward(weight1, plan1, after=hidden_rows.scale)
        grad_x = grad_input_gemm(hidden_rows, operands, recipe, grad.dtype, None)  # [T, K]
        del operands
        if hidden_columns is not None:
            grad_weight1 = grad_weight_gemm(hidden_columns, columns, recipe, weight1.dtype)
        grad_gamma = grad_beta = None
        if rule is not None:
            grad_x, grad_gamma, grad_beta = norm_backward(
                grad_x,
                stored_x,
                norm_weight,
                mean,
                rstd,
                kind=rule.kind,
                zero_centered_gamma=rule.zero_centered_gamma,
                grad_residual=grad_stream,
            )
        elif grad_stream is not None:
            grad_x = grad_x + grad_stream
        grad_bias2 = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias2_dtype) if ctx.needs_input_grad[8] else None
        grads = (grad_gamma, grad_beta, None, grad_weight1, grad_bias1, grad_weight2, grad_bias2)
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
    plan1, plan2 = ctx.plans
    recipe = plan1.recipe
    if h_columns is None and ctx.needs_input_grad[7]:
        assert isinstance(stored, torch.Tensor) and recipe.wgrad_input is not None, "saved as it was"
        known = plan2.known(DelayedState.INPUT, observe=False)
        h_columns = quantize_columns(activation(stored, kind=ctx.kind, bias=bias), recipe.wgrad_input, **known)
    if columns_wanted:
        known = plan1.known(DelayedState.GRAD_OUTPUT, observe=plan1.stages)
        found = activation_backward_quantize(
            grad, stored, kind=ctx.kind, bias=bias, scaling=recipe.grad_output, **known
        )
        return found.rows, found.columns, found.grad_bias, h_columns
    grad_hidden, grad_bias = activation_backward(grad, stored, kind=ctx.kind, bias=bias)
    rows, _ = quantize_grad_output(grad_hidden, plan1, columns=False)
    return rows, None, grad_bias, h_columns
