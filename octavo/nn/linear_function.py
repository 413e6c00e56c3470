"""The three GEMMs of a linear as autograd Functions: one for recipes in FP8, one for high precision.

output = input @ weight.t(); grad_input = grad_output @ weight; grad_weight = grad_output.t() @ input. A GEMM's FP8
operands are quantized along the dimension that it sums over: K (in), N (out) and T (tokens) respectively. Fused
modules use the same pieces: quantize_input, output_gemm, quantize_grad_output, grad_input_gemm, grad_weight_gemm.
"""

import functools
import warnings
from typing import Any, Protocol

import torch

from octavo.nn.quantized_weight import DelayedState, Operands
from octavo.nn.saved_operands import first_order_only
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
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
        BackendError.
    """
    if x.is_cuda and recipe.decodes_backward:
        raise decoded_backward(recipe)


class OperandSource(Protocol):
    """What the Functions ask of a linear: its weight's codes, its delayed-scaling state, whether it is exact.

    Only in training mode does delayed scaling stage amaxes, those of the backward by the mode of the forward.
    """

    exact: bool
    training: bool
    observer: Any
    saves_input: bool

    def forward_operands(self, recipe: Recipe, *, observe: bool = False) -> Operands: ...

    def whole_operand(self, recipe: Recipe, *, observe: bool = False) -> QuantizedTensor | None: ...

    def backward_operands(self, recipe: Recipe) -> Operands: ...

    def delayed_state(self, recipe: Recipe) -> DelayedState: ...

    def input_quant_scale(self, recipe: Recipe) -> torch.Tensor: ...


class AheadSource(Protocol):
    """A linear whose training forward makes the weight's codes for the backward together with its own."""

    def operand_ahead(self, recipe: Recipe) -> QuantizedTensor | None: ...


def known_scale(layer: OperandSource, recipe: Recipe, slot: int, *, observe: bool) -> dict[str, Any]:
    """A quantizer's keyword arguments for one operand: delayed scaling's scale and amax, a static scale, or none."""
    if recipe.static_input and slot == DelayedState.INPUT:
        return {"quant_scale": layer.input_quant_scale(recipe)}
    return {} if recipe.delayed is None else layer.delayed_state(recipe).known(slot, observe=observe)


def quantize_input(
    x: torch.Tensor, layer: OperandSource, recipe: Recipe, *, columns: bool, observe: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """The input's codes for the output GEMM [T, K] and, where columns are wanted, for grad_weight [K, T]."""
    assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
    has_scale = recipe.delayed is not None or recipe.static_input
    known = known_scale(layer, recipe, DelayedState.INPUT, observe=observe) if has_scale else {}
    if columns:
        return quantize_both(x, recipe.input, column_scaling=recipe.input_for_grad_weight, **known)  # type: ignore[arg-type]
    return quantize(x, recipe.input, **known), None


def output_gemm(
    rows: QuantizedTensor,
    bias: torch.Tensor | None,
    layer: OperandSource,
    recipe: Recipe,
    out_dtype: torch.dtype,
    *,
    training: bool,
    whole: QuantizedTensor | None = None,
) -> torch.Tensor:
    """rows [T, K] codes times the layer's weight -> [T, N] of out_dtype.

    Args:
        whole: the layer's whole_operand, where the caller has it.
    """
    fast = "output" in recipe.fast_accum
    whole = whole or layer.whole_operand(recipe, observe=training)
    is_free = not (training or layer.exact or torch.compiler.is_compiling())  # to take another order of sums
    if whole is not None and is_free and rows.shape[0] <= MAX_TOKENS:
        return skinny_mm(rows, whole, bias=bias, out_dtype=out_dtype)
    if whole is not None:
        return scaled_mm(rows, whole, bias=bias, out_dtype=out_dtype, exact=layer.exact, fast_accum=fast)
    pieces = []
    for part, w in layer.forward_operands(recipe, observe=training):
        own_bias = None if bias is None else bias[part]
        pieces.append(scaled_mm(rows, w, bias=own_bias, out_dtype=out_dtype, exact=layer.exact, fast_accum=fast))
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def quantize_grad_output(
    grad: torch.Tensor, layer: OperandSource, recipe: Recipe, *, columns: bool, observe: bool
) -> tuple[QuantizedTensor, QuantizedTensor | None]:
    """grad_output's codes for grad_input [T, N] and, where columns are wanted, for grad_weight [N, T]."""
    assert recipe.grad_output is not None, f"recipe {recipe.name!r} has no FP8 backward"
    has_scale = recipe.delayed is not None
    known = known_scale(layer, recipe, DelayedState.GRAD_OUTPUT, observe=observe) if has_scale else {}
    if columns:
        return quantize_both(grad, recipe.grad_output, **known)
    return quantize(grad, recipe.grad_output, **known), None


def grad_input_gemm(
    rows: QuantizedTensor, operands: Operands, recipe: Recipe, out_dtype: torch.dtype, grad: torch.Tensor | None
) -> torch.Tensor:
    """Sum over the weight's row ranges of grad[:, range] @ weight[range]: [T, K] of out_dtype.

    Args:
        rows: grad_output's codes [T, N]. grad: its source, needed where blocks end with a fused weight's parts.
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
    layer: OperandSource,
    recipe: Recipe,
    *,
    training: bool,
    needs_wgrad: bool,
    ahead: AheadSource | None = None,
) -> tuple[torch.Tensor, QuantizedTensor | None]:
    """The output GEMM of a linear under an FP8 recipe that is not emulated.

    Args:
        x: [T, K]. training: with gradients. needs_wgrad: also quantize x for grad_weight.
        ahead: the layer, where it makes the weight's codes for the backward already here.
    Returns:
        (output [T, N] of x's dtype, the operand to save for grad_weight or None).
    """
    high = recipe.high_precision_gemms
    both_ways = needs_wgrad and recipe.grad_output is not None and "grad_weight" not in high and not layer.saves_input
    rows, columns = quantize_input(x, layer, recipe, columns=both_ways, observe=training and layer.training)
    if "output" not in high:
        whole = None if ahead is None else ahead.operand_ahead(recipe)
        out = output_gemm(rows, bias, layer, recipe, x.dtype, training=training, whole=whole)
    else:
        assert weight is not None, "a layer of codes alone is refused before"
        out = hp_mm(x, weight.to(x.dtype), bias=bias, exact=layer.exact)
    if layer.observer is not None:
        layer.observer("input", x, rows)
        if weight is not None:
            layer.observer("weight", weight, layer.whole_operand(recipe))
        layer.observer("output", out, None)
    return out, columns if columns is not None else rows


class ScaledLinearFunction(torch.autograd.Function):
    """A linear in FP8. Saves FP8 codes for backward, never a high-precision copy of the input.

    A GEMM of recipe.high_precision_gemms takes high-precision operands instead; where that is grad_weight, or the layer
    asks for it (saves_input), the input itself is saved.
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        bias: torch.Tensor | None,
        layer: OperandSource,
        recipe: Recipe,
        ahead: AheadSource | None = None,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        check_backward(recipe, x)
        needs_wgrad = weight is not None and ctx.needs_input_grad[1]
        out, saved = scaled_linear(x, weight, bias, layer, recipe, training=True, needs_wgrad=needs_wgrad, ahead=ahead)
        ctx.layer, ctx.recipe, ctx.in_dtype, ctx.observes = layer, recipe, x.dtype, layer.training
        ctx.bias_dtype = None if bias is None else bias.dtype
        ctx.keeps_input = needs_wgrad and (layer.saves_input or "grad_weight" in recipe.high_precision_gemms)
        ctx.input_scaling = saved.scaling if saved is not None and needs_wgrad and not ctx.keeps_input else None
        codes = (saved.qdata, saved.scale) if saved is not None and ctx.input_scaling is not None else (None, None)
        # the weight is saved for its version: codes of another one would be silently wrong
        ctx.save_for_backward(weight, x if ctx.keeps_input else None, *codes)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        grad, layer, recipe = grad.contiguous(), ctx.layer, ctx.recipe
        weight, x, codes, scale = ctx.saved_tensors
        saved = None if codes is None else QuantizedTensor.trusted(codes, scale, ctx.input_scaling)
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        grad_rows = grad_columns = grad_x = grad_weight = None
        if recipe.grad_output is not None:
            columns = wants_weight and "grad_weight" not in recipe.high_precision_gemms
            grad_rows, grad_columns = quantize_grad_output(grad, layer, recipe, columns=columns, observe=ctx.observes)
        if wants_x:
            grad_x = _grad_input(ctx, grad, grad_rows, weight)
        if wants_weight:
            grad_weight = _grad_weight(ctx, grad, grad_columns, saved, x, weight)
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None
        if layer.observer is not None:
            observe_backward(layer, grad, grad_rows, grad_x, grad_weight)
        return (grad_x, grad_weight, grad_bias, None, None, None)[: len(ctx.needs_input_grad)]


def observe_backward(
    layer: OperandSource,
    grad: torch.Tensor,
    codes: QuantizedTensor | None,
    grad_x: torch.Tensor | None,
    grad_weight: torch.Tensor | None,
) -> None:
    """Show a layer's observer what its backward read and made."""
    if layer.observer is None:
        return
    layer.observer("grad_output", grad, codes)
    for role, result in (("grad_input", grad_x), ("grad_weight", grad_weight)):
        if result is not None:
            layer.observer(role, result, None)


def _grad_input(
    ctx: Any, grad: torch.Tensor, rows: QuantizedTensor | None, weight: torch.Tensor | None
) -> torch.Tensor:
    """grad_output @ weight, in FP8, or in high precision over the weight itself or its decoded codes."""
    if rows is not None and "grad_input" not in ctx.recipe.high_precision_gemms:
        return grad_input_gemm(rows, ctx.layer.backward_operands(ctx.recipe), ctx.recipe, ctx.in_dtype, grad)
    if "grad_input" in ctx.recipe.high_precision_gemms and weight is not None:
        source = weight.to(grad.dtype)
    else:
        source = torch.cat([w.dequantize(grad.dtype) for _, w in ctx.layer.forward_operands(ctx.recipe)])  # [N, K]
    return hp_mm(grad, source.t(), out_dtype=ctx.in_dtype)


def _grad_weight(
    ctx: Any,
    grad: torch.Tensor,
    columns: QuantizedTensor | None,
    saved: QuantizedTensor | None,
    x: torch.Tensor | None,
    weight: torch.Tensor,
) -> torch.Tensor:
    """grad_output.t() @ input, in FP8, or in high precision over the input itself or its decoded codes."""
    if columns is not None:
        if saved is None:
            assert x is not None and ctx.recipe.wgrad_input is not None, "the input or its transposed codes were saved"
            known = known_scale(ctx.layer, ctx.recipe, DelayedState.INPUT, observe=False)
            saved = quantize_columns(x, ctx.recipe.wgrad_input, **known)
        return grad_weight_gemm(columns, saved, ctx.recipe, weight.dtype)
    if x is None:
        assert saved is not None, "the forward saved the input's codes"
        x = saved.dequantize(grad.dtype)  # [T, K]
    return hp_mm(grad.t(), x.to(grad.dtype).t(), out_dtype=weight.dtype)


class HighPrecisionLinearFunction(torch.autograd.Function):
    """A linear in the input's dtype; exact mode applies to the forward."""

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, layer: OperandSource
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        ctx.save_for_backward(x, weight)
        ctx.layer, ctx.bias_dtype = layer, None if bias is None else bias.dtype
        source = weight if weight.dtype == x.dtype else weight.to(x.dtype)
        out = hp_mm(x, source, bias=bias, exact=layer.exact)
        if layer.observer is not None:
            for role, tensor in (("input", x), ("weight", weight), ("output", out)):
                layer.observer(role, tensor, None)
        return out

    @staticmethod
    @first_order_only
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        x, weight = ctx.saved_tensors
        grad_x = hp_mm(grad, weight.to(grad.dtype).t()) if ctx.needs_input_grad[0] else None
        grad_weight = hp_mm(grad.t(), x.t(), out_dtype=weight.dtype) if ctx.needs_input_grad[1] else None
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if ctx.needs_input_grad[2] else None
        observe_backward(ctx.layer, grad, None, grad_x, grad_weight)
        return grad_x, grad_weight, grad_bias, None
