"""The three GEMMs of a linear as autograd Functions: one for recipes in FP8, one for high precision.

output = input @ weight.t(); grad_input = grad_output @ weight; grad_weight = grad_output.t() @ input. A GEMM's FP8
operands are quantized along the dimension that it sums over: K (in), N (out) and T (tokens) respectively. Fused
modules use the same pieces: quantize_input, output_gemm, quantize_grad_output, grad_input_gemm, grad_weight_gemm.
"""

import functools
import warnings
from typing import Any

import torch

from octavo.distributed.token_shards import TokenShards
from octavo.nn.functional.saved_operands import first_order_only
from octavo.nn.weights.cut import quantize_shared, spans
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import Operands
from octavo.nn.weights.plan import LinearPlan, Observer
from octavo.nn.weights.source import WeightSource
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.recipe_support import decoded_backward
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.gemm.skinny_mm import MAX_TOKENS, skinny_mm
from octavo.ops.quantize import quantize, quantize_both, quantize_columns


@functools.cache  # once a process
def warn_of_fp16() -> None:
    """Say that FP8 hides an overflow of fp16 gradients; not while torch.compile traces, which stops at a warning."""
    warnings.warn(
        "an FP8 linear trains on a float16 input: its casts saturate, so that an fp16 gradient that has overflowed "
        "goes on as a finite one, which torch.amp.GradScaler cannot see; compute in bfloat16, or keep the loss scale "
        "fixed and low",
        stacklevel=4,
    )


def check_backward(recipe: Recipe, x: torch.Tensor) -> None:
    """Refuse to train where the input is if the backward would be decoded there: the device of autocast, or of a model
    that was moved after its conversion, is known no earlier.

    Raises:
        BackendError: the backward would be decoded there.
    """
    if x.is_cuda and recipe.decodes_backward:
        raise decoded_backward(recipe)


def quantize_input(
    x: torch.Tensor, plan: LinearPlan, *, columns: bool, observe: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """The input's codes for the output GEMM [T, K] and, where columns are wanted, for grad_weight [K, T]."""
    recipe = plan.recipe
    assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
    if plan.token_shards is not None:
        return _quantize_own(x, plan, plan.token_shards, columns=columns)
    known = plan.known(DelayedState.INPUT, observe=observe)
    if plan.cut_dim == "in" and not known and spans(recipe.input, True):
        return _quantize_cut(x, recipe.input, recipe.wgrad_input if columns else None, plan)
    if columns:
        return quantize_both(x, recipe.input, column_scaling=recipe.input_for_grad_weight, **known)
    return quantize(x, recipe.input, **known), None


def _quantize_cut(
    x: torch.Tensor, scaling: Scaling, column_scaling: Scaling | None, plan: LinearPlan
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """Codes of x [T, columns of this rank] for a GEMM over the columns of all ranks and, where asked for, over T."""
    rows, columns = quantize_shared(x, scaling, plan.tensor_group), None
    if column_scaling is not None:
        is_shared = spans(column_scaling, False)
        columns = (
            quantize_shared(x, column_scaling, plan.tensor_group, columns=True)
            if is_shared
            else quantize_columns(x, column_scaling)
        )
    return rows, columns


def _quantize_own(
    x: torch.Tensor, plan: LinearPlan, shards: TokenShards, *, columns: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """Codes of all tokens [T, K] and, where columns are wanted, of this rank's: [K, t], which the backward gathers."""
    recipe = plan.recipe
    assert recipe.input is not None and recipe.wgrad_input is not None, "ColumnLinear looks at the recipe"
    of_columns = None
    if columns and not spans(recipe.wgrad_input, True):
        rows, of_columns = quantize_both(x, recipe.input, column_scaling=recipe.input_for_grad_weight)
    else:
        rows = quantize(x, recipe.input)
        if columns:
            of_columns = quantize_shared(x, recipe.wgrad_input, shards.group, columns=True)
    return shards.gather_codes(rows, 0), of_columns


def output_gemm(
    rows: QuantizedTensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    source: WeightSource,
    plan: LinearPlan,
    out_dtype: torch.dtype,
    *,
    training: bool,
    whole: QuantizedTensor | None = None,
) -> torch.Tensor:
    """rows [T, K] codes times the weight -> [T, N] of out_dtype.

    Args:
        weight: [N, K], or None for codes alone; the source has its operands.
        whole: those as one operand, where the caller has it.
    """
    fast = "output" in plan.recipe.fast_accum
    whole = whole or source.whole(weight, plan, observe=training)
    is_inference = not (training or torch.compiler.is_compiling())
    if whole is not None and is_inference and rows.shape[0] <= MAX_TOKENS:
        return skinny_mm(rows, whole, bias=bias, out_dtype=out_dtype, exact=plan.exact)
    if whole is not None:
        return scaled_mm(rows, whole, bias=bias, out_dtype=out_dtype, exact=plan.exact, fast_accum=fast)
    pieces = []
    for part, w in source.forward(weight, plan, observe=training):
        own_bias = None if bias is None else bias[part]
        pieces.append(scaled_mm(rows, w, bias=own_bias, out_dtype=out_dtype, exact=plan.exact, fast_accum=fast))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def quantize_grad_output(
    grad: torch.Tensor, plan: LinearPlan, *, columns: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """grad_output's codes for grad_input [T, N] and, where columns are wanted, for grad_weight [N, T]."""
    recipe = plan.recipe
    assert recipe.grad_output is not None, f"recipe {recipe.name!r} has no FP8 backward"
    known = plan.known(DelayedState.GRAD_OUTPUT, observe=plan.stages)
    if plan.cut_dim == "out" and not known and spans(recipe.grad_output, True):
        return _quantize_cut(grad, recipe.grad_output, recipe.grad_output if columns else None, plan)
    if columns:
        return quantize_both(grad, recipe.grad_output, **known)
    return quantize(grad, recipe.grad_output, **known), None


def grad_input_gemm(
    rows: QuantizedTensor, operands: Operands, recipe: Recipe, out_dtype: torch.dtype, grad: torch.Tensor | None
) -> torch.Tensor:
    """Sum over the weight's row ranges of grad[:, range] @ weight[range]: [T, K] of out_dtype.

    Args:
        rows: grad_output's codes [T, N].
        grad: its source, needed where blocks end with a fused weight's parts.
    """
    fast = "grad_input" in recipe.fast_accum
    if len(operands) == 1:
        return scaled_mm(rows, operands[0][1], out_dtype=out_dtype, fast_accum=fast)
    assert grad is not None, "ragged parts are quantized one by one from the source"
    total = None
    for part, w in operands:
        piece = quantize(grad[:, part], rows.scaling)
        out = scaled_mm(piece, w, out_dtype=torch.float32, fast_accum=fast)
        total = out if total is None else total + out
    assert total is not None, "a linear has at least one row range"
    return total.to(out_dtype)


def grad_weight_gemm(
    grad_columns: QuantizedTensor, input_columns: QuantizedTensor, recipe: Recipe, out_dtype: torch.dtype
) -> torch.Tensor:
    """grad_output [N, T] times the input [K, T], both as transposed codes -> [N, K] of out_dtype."""
    fast = "grad_weight" in recipe.fast_accum
    return scaled_mm(grad_columns, input_columns, out_dtype=out_dtype, fast_accum=fast)


def scaled_linear(
    x: torch.Tensor,
    weight: torch.Tensor | None,
    bias: torch.Tensor | None,
    source: WeightSource,
    plan: LinearPlan,
    *,
    training: bool,
    needs_wgrad: bool,
    needs_dgrad: bool = False,
) -> tuple[torch.Tensor, QuantizedTensor | None]:
    """The output GEMM of a linear under an FP8 recipe that is not emulated.

    Args:
        x: [T, K].
        training: with gradients.
        needs_wgrad: also quantize x for grad_weight.
        needs_dgrad: x has a gradient.
    Returns:
        (output [T, N] of x's dtype, the operand to save for grad_weight or None).
    """
    recipe = plan.recipe
    high = recipe.high_precision_gemms
    both_ways = needs_wgrad and recipe.grad_output is not None and "grad_weight" not in high and not plan.saves_input
    rows, columns = quantize_input(x, plan, columns=both_ways, observe=training and plan.stages)
    if "output" not in high:
        whole = None
        if needs_wgrad and needs_dgrad and weight is not None and _may_prequantize(x, weight, plan):
            whole = source.whole_of_training(weight, plan)
        out = output_gemm(rows, weight, bias, source, plan, x.dtype, training=training, whole=whole)
    else:
        assert weight is not None, "a layer of codes alone is refused before"
        out = hp_mm(x, weight.to(x.dtype), bias=bias, exact=plan.exact)
    if plan.observer is not None:
        plan.observer("input", x, rows)
        if weight is not None and source.has_values:
            plan.observer("weight", weight, source.whole(weight, plan))
        plan.observer("output", out, None)
    return out, columns if columns is not None else rows


def _may_prequantize(x: torch.Tensor, weight: torch.Tensor, plan: LinearPlan) -> bool:
    """Whether a training forward makes the weight's codes for the backward as well, from one read of it.

    They then live from here on. What the layer saves for its weight gradient, a byte an element of the input, makes
    room for that gradient in the backward: where it is no larger, memory is fullest when the backward ends, and the
    codes are there by then anyway.
    """
    is_fp8 = plan.recipe.grad_output is not None and not plan.recipe.high_precision_gemms
    return is_fp8 and not plan.saves_input and x.numel() <= weight.nbytes


class ScaledLinearFunction(torch.autograd.Function):
    """A linear in FP8. Saves FP8 codes for backward, never a high-precision copy of the input.

    A GEMM of recipe.high_precision_gemms takes high-precision operands instead; where that is grad_weight, or the plan
    asks for it (saves_input), the input itself is saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        source: WeightSource,
        plan: LinearPlan,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        check_backward(plan.recipe, x)
        needs_dgrad, needs_wgrad = ctx.needs_input_grad[:2]
        needs = {"needs_wgrad": weight is not None and needs_wgrad, "needs_dgrad": needs_dgrad}
        out, saved = scaled_linear(x, weight, bias, source, plan, training=True, **needs)
        ctx.source, ctx.plan, ctx.in_dtype = source, plan, x.dtype
        ctx.bias_dtype = None if bias is None else bias.dtype
        needs_wgrad = needs["needs_wgrad"]
        ctx.keeps_input = needs_wgrad and (plan.saves_input or "grad_weight" in plan.recipe.high_precision_gemms)
        ctx.input_scaling = saved.scaling if saved is not None and needs_wgrad and not ctx.keeps_input else None
        codes = (saved.qdata, saved.scale) if saved is not None and ctx.input_scaling is not None else (None, None)
        # the weight is saved for its version: codes of another one would be silently wrong
        ctx.save_for_backward(weight, x if ctx.keeps_input else None, *codes)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        grad, plan = grad.contiguous(), ctx.plan
        recipe = plan.recipe
        weight, x, codes, scale = ctx.saved_tensors
        saved = None if codes is None else QuantizedTensor.trusted(codes, scale, ctx.input_scaling)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_rows = grad_columns = grad_x = grad_weight = None
        if recipe.grad_output is not None:
            columns = wants_weight and "grad_weight" not in recipe.high_precision_gemms
            grad_rows, grad_columns = quantize_grad_output(grad, plan, columns=columns)
        if wants_x:
            grad_x = _grad_input(grad, grad_rows, weight, ctx.source, plan, ctx.in_dtype)
            grad_x = grad_x if plan.token_shards is None else plan.token_shards.add(grad_x)
        if wants_weight:
            grad_weight = _grad_weight(grad, grad_columns, saved, x, weight, plan)
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None
        if plan.observer is not None:
            observe_backward(plan.observer, grad, grad_rows, grad_x, grad_weight)
        return grad_x, grad_weight, grad_bias, None, None


def observe_backward(
    observer: Observer | None,
    grad: torch.Tensor,
    codes: QuantizedTensor | None,
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
) -> None:
    """Show an observer what a linear's backward read and made."""
    if observer is None:
        return
    observer("grad_output", grad, codes)
    for role, result in (("grad_input", grad_x), ("grad_weight", grad_weight)):
        if result is not None:
            observer(role, result, None)


def _grad_input(
    grad: torch.Tensor,
    rows: QuantizedTensor | None,
    weight: torch.Tensor | None,
    source: WeightSource,
    plan: LinearPlan,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """grad_output @ weight, in FP8, or in high precision over the weight itself or its decoded codes."""
    recipe = plan.recipe
    if rows is not None and "grad_input" not in recipe.high_precision_gemms:
        return grad_input_gemm(rows, source.backward(weight, plan, after=rows.scale), recipe, out_dtype, grad)
    if "grad_input" in recipe.high_precision_gemms and weight is not None:
        decoded = weight.to(grad.dtype)
    else:
        decoded = torch.cat([w.dequantize(grad.dtype) for _, w in source.forward(weight, plan)])  # [N, K]
    return hp_mm(grad, decoded.t(), out_dtype=out_dtype)


def _grad_weight(
    grad: torch.Tensor,
    columns: QuantizedTensor | None,
    saved: QuantizedTensor | None,
    x: torch.Tensor | None,
    weight: torch.Tensor,
    plan: LinearPlan,
) -> torch.Tensor:
    """grad_output.t() @ input, in FP8, or in high precision over the input itself or its decoded codes."""
    if columns is not None:
        if saved is not None and plan.token_shards is not None:
            saved = plan.token_shards.gather_codes(saved, 1)
        if saved is None:
            assert x is not None and plan.recipe.wgrad_input is not None, "the input or its transposed codes were saved"
            known = plan.known(DelayedState.INPUT, observe=False)
            if torch.compiler.is_compiling():
                x = _remade_after(x, columns.scale)
            if plan.cut_dim == "in" and not known and spans(plan.recipe.wgrad_input, False):
                saved = quantize_shared(x, plan.recipe.wgrad_input, plan.tensor_group, columns=True)
            else:
                saved = quantize_columns(x, plan.recipe.wgrad_input, **known)
        return grad_weight_gemm(columns, saved, plan.recipe, weight.dtype)
    if x is None:
        assert saved is not None, "the forward saved the input's codes"
        x = saved.dequantize(grad.dtype)  # [T, K]
    return hp_mm(grad.t(), x.to(grad.dtype).t(), out_dtype=weight.dtype)


def _remade_after(x: torch.Tensor, of_backward: torch.Tensor) -> torch.Tensor:
    """x itself, by an operation that torch.compile's partitioner can neither move into the forward, since it reads a
    tensor of the backward, nor takes for a reason to save x: it is elementwise, so x is made again with it where that
    is cheap. A quantizer of x alone would run in the forward, and its codes would be saved.
    """
    return torch.where(of_backward.reshape(-1)[0] > 0, x, x)


class HighPrecisionLinearFunction(torch.autograd.Function):
    """A linear in the input's dtype; exact mode applies to the forward.

    Of token shards it keeps the rank's own input, and gathers it again in the backward.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        exact: bool,
        observer: Observer | None,
        token_shards: TokenShards | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        ctx.save_for_backward(x, weight)
        if token_shards is not None:
            x = token_shards.gathered(x, token_shards.num_tokens)
        ctx.token_shards = token_shards
        ctx.observer, ctx.bias_dtype = observer, None if bias is None else bias.dtype
        source = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        out = hp_mm(x, source, bias=bias, exact=exact)
        if observer is not None:
            for role, tensor in (("input", x), ("weight", weight), ("output", out)):
                observer(role, tensor, None)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        (x, weight), shards = ctx.saved_tensors, ctx.token_shards
        grad_x = hp_mm(grad, weight.to(grad.dtype).t()) if ctx.needs_input_grad[0] else None
        if shards is not None:
            grad_x = None if grad_x is None else shards.add(grad_x)
            x = shards.gathered(x, grad.shape[0]) if ctx.needs_input_grad[1] else x
        grad_weight = hp_mm(grad.t(), x.t(), out_dtype=weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        observe_backward(ctx.observer, grad, None, grad_x, grad_weight)
        return grad_x, grad_weight, grad_bias, None, None, None
