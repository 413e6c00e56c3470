"""Ground truth of both norms, forward and backward, in fp32 with one rounding at the end. Device-free torch.

T tokens, K hidden. A sum's order is torch's here and a fixed tree in the kernel, so the two agree by SQNR.
"""

import torch
import torch.nn.functional as F


def gamma_of(weight: torch.Tensor, zero_centered_gamma: bool) -> torch.Tensor:
    """What the normalised row is multiplied by, in fp32: weight, or 1 + weight."""
    return weight.float() + 1.0 if zero_centered_gamma else weight.float()


def normalize(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
) -> torch.Tensor:
    """The norm of x [..., K] in x's dtype."""
    gamma = gamma_of(weight, zero_centered_gamma)
    if kind == "rms_norm":
        return F.rms_norm(x.float(), gamma.shape, gamma, eps).to(x.dtype)
    beta = None if bias is None else bias.float()
    return F.layer_norm(x.float(), gamma.shape, gamma, beta, eps).to(x.dtype)


def statistics(x: torch.Tensor, eps: float, kind: str) -> tuple[torch.Tensor, torch.Tensor]:
    """(mean, rstd) of the rows of x [T, K]: [T] fp32 each; mean is empty for rms_norm."""
    wide = x.float()
    mean = wide.mean(dim=-1) if kind == "layer_norm" else wide.new_empty(0)
    centred = wide - mean[:, None] if kind == "layer_norm" else wide
    spread = centred.square().mean(dim=-1) + eps
    return mean, torch.ones_like(spread) / torch.sqrt(spread)


def forward(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    residual: torch.Tensor | None,
    eps: float,
    kind: str,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """(y [T, K], x + residual, mean [T], rstd [T]); what the call has no use for is empty."""
    summed = x.new_empty(0) if residual is None else x + residual
    stream = x if residual is None else summed
    y = normalize(stream, weight, bias, eps, kind, zero_centered_gamma)
    return y, summed, *statistics(stream, eps, kind)


def backward(
    grad: torch.Tensor,
    x: torch.Tensor,
    weight: torch.Tensor,
    mean: torch.Tensor | None,
    rstd: torch.Tensor,
    grad_residual: torch.Tensor | None,
    zero_centered_gamma: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """(grad_x [T, K], grad_weight [K], grad_bias [K]) for x [T, K]; a norm without mean has an empty grad_bias.

    grad_x is rounded before grad_residual is added, as it is where autograd adds two gradients.
    """
    wide = grad.float()
    normed = (x.float() if mean is None else x.float() - mean[:, None]) * rstd[:, None]  # [T, K]
    scaled = wide * gamma_of(weight, zero_centered_gamma)
    inner = scaled - normed * (scaled * normed).mean(dim=-1, keepdim=True)
    if mean is not None:
        inner = inner - scaled.mean(dim=-1, keepdim=True)
    grad_x = (rstd[:, None] * inner).to(grad.dtype)
    if grad_residual is not None:
        grad_x = grad_x + grad_residual
    grad_bias = weight.new_empty(0) if mean is None else wide.sum(dim=0).to(weight.dtype)
    return grad_x, (wide * normed).sum(dim=0).to(weight.dtype), grad_bias
