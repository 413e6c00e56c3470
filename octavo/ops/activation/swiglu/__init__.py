"""SwiGLU and its gradient; octavo.ops.activation fuses them with quantization."""

import torch

from octavo import env
from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.activation.swiglu.reference import swiglu_backward_reference, swiglu_reference

__all__ = ["swiglu", "swiglu_backward", "swiglu_reference"]


def _swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    return swiglu_backward_reference(grad, gate_up if scale is None else decode_blocks(gate_up, scale))


def _swiglu_backward_cuda(grad: torch.Tensor, gate_up: torch.Tensor, scale: torch.Tensor | None) -> torch.Tensor:
    if env.force_reference():
        return _swiglu_backward(grad, gate_up, scale)
    from octavo.ops.activation.swiglu import triton

    if scale is not None and grad.shape[1] % 128:  # a block would lie across the halves
        gate_up, scale = decode_blocks(gate_up, scale), None
    return triton.swiglu_backward(grad, gate_up, scale)


def decode_blocks(codes: torch.Tensor, scale: torch.Tensor) -> torch.Tensor:
    """Codes in 1x128 blocks as fp32."""
    return QuantizedTensor(codes, scale, Scaling.block_1x128(codes.dtype)).dequantize()


_swiglu_op = register(
    "swiglu(Tensor gate_up) -> Tensor",
    reference=swiglu_reference,
    fake=lambda gate_up: gate_up.new_empty((gate_up.shape[0], gate_up.shape[1] // 2)),
    cuda=kernel_or_reference("activation.swiglu.triton.swiglu", swiglu_reference),
)
_swiglu_backward_op = register(
    "swiglu_backward(Tensor grad, Tensor gate_up, Tensor? scale) -> Tensor",
    reference=_swiglu_backward,
    fake=lambda grad, gate_up, scale: grad.new_empty(gate_up.shape),
    cuda=_swiglu_backward_cuda,
)


def swiglu(gate_up: torch.Tensor) -> torch.Tensor:
    """silu(gate) * up, elementwise in fp32, rounded once.

    Args:
        gate_up: [..., 2F], the gate half first.
    Returns:
        [..., F] of gate_up's dtype.
    Raises:
        ShapeError: for an odd last dim.
    Source:
        Shazeer 2020, "GLU Variants Improve Transformer".
    Exactness: bitwise within a device.
    """
    if gate_up.shape[-1] % 2:
        raise ShapeError(f"gate_up must have an even last dim (gate and up halves), got {tuple(gate_up.shape)}")
    out: torch.Tensor = _swiglu_op(gate_up.flatten(0, -2))
    return out.unflatten(0, gate_up.shape[:-1])


def swiglu_backward(grad: torch.Tensor, gate_up: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """Gradient of swiglu with respect to gate_up.

    Args:
        grad: [..., F].
        gate_up: [..., 2F], the forward's input, or the same in 1x128 blocks, decoded to fp32.
    Returns:
        [..., 2F] of grad's dtype.
    Raises:
        ShapeError: where grad's width is not half of gate_up's.
    """
    if (*grad.shape[:-1], 2 * grad.shape[-1]) != tuple(gate_up.shape):
        raise ShapeError(f"grad must be [..., F] for gate_up [..., 2F] {tuple(gate_up.shape)}, got {tuple(grad.shape)}")
    if isinstance(gate_up, QuantizedTensor):
        return _swiglu_backward_op(grad, gate_up.qdata, gate_up.scale)
    out: torch.Tensor = _swiglu_backward_op(grad.flatten(0, -2), gate_up.flatten(0, -2), None)
    return out.view(gate_up.shape)
