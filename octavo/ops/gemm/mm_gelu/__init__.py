"""FP8 GEMM whose epilogue adds a bias, applies GeLU and quantizes by a known scale: only FP8 travels between linears.

GPT-J's first MLP linear under a recipe with static inputs. Legend: M tokens, N out, K in.
"""

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation.gelu import check_bias
from octavo.ops.gemm.mm_gelu.reference import mm_gelu_reference
from octavo.ops.gemm.scaled_mm import library
from octavo.ops.quantize import check_scales

__all__ = ["mm_gelu", "mm_gelu_reference"]


def mm_gelu(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor,
    hidden_dtype: torch.dtype = torch.bfloat16,
) -> QuantizedTensor:
    """quantize(gelu(a @ b.t() + bias)) by a known quant_scale.

    Args:
        a: [M, K], b: [N, K], as in scaled_mm. bias: [N] or None, added in fp32.
        scaling: of the result, per tensor. quant_scale: [1] fp32.
        hidden_dtype: what the product and GeLU's output are rounded to on the way, as separate ops round them.
    Returns:
        [M, N] codes and scale.
    Raises:
        ShapeError: operands or scales that do not go together, a bias of another length.
    Exactness: the separate ops' roundings; on a GPU the kernel, which takes E4M3 with one scale a tensor on all sides,
        has its own order of sums: codes differ by one step where a sum is near the middle between two.
    """
    library.check_operands(a.shape, a.scaling, b.shape, b.scaling)
    check_scales(quant_scale, None, scaling)
    check_bias((a.shape[0], b.shape[0]), bias)
    if a.qdata.is_cuda and not env.force_reference():
        from octavo.ops.gemm.mm_gelu import triton

        if triton.can_run(a, b, scaling):
            return triton.mm_gelu(a, b, bias, scaling, quant_scale, hidden_dtype)
    return mm_gelu_reference(a, b, bias, scaling, quant_scale, hidden_dtype)
