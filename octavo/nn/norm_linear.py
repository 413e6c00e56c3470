"""Residual add, norm and linear as one step: the norm's output exists in FP8 alone, and so does what backward needs.

`norm_linear` takes this road where the recipe allows and the modules themselves otherwise, with the same bits forward.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.nn.autocast_context import effective_recipe
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.linear import Linear
from octavo.nn.linear_function import (
    check_backward,
    grad_input_gemm,
    grad_weight_gemm,
    known_scale,
    output_gemm,
    quantize_grad_output,
)
from octavo.nn.quantized_weight import DelayedState, row_ranges
from octavo.nn.rms_norm import RMSNorm
from octavo.nn.saved_operands import only_needed, save_operands, saved_operands
from octavo.numerics.recipe import GEMMS, Recipe
from octavo.ops.norm import NormKind, has_exact_kernel
from octavo.ops.norm.norm_quantize import NormQuantized, norm_backward, norm_quantize

Norm = RMSNorm | LayerNorm


def norm_linear(
    x: torch.Tensor, residual: torch.Tensor | None, norm: Norm, linear: Linear
) -> tuple[torch.Tensor, torch.Tensor]:
    """linear(norm(x + residual)), and the sum.

    Args:
        x: [T, K]. residual: [T, K] of x's dtype, or None for nothing to add.
    Returns:
        (output [T, N], x + residual [T, K]: what the residual stream goes on with).
    """
    recipe = effective_recipe(linear.recipe)
    if can_infer(recipe, norm, linear):
        linear.begin_forward(recipe)
        normed = norm_input(x, residual, norm, linear, recipe, training=False, columns=False)
        out = output_gemm(normed.rows, linear.bias, linear, recipe, x.dtype, training=False)
        return out, x if normed.summed is None else normed.summed
    if can_fuse(recipe, norm, linear):
        linear.begin_forward(recipe)
        weights = (norm.weight, getattr(norm, "bias", None), linear.weight, linear.bias)
        return NormLinearFunction.apply(x, residual, *weights, norm, linear, recipe, torch.is_grad_enabled())
    stream = x if residual is None else x + residual
    return linear(norm(stream)), stream


def norm_kind(norm: Norm) -> NormKind:
    """The op's name of a norm module."""
    return "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm"


def can_fuse(recipe: Recipe, norm: Norm | None, *linears: Linear) -> bool:
    """Whether these modules can run as one Function under a recipe.

    Not in exact mode, not under an observer or a forward hook (which want what lies between them), not where a GEMM is
    emulated or stays in high precision, not for codes loaded without their weight, not where blocks end with ragged
    parts, and not for modules with a forward of their own.
    """
    if not all(recipe.in_fp8(gemm) for gemm in GEMMS) or (norm is not None and norm.exact):
        return False
    if not _are_plain(norm, *linears):
        return False
    assert recipe.weight is not None and recipe.grad_output is not None, "all three GEMMs are in FP8"
    for linear in linears:
        is_plain = not linear.exact and linear.observer is None and linear.weight is not None
        if not is_plain or effective_recipe(linear.recipe) != recipe:
            return False
        if not recipe.weight.is_per_tensor and len(row_ranges(linear.parts, recipe.weight)) > 1:
            return False
    return True


def can_infer(recipe: Recipe, norm: Norm | None, *linears: Linear) -> bool:
    """Whether these modules' forward alone can run fused, without gradients.

    Also from codes without their weight and in exact mode, where the fused kernels have the bits of their parts: on a
    GPU the exact norm is the fused one's, elsewhere it is the order-free op.
    """
    if torch.is_grad_enabled() or recipe.is_emulated or not recipe.in_fp8("output"):
        return False
    if norm is not None and norm.exact and not has_exact_kernel(norm.weight):
        return False
    own = all(linear.observer is None and effective_recipe(linear.recipe) == recipe for linear in linears)
    return own and _are_plain(norm, *linears)


def _are_plain(*modules: Norm | Linear | None) -> bool:
    """Whether nobody watches these modules or has given them a forward of their own."""
    kinds = (Linear, RMSNorm, LayerNorm)
    present = [module for module in modules if module is not None]
    return not any(is_hooked(m) or type(m) not in kinds or "forward" in vars(m) for m in present)


def is_hooked(*modules: torch.nn.Module) -> bool:
    """Whether somebody watches the forward or backward of one of these modules, which a fused step would not call."""
    kinds = ("_forward_hooks", "_forward_pre_hooks", "_backward_hooks", "_backward_pre_hooks")
    return any(getattr(module, kind) for module in modules for kind in kinds)


def norm_input(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    norm: Norm,
    linear: Linear,
    recipe: Recipe,
    *,
    training: bool,
    columns: bool,
) -> NormQuantized:
    """The quantized norm of x + residual, as linear's operand, with what the backward will need.

    Args:
        training: keep the norm's input. columns: also make the transposed codes that grad_weight needs.
    """
    assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
    return norm_quantize(
        x,
        norm.weight,
        bias=getattr(norm, "bias", None),
        eps=norm.eps,
        kind=norm_kind(norm),
        zero_centered_gamma=norm.zero_centered_gamma,
        residual=residual,
        scaling=recipe.input,
        column_scaling=recipe.wgrad_input if columns else None,
        store_scaling=recipe.saved_activations if training else None,
        **known_scale(linear, recipe, DelayedState.INPUT, observe=training and linear.training),
    )


class NormLinearFunction(torch.autograd.Function):
    """See norm_linear. Saves the norm's transposed codes, its input (in FP8 by the recipe) and its statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        norm: Norm,
        linear: Linear,
        recipe: Recipe,
        training: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (output [T, N], stream [T, K])."""
        if training:
            check_backward(recipe, x)
        columns = training and ctx.needs_input_grad[4]
        normed = norm_input(x, residual, norm, linear, recipe, training=training, columns=columns)
        stream = x if normed.summed is None else normed.summed
        out = output_gemm(normed.rows, bias, linear, recipe, x.dtype, training=training)
        if training:
            ctx.norm, ctx.linear, ctx.recipe, ctx.observes = norm, linear, recipe, linear.training
            ctx.bias_dtype = None if bias is None else bias.dtype
            stored = stream if normed.stored is None else normed.stored
            save_operands(ctx, normed.columns, stored, norm_weight, normed.mean, normed.rstd, weight)
            ctx.set_materialize_grads(False)
        return out, stream

    @staticmethod
    @once_differentiable
    def backward(
        ctx: Any, grad: torch.Tensor | None, grad_stream: torch.Tensor | None
    ) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (x, residual, norm weight and bias, weight, bias)."""
        columns, stored, norm_weight, mean, rstd, weight = saved_operands(ctx)
        if grad is None:
            return only_needed(ctx, grad_stream, grad_stream)
        grad = grad.contiguous()
        recipe, linear, norm = ctx.recipe, ctx.linear, ctx.norm
        wants_columns = columns is not None
        grad_rows, grad_columns = quantize_grad_output(
            grad, linear, recipe, columns=wants_columns, observe=ctx.observes
        )
        grad_normed = grad_input_gemm(grad_rows, linear.backward_operands(recipe), recipe, grad.dtype, None)
        grad_weight = None
        if grad_columns is not None:
            grad_weight = grad_weight_gemm(grad_columns, columns, recipe, weight.dtype)
        grad_x, grad_gamma, grad_beta = norm_backward(
            grad_normed,
            stored,
            norm_weight,
            mean,
            rstd,
            kind=norm_kind(norm),
            zero_centered_gamma=norm.zero_centered_gamma,
            grad_residual=grad_stream,
        )
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[5] else None
        return only_needed(ctx, grad_x, grad_x, grad_gamma, grad_beta, grad_weight, grad_bias)
