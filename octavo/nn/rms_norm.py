"""RMSNorm as a module, and the autograd of both norms: octavo's kernels; in exact mode on a CPU the order-free op."""

from typing import Any

import torch
from torch import nn
from torch.autograd.function import once_differentiable

from octavo.distributed.tensor_group import TensorGroup
from octavo.nn.fusion import fusable
from octavo.ops.norm import NormKind, has_exact_kernel, norm_backward, norm_forward
from octavo.ops.norm.layer_norm import layer_norm
from octavo.ops.norm.reference import statistics
from octavo.ops.norm.rms_norm import rms_norm


@fusable
class RMSNorm(nn.Module):
    """x / sqrt(mean(x**2) + eps) * weight over the last dim.

    Args:
        hidden_size: size of the last dim.
        eps: added to the mean square.
        zero_centered_gamma: multiply by 1 + weight; weight then starts at zero.
        dtype: of the weight.

    Attributes:
        tensor_group: tensor-parallel ranks that norm other rows each by one weight, whose gradient they add; or None.
    """

    def __init__(
        self,
        hidden_size: int,
        eps: float = 1e-6,
        *,
        zero_centered_gamma: bool = False,
        dtype: torch.dtype = torch.bfloat16,
        device: torch.device | str | None = None,
    ) -> None:
        super().__init__()
        self.weight = nn.Parameter(initial_gamma(hidden_size, zero_centered_gamma, dtype, device))
        self.eps = eps
        self.zero_centered_gamma = zero_centered_gamma
        self.exact = False
        self.tensor_group: TensorGroup | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """x [..., hidden_size] -> the same shape and dtype."""
        weight = shared(self.weight, self.tensor_group)
        return apply_norm(x, weight, None, self.eps, "rms_norm", self.zero_centered_gamma, self.exact)


def initial_gamma(
    hidden_size: int, zero_centered_gamma: bool, dtype: torch.dtype, device: torch.device | str | None
) -> torch.Tensor:
    """The weight that multiplies by 1."""
    return torch.full((hidden_size,), 0.0 if zero_centered_gamma else 1.0, dtype=dtype, device=device)


def shared(parameter: torch.Tensor, tensor_group: TensorGroup | None) -> torch.Tensor:
    """A norm's parameter, whose gradient is the sum of these ranks' where there are any."""
    return tensor_group.share(parameter) if tensor_group is not None and torch.is_grad_enabled() else parameter


def apply_norm(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kind: NormKind,
    zero_centered_gamma: bool,
    exact: bool,
) -> torch.Tensor:
    """Either norm of x [..., K] over its last dim, differentiable.

    Where the kernel is exact, both modes run it, forward and backward, as fused steps do.
    """
    is_order_free = exact and not has_exact_kernel(x)
    return NormFunction.apply(x, weight, bias, eps, kind, zero_centered_gamma, is_order_free)


class NormFunction(torch.autograd.Function):
    """Both norms over the last dim. Saves the input and two numbers a row, which the order-free forward has not."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor,
        bias: torch.Tensor | None,
        eps: float,
        kind: NormKind,
        zero_centered_gamma: bool,
        is_order_free: bool,
    ) -> torch.Tensor:
        """x [..., K] -> the same shape and dtype."""
        ctx.eps, ctx.kind, ctx.zero_centered_gamma, ctx.has_bias = eps, kind, zero_centered_gamma, bias is not None
        if is_order_free:
            ctx.save_for_backward(x, weight, None, None)
            if kind == "rms_norm":
                return rms_norm(x, weight, eps, exact=True, zero_centered_gamma=zero_centered_gamma)
            return layer_norm(x, weight, bias, eps, exact=True, zero_centered_gamma=zero_centered_gamma)
        rows = x.reshape(-1, x.shape[-1])  # [T, K]
        normed = norm_forward(rows, weight, bias=bias, eps=eps, kind=kind, zero_centered_gamma=zero_centered_gamma)
        ctx.save_for_backward(x, weight, normed.mean, normed.rstd)
        return normed.y if x.dim() == 2 else normed.y.view(x.shape)  # FSDP2 warns of a unit that returns a view

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """Gradients of (x, weight, bias)."""
        x, weight, mean, rstd = ctx.saved_tensors
        rows = x.reshape(-1, x.shape[-1])
        if rstd is None:
            mean, rstd = statistics(rows, ctx.eps, ctx.kind)
            mean = mean if ctx.kind == "layer_norm" else None
        how = {"kind": ctx.kind, "zero_centered_gamma": ctx.zero_centered_gamma}
        grad_x, grad_weight, grad_bias = norm_backward(grad.reshape(rows.shape), rows, weight, mean, rstd, **how)
        return grad_x.view(x.shape), grad_weight, grad_bias if ctx.has_bias else None, None, None, None, None
