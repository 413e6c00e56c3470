"""GEMM of two quantized operands: a [M, K] times b [N, K] transposed."""

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.scaled_mm import library
from octavo.ops.scaled_mm.reference import scaled_mm_reference

__all__ = ["scaled_mm", "scaled_mm_reference"]

_PAIRS = {
    ("per_tensor", "per_tensor"),
    ("per_row", "per_row"),
    ("block_1x128", "block_128x128"),
    ("block_128x128", "block_1x128"),
    ("block_1x128", "block_1x128"),
}


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
) -> torch.Tensor:
    """Multiply two quantized matrices, both with the summed dimension last.

    Args:
        a: [M, K]. b: [N, K], on the same device. Scalings: both per tensor, both per row, or 1x128 / 128x128 blocks
            (not 128x128 on both sides).
        bias: [N] or None, added before the output is rounded.
        out_dtype: bf16, fp16 or fp32.
        exact: the bits of a row depend on that row alone (reference order); else a library's order of sums.
    Returns:
        [M, N] of out_dtype, rounded once from fp32.
    Raises:
        ShapeError: unequal K, a bias of another length, or scalings that do not go together.
        DtypeError: an out_dtype outside these.
    Source: docs/numerics.md, "GEMM". Exactness: exact=True bitwise within a device; else SQNR >= 45 dB.
    """
    if a.shape[1] != b.shape[1]:
        raise ShapeError(f"a [M, K] and b [N, K] must agree in K, got {tuple(a.shape)} and {tuple(b.shape)}")
    if (a.scaling.kind, b.scaling.kind) not in _PAIRS:
        known = ", ".join(" x ".join(pair) for pair in sorted(_PAIRS))
        raise ShapeError(f"no GEMM takes {a.scaling.kind} x {b.scaling.kind}; known pairs: {known}")
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ShapeError(f"bias must have shape ({b.shape[0]},), got {tuple(bias.shape)}")
    if out_dtype not in (torch.bfloat16, torch.float16, torch.float32):
        raise DtypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if exact:
        return scaled_mm_reference(a, b, bias, out_dtype)
    run = library.scaled_mm_cuda if a.device.type == "cuda" else library.decoded_mm
    return run(a, b, bias, out_dtype)
