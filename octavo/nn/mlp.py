"""The SwiGLU feed-forward block: gate and up fused in one linear, then down."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.nn.linear import Linear
from octavo.ops.swiglu import swiglu, swiglu_backward


class MLP(nn.Module):
    """down_proj(silu(gate) * up).

    Args:
        hidden_size: model width. intermediate_size: width of gate and of up.
    """

    def __init__(
        self,
        hidden_size: int,
        intermediate_size: int,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        parts = (intermediate_size, intermediate_size)
        self.gate_up_proj = Linear(hidden_size, sum(parts), parts=parts, dtype=dtype, device=device)
        self.down_proj = Linear(intermediate_size, hidden_size, dtype=dtype, device=device)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [T, hidden_size] -> the same shape."""
        return self.down_proj(SwiGLU.apply(self.gate_up_proj(x)))


class SwiGLU(torch.autograd.Function):
    """swiglu with its gradient; saves the linear's output alone."""

    @staticmethod
    def forward(ctx: Any, gate_up: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(gate_up)
        return swiglu(gate_up)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> torch.Tensor:
        return swiglu_backward(grad, *ctx.saved_tensors)
