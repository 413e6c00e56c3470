"""LayerNorm as a module: octavo's norm kernels where exact is off, the order-free op where on."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.nn.rms_norm import NormFunction, initial_gamma
from octavo.ops.layer_norm import layer_norm
from octavo.ops.norm import norm_backward
from octavo.ops.norm.reference import statistics


class LayerNorm(nn.Module):
    """(x - mean) / sqrt(variance + eps) * weight + bias over the last dim.

    Args:
        hidden_size: size of the last dim. eps: added to the variance. bias: add one.
        zero_centered_gamma: multiply by 1 + weight; weight then starts at zero.
        dtype: of weight and bias.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-5,
        *,
        bias: bool = True,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_gamma(hidden_size, zero_centered_gamma, dtype, device))
        self.bias = nn.Parameter(torch.zeros(hidden_size, dtype=dtype, device=device)) if bias else None
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.exact = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        if self.exact:
            return _ExactLayerNorm.apply(x, self.weight, self.bias, self.eps, self.zero_centered_gamma)
        return NormFunction.apply(x, self.weight, self.bias, self.eps, "layer_norm", self.zero_centered_gamma)


class _ExactLayerNorm(torch.autograd.Function):
    """The exact forward; the gradient in fp32."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        zero_centered_gamma: bool,
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps, ctx.zero_centered_gamma, ctx.has_bias = eps, zero_centered_gamma, bias is not None
        return layer_norm(x, weight, bias, eps, exact=True, zero_centered_gamma=zero_centered_gamma)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        mean, rstd = statistics(rows, ctx.eps, "layer_norm")
        grad_x, grad_weight, grad_bias = norm_backward(
            grad.reshape(rows.shape),
            rows,
            weight,
            mean,
            rstd,
            kind="layer_norm",
            zero_centered_gamma=ctx.zero_centered_gamma,
        )
        return grad_x.view(x.shape), grad_weight, grad_bias if ctx.has_bias else None, None, None
