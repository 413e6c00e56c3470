"""What the autograd Functions of linears share: quantized operands through save_for_backward, first-order backwards."""

import functools
from collections.abc import Callable
from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.numerics.quantized import QuantizedTensor

Saved = torch.Tensor | QuantizedTensor | None


def first_order_only(backward: Callable[..., Any]) -> Callable[..., Any]:
    """once_differentiable for a Function's backward, at no cost where no caller asked for a graph of the backward."""
    refusing = once_differentiable(backward)

    @functools.wraps(backward)
    def run(ctx: Any, *grads: torch.Tensor | None) -> Any:
        return (refusing if torch.is_grad_enabled() else backward)(ctx, *grads)

    return run


def save_operands(ctx: Any, *operands: Saved) -> None:
    """Save tensors, quantized tensors and None for the backward of a Function, in order."""
    flat: list[torch.Tensor | None] = []
    for operand in operands:
        flat += [operand.qdata, operand.scale] if isinstance(operand, QuantizedTensor) else [operand]
    ctx.saved_scalings = [o.scaling if isinstance(o, QuantizedTensor) else None for o in operands]
    ctx.save_for_backward(*flat)


def only_needed(ctx: Any, *grads: torch.Tensor | None) -> tuple[torch.Tensor | None, ...]:
    """The gradients that autograd asked for, None for all other arguments of the forward."""
    missing = len(ctx.needs_input_grad) - len(grads)
    wanted = zip((*grads, *[None] * missing), ctx.needs_input_grad, strict=True)
    return tuple(grad if is_needed else None for grad, is_needed in wanted)


def saved_operands(ctx: Any) -> list[Any]:
    """What save_operands saved."""
    flat = iter(ctx.saved_tensors)
    return [next(flat) if s is None else QuantizedTensor(next(flat), next(flat), s) for s in ctx.saved_scalings]
