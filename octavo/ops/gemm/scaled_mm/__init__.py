"""GEMM of two quantized operands: a [M, K] times b [N, K] transposed."""

import functools

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import is_unwatched, register
from octavo.ops.gemm.scaled_mm import library
from octavo.ops.gemm.scaled_mm.exact import bucket_of, scaled_mm_exact
from octavo.ops.gemm.scaled_mm.reference import scaled_mm_reference

__all__ = ["scaled_mm", "scaled_mm_reference", "unpadded_rows"]

OUT_DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def _operand(codes: torch.Tensor, scale: torch.Tensor, block_size: list[int]) -> QuantizedTensor:
    return QuantizedTensor(codes, scale, _scaling(codes.dtype, *block_size))


@functools.lru_cache(maxsize=64)
def _scaling(dtype: torch.dtype, rows: int, cols: int) -> Scaling:
    return Scaling(dtype, (rows, cols))


def _unpack(run, run_exact):  # type: ignore[no-untyped-def]
    def call(a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, exact, fast_accum):  # type: ignore[no-untyped-def]
        left, right = _operand(a, a_scale, a_block), _operand(b, b_scale, b_block)
        if exact:
            return run_exact(left, right, bias, out_dtype)
        return run(left, right, bias, out_dtype, fast_accum)

    return call


def _cpu(a: QuantizedTensor, b: QuantizedTensor, bias, out_dtype, fast_accum):  # type: ignore[no-untyped-def]
    return library.decoded_mm(a, b, bias, out_dtype)


def _cuda(a: QuantizedTensor, b: QuantizedTensor, bias, out_dtype, fast_accum):  # type: ignore[no-untyped-def]
    return library.scaled_mm_cuda(a, b, bias, out_dtype, fast_accum=fast_accum)


def _cuda_exact(a: QuantizedTensor, b: QuantizedTensor, bias, out_dtype):  # type: ignore[no-untyped-def]
    return (scaled_mm_reference if env.force_reference() else scaled_mm_exact)(a, b, bias, out_dtype)


def _fake(a, a_scale, a_block, b, b_scale, b_block, bias, out_dtype, exact, fast_accum):  # type: ignore[no-untyped-def]
    return a.new_empty((a.shape[0], b.shape[0]), dtype=out_dtype)


_op = register(
    "scaled_mm(Tensor a, Tensor a_scale, int[] a_block, Tensor b, Tensor b_scale, int[] b_block, Tensor? bias, "
    "ScalarType out_dtype, bool exact, bool fast_accum) -> Tensor",
    reference=_unpack(_cpu, scaled_mm_reference),
    fake=_fake,
    cuda=_unpack(_cuda, _cuda_exact),
)


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
        a: [M, K]. b: [N, K], on the same device. Scalings: per tensor or per row on either side, or 1x128 / 128x128
            blocks (not 128x128 on both sides).
        bias: [N] or None, added before the output is rounded.
        out_dtype: bf16, fp16 or fp32.
        exact: the bits of a row depend on that row alone: in the reference's order on a CPU, by a library whose rows
            are checked at a shape's first product on a GPU; else a library's order of sums.
        fast_accum: let the GPU keep a long sum in its matrix units, which hold fewer bits than fp32; without blocks.
    Returns:
        [M, N] of out_dtype, rounded once from fp32.
    Raises:
        ShapeError: unequal K, a bias of another length, or scalings that do not go together.
        DtypeError: an out_dtype outside these. BackendError: exact, and the library's rows depend on one another.
    Source: docs/numerics.md, "GEMM". Exactness: exact=True bitwise within a device; else SQNR >= 45 dB, with
        fast_accum >= 40 dB.
    """
    if bias is not None and tuple(bias.shape) != (b.shape[0],):
        raise ShapeError(f"bias must have shape ({b.shape[0]},), got {tuple(bias.shape)}")
    if out_dtype not in OUT_DTYPES:
        raise DtypeError(f"out_dtype must be bfloat16, float16 or float32, got {out_dtype}")
    if a.qdata.is_cuda and not exact and is_unwatched(a.qdata):
        return library.scaled_mm_cuda(a, b, bias, out_dtype, fast_accum=fast_accum)
    library.check_operands(a.shape, a.scaling, b.shape, b.scaling)
    left = (a.qdata, a.scale, list(a.scaling.block_size))
    right = (b.qdata, b.scale, list(b.scaling.block_size))
    return _op(*left, *right, bias, out_dtype, exact, fast_accum)


def unpadded_rows(rows: int, exact: bool) -> int:
    """The least M from this one on to which nothing has to be added for a GPU, where rows are in 1x128 blocks."""
    return bucket_of(rows) if exact else library.unpadded_rows(rows)
