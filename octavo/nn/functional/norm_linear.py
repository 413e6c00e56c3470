"""Residual add, norm and linear as one step: the norm's output exists in FP8 alone, and so does what backward needs.

`norm_linear` takes the fused path where the recipe allows and the modules themselves otherwise, with the same bits
forward.
"""

from typing import Any, NamedTuple

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
)
from octavo.nn.functional.saved_operands import only_needed, save_operands, saved_operands
from octavo.nn.layer_norm import LayerNorm
from octavo.nn.linear import Linear
from octavo.nn.rms_norm import RMSNorm
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import row_ranges
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import GEMMS, Recipe
from octavo.ops.moe import ExpertRows
from octavo.ops.norm import NormKind, has_exact_kernel
from octavo.ops.norm.norm_quantize import NormQuantized, exchange_norm_quantize, norm_backward, norm_quantize

Norm = RMSNorm | LayerNorm
Addend = torch.Tensor | PartialRows | ExpertRows  # what is still to be added to a residual stream


def norm_linear(
    x: torch.Tensor | RowShare, residual: Addend | None, norm: Norm, linear: Linear, *, fused: bool
) -> tuple[torch.Tensor, torch.Tensor | RowShare]:
    """linear(norm(x + residual)), and the sum.

    Args:
        x: [T, K], or this rank's share of its rows.
        residual: [T, K] of x's dtype, or this rank's part or experts' rows of it; None for nothing to add.
        fused: the layer's plan allows it.
    Returns:
        (output [T, N], x + residual [T, K] or this rank's share of its rows: what the residual stream goes on with).
    """
    recipe = effective_recipe(linear.recipe)
    if fused and can_infer(recipe, norm, linear):
        plan = linear.begin(recipe)
        rows, stream = infer_norm(x, residual, *norm_operands(norm), plan)
        return linear.infer_codes(rows, plan, x.dtype), stream
    x, residual = whole(x), whole(residual)
    if fused and can_fuse(recipe, norm, linear):
        plan = linear.begin(recipe)
        operands = (*norm_operands(norm), linear.weight, linear.bias, linear.source)
        return NormLinearFunction.apply(x, residual, *operands, plan, torch.is_grad_enabled())
    stream = x if residual is None else x + residual
    return linear(norm(stream)), stream


class NormRule(NamedTuple):
    """How a norm computes, beside its parameters: the ops' keyword arguments."""

    eps: float
    kind: NormKind
    zero_centered_gamma: bool


def norm_operands(norm: Norm) -> tuple[torch.Tensor, torch.Tensor | None, NormRule]:
    """(weight, bias or None, rule) of a norm module."""
    kind: NormKind = "layer_norm" if isinstance(norm, LayerNorm) else "rms_norm"
    return norm.weight, getattr(norm, "bias", None), NormRule(norm.eps, kind, norm.zero_centered_gamma)


def can_fuse(recipe: Recipe, norm: Norm | None, *linears: Linear) -> bool:
    """Whether these modules can run as one Function under a recipe.

    Not under an observer (which wants what lies between them), not where a GEMM is emulated or stays in high precision,
    not for codes loaded without their weight, not where blocks end with ragged parts, and not for linears that are cut
    among ranks, whose gradients meet between the modules. In exact mode with the bits of the modules, forward and
    backward, where the fused kernels have them: see can_infer.
    """
    if not all(recipe.in_fp8(gemm) for gemm in GEMMS) or _is_order_free(norm):
        return False
    assert recipe.weight is not None and recipe.grad_output is not None, "all three GEMMs are in FP8"
    for linear in linears:
        is_plain = not linear.is_cut and linear.observer is None and linear.weight is not None
        if not is_plain or effective_recipe(linear.recipe) != recipe or not _is_own(linear, recipe):
            return False
        if not recipe.weight.is_per_tensor and len(row_ranges(linear.parts, recipe.weight)) > 1:
            return False
    return True


def can_infer(recipe: Recipe, norm: Norm | None, *linears: Linear) -> bool:
    """Whether these modules' forward alone can run fused, without gradients.

    Also from codes without their weight and in exact mode, where the fused kernels have the bits of their parts: on a
    GPU the exact norm is the fused one's, on a CPU it is the order-free op.
    """
    if torch.is_grad_enabled() or recipe.is_emulated or not recipe.in_fp8("output"):
        return False
    if _is_order_free(norm):
        return False
    return all(
        linear.observer is None
        and effective_recipe(linear.recipe) == recipe
        and _is_own(linear, recipe)
        and linear.may_take_codes(recipe)
        for linear in linears
    )


def _is_order_free(norm: Norm | None) -> bool:
    return norm is not None and norm.exact and not has_exact_kernel(norm.weight)


def _is_own(linear: Linear, recipe: Recipe) -> bool:
    """Whether an exact linear's recipe is its own; its forward refuses others."""
    return not linear.exact or recipe == linear.recipe


def norm_input(
    x: torch.Tensor,
    residual: torch.Tensor | ExpertRows | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: NormRule,
    plan: LinearPlan,
    *,
    training: bool,
    columns: bool,
    keeps_norm: bool = False,
) -> tuple[NormQuantized, torch.Tensor]:
    """(the quantized norm of x + residual, with what the backward will need; that sum).

    The norm is the operand of the plan's linear.

    Args:
        weight: the norm's.
        bias: the norm's.
        training: keep the norm's input.
        columns: also make the transposed codes that grad_weight needs.
        keeps_norm: return the norm itself too.
    """
    recipe = plan.recipe
    assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
    normed = norm_quantize(
        x,
        weight,
        bias=bias,
        residual=residual,
        scaling=recipe.input,
        **rule._asdict(),
        column_scaling=recipe.wgrad_input if columns else None,
        store_scaling=plan.saved_activations if training else None,
        keeps_norm=keeps_norm,
        **plan.known(DelayedState.INPUT, observe=training and plan.stages),
    )
    return normed, x if normed.summed is None else normed.summed


def infer_norm(
    x: torch.Tensor | RowShare,
    residual: Addend | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    rule: NormRule,
    plan: LinearPlan,
) -> tuple[QuantizedTensor, torch.Tensor | RowShare]:
    """(the quantized norm of x + residual, that sum or this rank's share of its rows) without gradients.

    Experts' rows, and a residual of which ranks have parts, are put together in the norm's kernel. Where the latter is
    long, each rank does so for a share of the rows, keeps that share of the sum, and the codes of all are gathered.

    Args:
        x: [T, K], or this rank's share of its rows.
        residual: [T, K], or this rank's part or experts' rows of it; None for nothing to add.
        weight: the norm's.
        bias: the norm's.
    """
    scaling = plan.recipe.input
    if isinstance(residual, PartialRows) and not plan.known(DelayedState.INPUT, observe=False):
        assert scaling is not None, "can_infer wants an output GEMM in FP8"
        options = {"bias": bias, "scaling": scaling, **rule._asdict()}
        places = residual.places()
        if places is None and residual.is_long() and scaling.block_size[0] == 1:  # no scale is of two ranks' tokens
            group, num_rows = residual.tensor_group, len(residual.own)
            own = x.own if isinstance(x, RowShare) else x[group.share_of(num_rows)]
            made = norm_quantize(own, weight, residual=residual.share(), **options)
            assert made.summed is not None, "there is a residual"
            return group.gather_row_codes(made.rows, num_rows), RowShare(made.summed, num_rows, group)
        if places is not None:
            x = whole(x)
            fused = exchange_norm_quantize(residual.own, places, residual.is_sum, weight, residual=x, **options)
            if fused is not None and fused.summed is not None:
                return fused.rows, fused.summed
    added = residual if isinstance(residual, ExpertRows) else whole(residual)
    normed, stream = norm_input(whole(x), added, weight, bias, rule, plan, training=False, columns=False)
    return normed.rows, stream


class NormLinearFunction(torch.autograd.Function):
    """See norm_linear. Saves the norm's transposed codes, its input (in FP8 by the recipe) and its statistics."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        residual: torch.Tensor | None,
        norm_weight: torch.Tensor,
        norm_bias: torch.Tensor | None,
        rule: NormRule,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: WeightSource,
        plan: LinearPlan,
        training: bool,
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """-> (output [T, N], stream [T, K])."""
        if training:
            check_backward(plan.recipe, x)
        columns = training and ctx.needs_input_grad[5]
        of_norm = (norm_weight, norm_bias, rule)
        normed, stream = norm_input(x, residual, *of_norm, plan, training=training, columns=columns)
        out = output_gemm(normed.rows, weight, bias, source, plan, x.dtype, training=training)
        if training:
            ctx.rule, ctx.source, ctx.plan = rule, source, plan
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
        """Gradients of (x, residual, norm weight and bias, rule, weight, bias)."""
        columns, stored, norm_weight, mean, rstd, weight = saved_operands(ctx)
        if grad is None:
            return only_needed(ctx, grad_stream, grad_stream)
        grad = grad.contiguous()
        plan, rule = ctx.plan, ctx.rule
        grad_rows, grad_columns = quantize_grad_output(grad, plan, columns=columns is not None)
        operands = ctx.source.backward(weight, plan, after=grad_rows.scale)
        grad_normed = grad_input_gemm(grad_rows, operands, plan.recipe, grad.dtype, None)
        del operands
        grad_weight = None
        if grad_columns is not None:
            grad_weight = grad_weight_gemm(grad_columns, columns, plan.recipe, weight.dtype)
        grad_x, grad_gamma, grad_beta = norm_backward(
            grad_normed,
            stored,
            norm_weight,
            mean,
            rstd,
            kind=rule.kind,
            zero_centered_gamma=rule.zero_centered_gamma,
            grad_residual=grad_stream,
        )
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[6] else None
        return only_needed(ctx, grad_x, grad_x, grad_gamma, grad_beta, None, grad_weight, grad_bias)
