"""GEMM of two quantized operands: a [M, K] times b [N, K] transposed."""

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import GEMM_PAIRS, Scaling
from octavo.ops._runtime.registry import bypassing, define
from octavo.ops.gemm.scaled_mm import library
from octavo.ops.gemm.scaled_mm.exact import bucket_of, scaled_mm_exact
from octavo.ops.gemm.scaled_mm.reference import scaled_mm_reference

__all__ = ["scaled_mm", "scaled_mm_reference", "unpadded_rows"]

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _cpu(a: QuantizedTensor, b: QuantizedTensor, bias, out_dtype, exact, fast_accum):  # type: ignore[no-untyped-def]
    if a.qdata.shape[1] != b.qdata.shape[1] or (a.scaling.kind, b.scaling.kind) not in GEMM_PAIRS:
        library.check_operands(a.qdata.shape, a.scaling, b.qdata.shape, b.scaling)
    return (scaled_mm_reference if exact else library.decoded_mm)(a, b, bias, out_dtype)


def _cuda(a: QuantizedTensor, b: QuantizedTensor, bias, out_dtype, exact, fast_accum):  # type: ignore[no-untyped-def]
    if not exact:
        return library.scaled_mm_cuda(a, b, bias, out_dtype, fast_accum=fast_accum)
    if env.force_reference():
        return _cpu(a, b, bias, out_dtype, exact, fast_accum)
    return scaled_mm_exact(a, b, bias, out_dtype)


def _unpacked(run):  # type: ignore[no-untyped-def]
    def call(a, a_scale, a_scaling, b, b_scale, b_scaling, *rest):  # type: ignore[no-untyped-def]
        left = QuantizedTensor(a, a_scale, Scaling.of_text(a_scaling))
        return run(left, QuantizedTensor(b, b_scale, Scaling.of_text(b_scaling)), *rest)

    return call


def _dispatched(a: QuantizedTensor, b: QuantizedTensor, *rest):  # type: ignore[no-untyped-def]
    library.check_operands(a.shape, a.scaling, b.shape, b.scaling)  # a fake checks nothing
    if torch.compiler.is_compiling() and library.is_plain(a, b, *rest):
        return library.plain_mm(a, b, *rest)
    return _op(a.qdata, a.scale, a.scaling.text, b.qdata, b.scale, b.scaling.text, *rest)


_op = define(
    "scaled_mm(Tensor a, Tensor a_scale, str a_scaling, Tensor b, Tensor b_scale, str b_scaling, Tensor? bias, "
    "ScalarType out_dtype, bool exact, bool fast_accum) -> Tensor",
    reference=_unpacked(_cpu),
    fake=lambda a, a_scale, a_scaling, b, *rest: a.new_empty((a.shape[0], b.shape[0]), dtype=rest[3]),
    cuda=_unpacked(_cuda),
)
_product = bypassing("scaled_mm", _dispatched, reference=_cpu, cuda=_cuda)


def scaled_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
    fast_accum: bool = False,
) -> torch.Tensor:
    """Multiply two quantized matrices, both with the summed dimension last.

    Args:
        a: [M, K].
        b: [N, K], on the same device. Scalings: per tensor or per row on either side, or 1x128 / 128x128 blocks (not
            128x128 on both sides).
        bias: [N] or None, added before the output is rounded.
        out_dtype: bf16, fp16 or fp32.
        exact: the bits of a row depend on that row alone: in the reference's order on a CPU, by a library whose rows
            are checked at a shape's first product on a GPU; else a library's order of sums.
        fast_accum: let the GPU keep a long sum in its matrix units, which hold fewer bits than fp32; without blocks.
    Returns:
        [M, N] of out_dtype, rounded once from fp32.
    Raises:
        ShapeError: unequal K, a bias of another length, or scalings that do not go together.
        DtypeError: an out_dtype outside these.
        BackendError: exact, and the library's rows depend on one another.
    Source:
        docs/numerics.md, "GEMM".
    Exactness: exact=True bitwise within a device; else SQNR >= 45 dB, with fast_accum >= 40 dB.
    """
    if bias is not None and tuple(bias.shape) != (b.qdata.shape[0],):
        raise ShapeError(f"bias must have shape ({b.shape[0]},), got {tuple(bias.shape)}")
    if out_dtype not in OUT_DTYPES:
        raise DtypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    return _product(a, b, bias, out_dtype, exact, fast_accum)


def unpadded_rows(rows: int, exact: bool) -> int:
    """The least M from this one on to which nothing has to be added for a GPU, where rows are in 1x128 blocks."""
    return bucket_of(rows) if exact else library.unpadded_rows(rows)
