"""The training loss straight from hidden states; its gradients are made in the forward, one GEMM fewer than twice."""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.errors import ConfigError, ShapeError
from octavo.ops.logprob.linear import linear_cross_entropy as linear_cross_entropy_op


def linear_cross_entropy(
    hidden: torch.Tensor,
    head_weight: torch.Tensor,
    targets: torch.Tensor,
    *,
    ignore_index: int = -100,
    reduction: str = "mean",
    num_targets: int | torch.Tensor | None = None,
    z_loss: float = 0.0,
    head_bias: torch.Tensor | None = None,
) -> torch.Tensor:
    """Cross-entropy of hidden @ head_weight.t() of which few logits exist at once.

    They take at most 1 GiB and their gradients at most 2 GiB, a quarter of both where the head does not train.

    Args:
        hidden: [T, hidden_size] bf16, fp16 or fp32.
        head_weight: [V, hidden_size].
        targets: [T] int64.
        ignore_index: the target of rows that have no loss and no gradient.
        reduction: "mean" over the targets that count, or "sum".
        num_targets: what "mean" divides by in place of their number, such as that of all micro-batches together.
        z_loss: factor of logsumexp**2, which keeps the logits' scale from drifting.
        head_bias: [V] or None, added to the logits in fp32.
    Returns:
        fp32 scalar, differentiable in hidden, head_weight and head_bias; 0 where no target counts.
    Raises:
        ShapeError: if the shapes do not fit.
        ConfigError: if the reduction is another.
    Exactness: logits and sums in fp32, gradients of logits rounded once to hidden's dtype (fp32 on a CPU). Holds one
        fp32 gradient of head_weight from the forward to the backward, the price of the saved GEMM.
    """
    if hidden.dim() != 2 or targets.shape != hidden.shape[:1] or hidden.shape[1:] != head_weight.shape[1:]:
        raise ShapeError(
            "hidden [T, hidden_size], head_weight [V, hidden_size] and targets [T] must fit together, got "
            f"{tuple(hidden.shape)}, {tuple(head_weight.shape)} and {tuple(targets.shape)}; flatten the batch first"
        )
    if reduction not in ("mean", "sum"):
        raise ConfigError(f"reduction must be 'mean' or 'sum', got {reduction!r}")
    if reduction == "sum" and num_targets is not None:
        raise ConfigError("num_targets divides a mean; leave it out with reduction='sum'")
    has_grad = torch.is_grad_enabled()
    trains_head = head_weight.requires_grad or (head_bias is not None and head_bias.requires_grad)
    needs = (has_grad and hidden.requires_grad, has_grad and trains_head)
    total = _LinearCrossEntropy.apply(hidden, head_weight, head_bias, targets, ignore_index, z_loss, *needs)
    if reduction == "sum":
        return total
    return total / ((targets != ignore_index).sum().clamp_min(1) if num_targets is None else num_targets)


class _LinearCrossEntropy(torch.autograd.Function):
    """Sum of losses; the gradients wait in fp32 for the backward, which scales and rounds them once."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: torch.Tensor,
        head_weight: torch.Tensor,
        head_bias: torch.Tensor | None,
        targets: torch.Tensor,
        ignore_index: int,
        z_loss: float,
        needs_hidden: bool,
        needs_weight: bool,
    ) -> torch.Tensor:
        loss, grad_hidden, grad_weight, grad_bias = linear_cross_entropy_op(
            hidden, head_weight, targets, ignore_index, z_loss, needs_hidden, needs_weight, head_bias
        )
        bias_dtype = head_bias.dtype if head_bias is not None and needs_weight else None
        ctx.dtypes = (hidden.dtype if needs_hidden else None, head_weight.dtype if needs_weight else None, bias_dtype)
        ctx.save_for_backward(grad_hidden, grad_weight, grad_bias)
        return loss

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        grads = [
            None if dtype is None else torch.mul(saved, grad, out=torch.empty_like(saved, dtype=dtype))
            for saved, dtype in zip(ctx.saved_tensors, ctx.dtypes, strict=True)
        ]
        return (*grads, None, None, None, None, None)
