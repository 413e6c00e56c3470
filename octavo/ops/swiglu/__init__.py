"""SwiGLU, alone and fused with the quantization of the next linear's input."""

import torch

from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize
from octavo.ops.swiglu.reference import swiglu_backward_reference, swiglu_reference

__all__ = ["swiglu", "swiglu_backward", "swiglu_quantize", "swiglu_reference"]


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise in fp32, rounded once.

    Args:
        gate_up: [T, 2F], the gate half first.
    Returns:
        [T, F] of gate_up's dtype.
    Raises:
        ShapeError: for an odd last dim.
    Source: Shazeer 2020, "GLU Variants Improve Transformer". Exactness: bitwise within a device.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gate_up must have an even last dim (gate and up halves), got {tuple(gate_up.shape)}")
    return swiglu_reference(gate_up)


def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor) -> torch.Tensor:
    """Gradient of swiglu with respect to gate_up.

    Args:
        grad: [T, F]. gate_up: [T, 2F], the forward's input.
    Returns:
        [T, 2F] of gate_up's dtype.
    """
    return swiglu_backward_reference(grad, gate_up)


def swiglu_quantize(gate_up: torch.Tensor, scaling: Scaling) -> QuantizedTensor:
    """swiglu followed by quantize; equal in bits to the two ops one after the other.

    Args:
        gate_up: [T, 2F]. scaling: of the next linear's input.
    Returns:
        QuantizedTensor [T, F].
    """
    return quantize(swiglu(gate_up), scaling)
