"""Ground truth of bias + GeLU (tanh form) and its gradient, in fp32 with one rounding. Device-free torch.

0.5 * (1 + tanh(u)) is sigmoid(2u), so gelu(z) = z * sigmoid(z * (A + B * z**2)) with A = 2 sqrt(2/pi).
"""

import math

import torch

A = 2.0 * math.sqrt(2.0 / math.pi)
B = A * 0.044715
# sigmoid(z * (A + B * z**2)) is 0 or 1 long before |z| = 1000; the bound keeps z**2 from overflowing in the gradient.
MAX_SQUARE = 1e6


def gelu_reference(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """gelu(x + bias).

    Args:
        x: [T, F].
        bias: [F] or None; the sum is kept in fp32.
    Returns:
        [T, F] of x's dtype.
    """
    z = _biased(x, bias)
    return (z / (1.0 + torch.exp(-z * (A + B * _square(z))))).to(x.dtype)


def gelu_backward_reference(grad: torch.Tensor, x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    """Gradient of gelu_reference with respect to x.

    Args:
        grad: [T, F].
        x: [T, F].
        bias: [F] or None.
    Returns:
        [T, F] of grad's dtype.
    """
    z = _biased(x, bias)
    square = _square(z)
    sigmoid = torch.ones_like(z) / (1.0 + torch.exp(-z * (A + B * square)))
    slope = sigmoid * (1.0 + z * (1.0 - sigmoid) * (A + 3.0 * B * square))
    return (grad.float() * slope).to(grad.dtype)


def _biased(x: torch.Tensor, bias: torch.Tensor | None) -> torch.Tensor:
    return x.float() if bias is None else x.float() + bias.float()


def _square(z: torch.Tensor) -> torch.Tensor:
    return (z * z).clamp_max(MAX_SQUARE)
