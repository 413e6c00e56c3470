"""The three GEMMs of every expert as one autograd Function, over rows that are sorted by expert."""

import functools
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.nn.functional.linear import check_backward, observe_backward, quantize_grad_output, quantize_input
from octavo.nn.functional.saved_operands import save_operands, saved_operands
from octavo.nn.weights.experts import ExpertCodes, ExpertWeight
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.grouped_mm import (
    Gather,
    grouped_mm,
    grouped_mm_columns,
    scaled_grouped_mm,
    scaled_grouped_mm_columns,
)
from octavo.ops.gemm.grouped_swiglu import grouped_swiglu_quantize
from octavo.ops.quantize import quantize

ExpertSource = ExpertWeight | ExpertCodes


class GroupedLinearFunction(torch.autograd.Function):
    """Each GEMM in FP8 or not by the recipe. Saves what functional.linear's Functions do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        offsets: torch.Tensor,
        source: ExpertSource,
        plan: LinearPlan,
        training: bool,
    ) -> torch.Tensor:
        """x [R, K] -> [R, N] of x's dtype."""
        recipe = plan.recipe
        needs_wgrad = training and weight is not None and ctx.needs_input_grad[1]
        rows = columns = None
        if training:
            check_backward(recipe, x)
        if recipe.is_fp8:
            both = needs_wgrad and recipe.in_fp8("grad_weight")
            rows, columns = quantize_input(x, plan, columns=both, observe=training and plan.stages)
        if rows is not None and recipe.in_fp8("output"):
            out = grouped_output(rows, weight, source, plan, offsets, x.dtype, observe=training)
        else:
            assert weight is not None, "experts of codes alone are refused before"
            out = grouped_mm(x, _by_expert(weight, source).to(x.dtype), offsets, exact=plan.exact)
        if plan.observer is not None:
            plan.observer("input", x, rows)
            if weight is not None:
                plan.observer("weight", weight, source.whole(weight, plan) if recipe.is_fp8 else None)
            plan.observer("output", out, None)
        if training:
            ctx.source, ctx.plan, ctx.in_dtype = source, plan, x.dtype
            keeps_input = not recipe.is_fp8 or "grad_weight" in recipe.high_precision_gemms
            saved = (x if keeps_input else columns or rows) if needs_wgrad else None
            save_operands(ctx, offsets, weight, saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [R, N] -> gradients of (x, weight)."""
        offsets, weight, saved = saved_operands(ctx)
        grad, source, plan = grad.contiguous(), ctx.source, ctx.plan
        recipe = plan.recipe
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        rows = columns = None
        if recipe.has_fp8_backward:
            both = wants_weight and recipe.in_fp8("grad_weight")
            rows, columns = quantize_grad_output(grad, plan, columns=both)
        grad_x = _grad_input(grad, rows, weight, source, plan, offsets, ctx.in_dtype) if wants_x else None
        grad_weight = None
        if wants_weight:
            fast = "grad_weight" in recipe.fast_accum
            if columns is not None:
                by_expert = scaled_grouped_mm_columns(columns, saved, offsets, out_dtype=weight.dtype, fast_accum=fast)
            else:
                x = saved.dequantize(grad.dtype) if isinstance(saved, QuantizedTensor) else saved.to(grad.dtype)
                by_expert = grouped_mm_columns(grad.t(), x.t(), offsets, out_dtype=weight.dtype)
            grad_weight = by_expert.view(weight.shape)
        observe_backward(plan.observer, grad, rows, grad_x, grad_weight)
        return grad_x, grad_weight, None, None, None, None


def grouped_output(
    rows: QuantizedTensor,
    weight: torch.Tensor | None,
    source: ExpertSource,
    plan: LinearPlan,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    observe: bool,
    gather: Gather | None = None,
) -> torch.Tensor:
    """rows [R, K] codes, or what they are gathered from, times their experts' weights -> [R, N] of out_dtype."""
    fast = "output" in plan.recipe.fast_accum and not plan.exact
    multiply = functools.partial(
        scaled_grouped_mm, gather=gather, out_dtype=out_dtype, exact=plan.exact, fast_accum=fast
    )
    pieces = [
        multiply(rows, codes, offsets)
        for _, codes in source.shapes.by_expert(source.forward(weight, plan, observe=observe))
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def grouped_swiglu(
    rows: QuantizedTensor,
    weight: torch.Tensor | None,
    source: ExpertSource,
    plan: LinearPlan,
    offsets: torch.Tensor,
    dtype: torch.dtype,
    *,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    gather: Gather | None,
) -> QuantizedTensor:
    """grouped_output of gate and up [R, 2F], then the codes [R, F] of SwiGLU of it."""
    operands = source.shapes.by_expert(source.forward(weight, plan))
    if len(operands) > 1:  # gate and up apart
        out = grouped_output(rows, weight, source, plan, offsets, dtype, observe=False, gather=gather)
        return activation_quantize(out, kind="swiglu", scaling=scaling, quant_scale=quant_scale).rows
    fast = "output" in plan.recipe.fast_accum and not plan.exact
    return grouped_swiglu_quantize(
        rows, operands[0][1], offsets, scaling=scaling, gather=gather, quant_scale=quant_scale, dtype=dtype,
        exact=plan.exact, fast_accum=fast,
    )  # fmt: skip


def _grad_input(
    grad: torch.Tensor,
    rows: QuantizedTensor | None,
    weight: torch.Tensor | None,
    source: ExpertSource,
    plan: LinearPlan,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Sum over the parts of grad[:, part] @ the row's expert's weight[part]: [R, K] of out_dtype."""
    recipe = plan.recipe
    if rows is None or not recipe.in_fp8("grad_input"):
        decoded = _decoded(weight, source, plan, grad.dtype)
        return grouped_mm(grad, decoded.to(grad.dtype).transpose(1, 2), offsets, out_dtype=out_dtype)
    fast, operands = "grad_input" in recipe.fast_accum, source.shapes.by_expert(source.backward(weight, plan))
    if len(operands) == 1:
        return scaled_grouped_mm(rows, operands[0][1], offsets, out_dtype=out_dtype, fast_accum=fast)
    total = None
    for part, codes in operands:
        piece = quantize(grad[:, part].contiguous(), rows.scaling)
        out = scaled_grouped_mm(piece, codes, offsets, out_dtype=torch.float32, fast_accum=fast)
        total = out if total is None else total + out
    assert total is not None, "an expert has at least one part"
    return total.to(out_dtype)


def _by_expert(weight: torch.Tensor, source: ExpertSource) -> torch.Tensor:
    """The weight [E * N, K] as [E, N, K], apart from autograd."""
    shapes = source.shapes
    return weight.detach().view(shapes.num_experts, shapes.expert_rows, shapes.in_features)


def _decoded(weight: torch.Tensor | None, source: ExpertSource, plan: LinearPlan, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K]: the weight itself for a high-precision GEMM, its codes decoded for a high-precision backward."""
    if not plan.recipe.is_fp8 or "grad_input" in plan.recipe.high_precision_gemms:
        assert weight is not None, "experts of codes alone are refused before"
        return _by_expert(weight, source)
    whole = torch.cat([codes.dequantize(dtype) for _, codes in source.forward(weight, plan)])
    shapes = source.shapes
    return whole.view(shapes.num_experts, shapes.expert_rows, shapes.in_features)
