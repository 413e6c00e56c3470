"""Ground truth of SwiGLU and its gradient, in fp32 with one rounding. Device-free torch."""

import torch


def swiglu_reference(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up.

    Args:
        gate_up: [T, 2F], gate first.
    Returns:
        [T, F] of gate_up's dtype.
    """
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    return _silu(gate).mul_(up).to(gate_up.dtype)


def swiglu_backward_reference(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of swiglu_reference.

    Args:
        grad: [T, F].
        gate_up: [T, 2F].
    Returns:
        [T, 2F] of grad's dtype.
    """
    gate, up = (half.float() for half in gate_up.chunk(2, dim=-1))
    wide = grad.float()
    sigmoid = torch.ones_like(gate) / (1.0 + torch.exp(-gate))
    grad_gate = wide * up * sigmoid * (1.0 + gate * (1.0 - sigmoid))
    return torch.cat((grad_gate, wide * gate * sigmoid), dim=-1).to(grad.dtype)


def _silu(x: torch.Tensor) -> torch.Tensor:
    """x / (1 + exp(-x)): unlike F.silu on a CPU, the same bits at every position of every width."""
    return x / (1.0 + torch.exp(-x))
