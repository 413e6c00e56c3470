"""The grouped product, the activation and the quantizer one after the other: the ground truth, and every other path."""

from collections.abc import Sequence

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.grouped_mm import Gather, scaled_grouped_mm


def grouped_swiglu_reference(
    a: QuantizedTensor,
    weights: Sequence[QuantizedTensor],
    offsets: torch.Tensor,
    gather: Gather | None,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    dtype: torch.dtype,
    exact: bool,
    fast_accum: bool,
) -> QuantizedTensor:
    """Codes [R, N / 2] of swiglu of a's rows times their groups' weights [N, K], which is rounded to dtype before."""
    hidden = scaled_grouped_mm(a, weights, offsets, gather=gather, out_dtype=dtype, exact=exact, fast_accum=fast_accum)
    return activation_quantize(hidden, kind="swiglu", scaling=scaling, quant_scale=quant_scale).rows
