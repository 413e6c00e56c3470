"""The separate ops one after the other: the meaning of the fused kernel, on any device."""

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.scaled_mm import scaled_mm


def mm_gelu_reference(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor,
    hidden_dtype: torch.dtype,
) -> QuantizedTensor:
    """As octavo.ops.gemm.mm_gelu.mm_gelu."""
    hidden = scaled_mm(a, b, out_dtype=hidden_dtype)  # [M, N]
    return activation_quantize(hidden, kind="gelu", bias=bias, scaling=scaling, quant_scale=quant_scale).rows
