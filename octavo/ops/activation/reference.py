"""Activation and quantization as separate ops one after the other: the meaning of every fused op, on any device.

Also the path of shapes that no fused kernel takes; the ops called here dispatch by device themselves.
"""

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation.gelu import gelu, gelu_backward
from octavo.ops.activation.swiglu import swiglu, swiglu_backward
from octavo.ops.quantize import quantize, quantize_both, quantize_columns

ForwardColumns = tuple[Scaling, torch.Tensor | None]


def activation(x: torch.Tensor, kind: str, bias: torch.Tensor | None) -> torch.Tensor:
    """[T, F] of x's dtype."""
    return swiglu(x) if kind == "swiglu" else gelu(x, bias)


def activation_backward(
    grad: torch.Tensor, x: torch.Tensor | QuantizedTensor, kind: str, bias: torch.Tensor | None
) -> tuple[torch.Tensor, torch.Tensor | None]:
    """Gradient in x's place, of grad's dtype, and the bias's."""
    if isinstance(x, QuantizedTensor) and x.scaling.kind != "block_1x128":
        x = decode(x)
    return (swiglu_backward(grad, x), None) if kind == "swiglu" else gelu_backward(grad, x, bias)


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None,
    scaling: Scaling,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    store_scaling: Scaling | None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, QuantizedTensor | None]:
    """Rows and columns of the activation, and x in FP8."""
    y = activation(x, kind, bias)
    columns = None
    if column_scaling is None:
        rows = quantize(y, scaling, quant_scale=quant_scale, amax_out=amax_out)
    else:
        rows, columns = quantize_both(
            y, scaling, column_scaling=column_scaling, quant_scale=quant_scale, amax_out=amax_out
        )
    return rows, columns, None if store_scaling is None else quantize(x, store_scaling)


def activation_backward_quantize(
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    kind: str,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    forward_columns: ForwardColumns | None,
) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor | None, QuantizedTensor | None]:
    """Rows and columns of the gradient in x's place, the bias's, and columns of the activation of `stored`."""
    grad_x, grad_bias = activation_backward(grad, stored, kind, bias)
    rows, columns = quantize_both(grad_x, scaling, quant_scale=quant_scale, amax_out=amax_out)
    output_columns = None
    if forward_columns is not None:
        y = activation(decode(stored), kind, bias).to(grad.dtype)
        output_columns = quantize_columns(y, forward_columns[0], quant_scale=forward_columns[1])
    return rows, columns, grad_bias, output_columns


def decode(stored: torch.Tensor | QuantizedTensor) -> torch.Tensor:
    """The saved input: as it is, or its codes decoded to fp32."""
    return stored.dequantize() if isinstance(stored, QuantizedTensor) else stored
