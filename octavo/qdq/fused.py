"""What a rewritten graph calls: octavo's fused ops on tensors [..., K], with scales as plain tensors.

Leading dims are flattened here, so the graph needs no reshapes around a fused op.
"""

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops import quantize as quantizer
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.norm import NormKind
from octavo.ops.norm.norm_quantize import norm_quantize
from octavo.qdq.operators import as_matrix


def fp8_linear(
    codes: torch.Tensor,
    scale: torch.Tensor,
    kind: str,
    weight: torch.Tensor,
    weight_scale: torch.Tensor,
    weight_kind: str,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    fast_accum: bool,
) -> torch.Tensor:
    """One product of codes.

    Args:
        codes: [..., K].
        scale: fp32 of a `kind` scaling of codes as a matrix ([1, 1] per tensor).
        weight: codes [N, K].
        weight_scale: fp32 of its `weight_kind` scaling.
        bias: [N] or None.
        fast_accum: as in scaled_mm.
    Returns:
        [..., N] of out_dtype, rounded once from fp32.
    """
    a = QuantizedTensor(as_matrix(codes), scale, Scaling.of_kind(kind, codes.dtype))
    b = QuantizedTensor(weight, weight_scale, Scaling.of_kind(weight_kind, weight.dtype))
    out = scaled_mm(a, b, bias=bias, out_dtype=out_dtype, fast_accum=fast_accum)
    return out.reshape(*codes.shape[:-1], weight.shape[0])


def norm_to_fp8(
    x: torch.Tensor,
    residual: torch.Tensor | None,
    weight: torch.Tensor,
    bias: torch.Tensor | None,
    eps: float,
    norm: NormKind,
    quant_scale: torch.Tensor | None,
    kind: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None]:
    """Codes of norm(x + residual).

    Args:
        x: [..., K].
        residual: [..., K].
        quant_scale: fp32, one element: 1 / a known per-tensor scale; None for a dynamic one.
    Returns:
        (codes [..., K], scale, x + residual or None).
    """
    rows = norm_quantize(
        as_matrix(x),
        weight,
        bias=bias,
        eps=eps,
        kind=norm,
        residual=None if residual is None else as_matrix(residual),
        scaling=Scaling.of_kind(kind, dtype),
        quant_scale=quant_scale,
    )
    summed = None if rows.summed is None else rows.summed.reshape(x.shape)
    return rows.rows.qdata.reshape(x.shape), rows.rows.scale, summed


def activation_to_fp8(
    x: torch.Tensor,
    bias: torch.Tensor | None,
    activation: str,
    quant_scale: torch.Tensor | None,
    kind: str,
    dtype: torch.dtype,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of an activation.

    Args:
        x: [..., 2F] for "swiglu" (gate half first), [..., F] for "gelu".
        quant_scale: as in norm_to_fp8.
    Returns:
        (codes [..., F], scale).
    """
    rows = activation_quantize(
        as_matrix(x), kind=activation, bias=bias, scaling=Scaling.of_kind(kind, dtype), quant_scale=quant_scale
    ).rows
    return rows.qdata.reshape(*x.shape[:-1], rows.qdata.shape[1]), rows.scale


def to_fp8(
    x: torch.Tensor, quant_scale: torch.Tensor | None, kind: str, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """Codes of x by one kernel: (codes of x's shape, scale). quant_scale: as in norm_to_fp8."""
    q = quantizer.quantize(as_matrix(x), Scaling.of_kind(kind, dtype), quant_scale=quant_scale)
    return q.qdata.reshape(x.shape), q.scale
