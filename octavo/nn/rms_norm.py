"""RMSNorm as a module: torch's own where exact is off, the order-free op with its gradient where it is on."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.ops.rms_norm import rms_norm


class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last dim.

    Args:
        hidden_size: size of the last dim. eps: added to the mean square. dtype: of the weight.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(hidden_size, dtype=dtype, device=device))
        self.eps = eps
        self.exact = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        if self.exact:
            return _ExactRMSNorm.apply(x, self.weight, self.eps)
        return rms_norm(x, self.weight, self.eps)


class _ExactRMSNorm(torch.autograd.Function):
    """The exact forward; the gradient in fp32."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        ctx.eps = eps
        return rms_norm(x, weight, eps, exact=True)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        x, weight = ctx.saved_tensors
        x32, grad32 = x.float(), grad.float()
        rstd = torch.rsqrt(x32.square().mean(dim=-1, keepdim=True) + ctx.eps)
        normed = x32 * rstd
        scaled = grad32 * weight.float()
        grad_x = rstd * (scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True))
        grad_weight = (grad32 * normed).reshape(-1, weight.numel()).sum(dim=0)
        return grad_x.to(x.dtype), grad_weight.to(weight.dtype), None
