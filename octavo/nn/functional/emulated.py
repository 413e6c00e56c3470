"""A linear whose operands are quantized and decoded again, with GEMMs in high precision: a format's error alone.

For recipes with fake_quant, and for formats that neither this GPU generation nor Scaling has (mxfp8, nvfp4).
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.nn.functional.linear import observe_backward
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.numerics.emulated_config import Mxfp8Config, Nvfp4Config
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.quantize import quantize, quantize_columns
from octavo.ops.quantize.fake_quantize import fake_quantize_mxfp8, fake_quantize_nvfp4, random_hadamard

_FOR_GRAD_INPUT, _FOR_GRAD_WEIGHT = 0, 1  # seeds: one gradient is rounded twice, each time on its own


class EmulatedLinearFunction(torch.autograd.Function):
    """y = decode(x) @ decode(weight).t() + bias; operands are quantized along what their GEMM sums over."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        source: WeightSource,
        plan: LinearPlan,
        training: bool,
    ) -> torch.Tensor:
        """x [T, K] -> [T, N] of x's dtype."""
        recipe = plan.recipe
        assert recipe.input is not None, f"recipe {recipe.name!r} quantizes no input"
        ctx.source, ctx.plan, ctx.bias_dtype = source, plan, None if bias is None else bias.dtype
        x_operand = x
        w_operand = weight.to(x.dtype)
        if "output" not in recipe.high_precision_gemms:
            known = plan.known(DelayedState.INPUT, observe=training and plan.stages)
            x_operand = _decode(x, recipe, "input", known)
            w_operand = _decode_weight(weight, source, plan, x.dtype, observe=training)
        ctx.save_for_backward(x, weight, *((x_operand, w_operand) if not recipe.has_fp8_backward else ()))
        out = hp_mm(x_operand, w_operand, bias=bias)
        if plan.observer is not None:
            for role, tensor in (("input", x), ("weight", weight), ("output", out)):
                plan.observer(role, tensor, None)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [T, N] -> gradients of (x, weight, bias)."""
        grad = grad.contiguous()
        wants_x, wants_weight, wants_bias = ctx.needs_input_grad[:3]
        run = _backward_quantized if ctx.plan.recipe.has_fp8_backward else _backward_decoded
        grad_x, grad_weight = run(ctx, grad, wants_x, wants_weight)
        grad_bias = grad.sum(dim=0, dtype=torch.float32).to(ctx.bias_dtype) if wants_bias else None
        observe_backward(ctx.plan.observer, grad, None, grad_x, grad_weight)
        return grad_x, grad_weight, grad_bias, None, None, None


def _backward_decoded(
    ctx: Any, grad: torch.Tensor, wants_x: bool, wants_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    """Both GEMMs over the forward's decoded operands and the gradient as it is."""
    _, weight, x, w = ctx.saved_tensors
    grad_x = hp_mm(grad, w.to(grad.dtype).t()) if wants_x else None
    return grad_x, hp_mm(grad.t(), x.t(), out_dtype=weight.dtype) if wants_weight else None


def _backward_quantized(
    ctx: Any, grad: torch.Tensor, wants_x: bool, wants_weight: bool
) -> tuple[torch.Tensor | None, torch.Tensor | None]:
    x, weight = ctx.saved_tensors
    plan = ctx.plan
    recipe = plan.recipe
    known = plan.known(DelayedState.GRAD_OUTPUT, observe=plan.stages)
    grad_x = grad_weight = None
    if wants_x:
        rows, w = grad, weight.to(grad.dtype)
        if "grad_input" not in recipe.high_precision_gemms:
            rows = _decode(grad, recipe, "grad_output", known)
            w = _decode_weight_columns(weight, ctx.source, plan, grad.dtype)
        grad_x = hp_mm(rows, w.t(), out_dtype=x.dtype)
    if wants_weight:
        columns, x_columns = grad.t(), x.t()
        if "grad_weight" not in recipe.high_precision_gemms:
            x_known = plan.known(DelayedState.INPUT, observe=False)
            columns = _decode_columns(grad, recipe, "grad_output", known)
            x_columns = _decode_columns(x, recipe, "input", x_known)
        grad_weight = hp_mm(columns, x_columns.to(columns.dtype), out_dtype=weight.dtype)
    return grad_x, grad_weight


def emulate(x: torch.Tensor, recipe: Recipe, role: str, *, seed: int = _FOR_GRAD_INPUT) -> torch.Tensor:
    """x [M, K] after a recipe's emulated format, laid out in memory as x is: a view of x.t() is not copied.

    Args:
        recipe: one with `emulated`.
        role: which operand x is: "input", "weight" or "grad_output".
        seed: of a gradient that is rounded stochastically.
    """
    config = recipe.emulation
    if isinstance(config, Mxfp8Config):
        return fake_quantize_mxfp8(x, _scaling(recipe, role).dtype, scale_rounding=config.scale_rounding)
    assert config is not None, f"recipe {recipe.name!r} emulates no format"
    is_square = role == "weight" and config.square_weight_blocks
    is_stochastic = role == "grad_output" and config.stochastic_rounding
    return fake_quantize_nvfp4(x, square_blocks=is_square, stochastic_seed=seed if is_stochastic else None)


def _decode(x: torch.Tensor, recipe: Recipe, role: str, known: dict[str, Any]) -> torch.Tensor:
    """x after its format, in its own dtype; blocks run along the last dim."""
    if recipe.emulated:
        return emulate(x, recipe, role)
    return quantize(x, _scaling(recipe, role), **known).dequantize(x.dtype)


def _decode_columns(x: torch.Tensor, recipe: Recipe, role: str, known: dict[str, torch.Tensor]) -> torch.Tensor:
    """x.t() after its format, for the grad_weight GEMM; blocks run along x's rows. A GEMM reads it in any layout.

    With a random Hadamard transform rows are those of its blocks: as many in both operands, a few more than in x.
    """
    if recipe.emulated:
        has_transform = isinstance(recipe.emulation, Nvfp4Config) and recipe.emulation.random_hadamard
        source = random_hadamard(x) if has_transform else x
        return emulate(source.t(), recipe, role, seed=_FOR_GRAD_WEIGHT)
    scaling = recipe.input_for_grad_weight if role == "input" else None
    return quantize_columns(x, scaling or _scaling(recipe, role), **known).dequantize(x.dtype)


def _decode_weight(
    weight: torch.Tensor, source: WeightSource, plan: LinearPlan, dtype: torch.dtype, *, observe: bool
) -> torch.Tensor:
    """The weight [N, K] decoded for the output GEMM; recipes of Scaling's formats share the source's codes."""
    if plan.recipe.emulated:
        return emulate(weight.to(torch.bfloat16), plan.recipe, "weight").to(dtype)
    return torch.cat([w.dequantize(dtype) for _, w in source.forward(weight, plan, observe=observe)])


def _decode_weight_columns(
    weight: torch.Tensor, source: WeightSource, plan: LinearPlan, dtype: torch.dtype
) -> torch.Tensor:
    """The weight [N, K] decoded from what the grad_input GEMM would multiply."""
    if plan.recipe.emulated:
        return emulate(weight.to(torch.bfloat16).t(), plan.recipe, "weight").t().to(dtype)
    return torch.cat([w.dequantize(dtype) for _, w in source.backward(weight, plan)], dim=1).t()


def _scaling(recipe: Recipe, role: str) -> Scaling:
    scaling: Scaling | None = getattr(recipe, role)
    assert scaling is not None, f"recipe {recipe.name!r} does not quantize {role}"
    return scaling
