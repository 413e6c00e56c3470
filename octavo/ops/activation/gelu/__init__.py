"""Bias + GeLU (tanh form) and its gradients; octavo.ops.activation fuses them with quantization."""

import torch

from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.activation.gelu.reference import gelu_backward_reference, gelu_reference
from octavo.ops.activation.swiglu import decode_blocks

__all__ = ["gelu", "gelu_backward", "gelu_reference"]


MaybeTensor = torch.Tensor | None


def _backward(
    grad: torch.Tensor, x: torch.Tensor, scale: MaybeTensor, bias: MaybeTensor
) -> tuple[torch.Tensor, torch.Tensor]:
    x = x if scale is None else decode_blocks(x, scale)
    grad_x = gelu_backward_reference(grad, x, bias)
    return grad_x, grad_x.new_empty(0, dtype=torch.float32) if bias is None else grad_x.float().sum(dim=0)


_gelu_op = register(
    "gelu(Tensor x, Tensor? bias) -> Tensor",
    reference=gelu_reference,
    fake=lambda x, bias: x.new_empty(x.shape),
    cuda=kernel_or_reference("activation.gelu.triton.gelu", gelu_reference),
)
_gelu_backward_op = register(
    "gelu_backward(Tensor grad, Tensor x, Tensor? scale, Tensor? bias) -> (Tensor, Tensor)",
    reference=_backward,
    fake=lambda grad, x, scale, bias: (
        grad.new_empty(grad.shape),
        grad.new_empty(0 if bias is None else x.shape[1], dtype=torch.float32),
    ),
    cuda=kernel_or_reference("activation.gelu.triton.gelu_backward", _backward),
)


def gelu(x: torch.Tensor, bias: torch.Tensor | None = None) -> torch.Tensor:
    """0.5 * z * (1 + tanh(sqrt(2/pi) * (z + 0.044715 z**3))) of z = x + bias, in fp32, rounded once.

    Args:
        x: [T, F] fp32, bf16 or fp16.
        bias: [F] or None.
    Returns:
        [T, F] of x's dtype.
    Raises:
        ShapeError: where x is no matrix or bias is not [F].
    Source:
        Hendrycks and Gimpel 2016, "Gaussian Error Linear Units".
    Exactness: bitwise within a device.
    """
    check_bias(tuple(x.shape), bias)
    return _gelu_op(x, bias)


def gelu_backward(
    grad: torch.Tensor, x: torch.Tensor | QuantizedTensor, bias: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradients of gelu with respect to x and bias.

    Args:
        grad: [T, F].
        x: [T, F], the forward's; may be in 1x128 blocks, decoded to fp32.
        bias: [F] or None, the forward's.
    Returns:
        ([T, F] of grad's dtype, [F] of bias's dtype or None): the second is the sum of the first, in fp32 and in an
        order that depends on the shape alone.
    Raises:
        ShapeError: for shapes other than these.
    """
    check_bias(tuple(x.shape), bias)
    if grad.shape != x.shape:
        raise ShapeError(f"grad must have x's shape {tuple(x.shape)}, got {tuple(grad.shape)}")
    saved = (x.qdata, x.scale) if isinstance(x, QuantizedTensor) else (x, None)
    grad_x, grad_bias = _gelu_backward_op(grad, *saved, bias)
    return grad_x, None if bias is None else grad_bias.to(bias.dtype)


def check_bias(shape: tuple[int, ...], bias: torch.Tensor | None) -> None:
    """Refuse anything but a matrix of shape [T, F] and a bias [F]."""
    if len(shape) != 2:
        raise ShapeError(f"x must be a matrix [T, F], got shape {shape}; flatten leading dims first")
    if bias is not None and tuple(bias.shape) != shape[1:]:
        raise ShapeError(f"bias must have shape {shape[1:]} (the last dim of x), got {tuple(bias.shape)}")
