"""Quantized operands through autograd's save_for_backward, which takes plain tensors only."""

from typing import Any

import torch

from octavo.numerics.quantized import QuantizedTensor

Saved = torch.Tensor | QuantizedTensor | None


def save_operands(ctx: Any, *operands: Saved) -> None:
    """Save tensors, quantized tensors and None for the backward of a Function, in order."""
    flat: list[torch.Tensor | None] = []
    for operand in operands:
        flat += [operand.qdata, operand.scale] if isinstance(operand, QuantizedTensor) else [operand]
    ctx.saved_scalings = [o.scaling if isinstance(o, QuantizedTensor) else None for o in operands]
    ctx.save_for_backward(*flat)


def saved_operands(ctx: Any) -> list[Any]:
    """What save_operands saved."""
    flat = iter(ctx.saved_tensors)
    return [next(flat) if s is None else QuantizedTensor(next(flat), next(flat), s) for s in ctx.saved_scalings]
