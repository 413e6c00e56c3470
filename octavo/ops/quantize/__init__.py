"""Quantize a matrix along its rows, its columns, or both: the same codes and scales, bit for bit, on every device."""

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling, check_known_scale, check_matrix
from octavo.ops.quantize import reference
from octavo.ops.registry import register

__all__ = ["quantize", "quantize_both", "quantize_columns"]


def _scaling(dtype: torch.dtype, block_size: list[int], scale_format: str, amax_floor: float) -> Scaling:
    return Scaling(dtype, (block_size[0], block_size[1]), scale_format, amax_floor)


def _args(scaling: Scaling) -> tuple[torch.dtype, list[int], str, float]:
    return scaling.dtype, list(scaling.block_size), scaling.scale_format, scaling.amax_floor


def _reference(fn):  # type: ignore[no-untyped-def]
    def run(x, quant_scale, *fields):  # type: ignore[no-untyped-def]
        return fn(x, _scaling(*fields), quant_scale)

    return run


def _cuda(name: str):  # type: ignore[no-untyped-def]
    def run(x, quant_scale, *fields):  # type: ignore[no-untyped-def]
        if env.force_reference():
            return getattr(reference, name)(x, _scaling(*fields), quant_scale)
        from octavo.ops.quantize import triton

        kernels = {"rows": triton.quantize_rows, "columns": triton.quantize_columns, "both": triton.quantize_both}
        return kernels[name](x, _scaling(*fields), quant_scale)

    return run


def _empty(x: torch.Tensor, scaling: Scaling, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty((rows, cols), dtype=scaling.dtype)
    return codes, x.new_empty(scaling.scale_shape(rows, cols), dtype=torch.float32)


def _fake_rows(x, quant_scale, *fields):  # type: ignore[no-untyped-def]
    return _empty(x, _scaling(*fields), x.shape[0], x.shape[1])


def _fake_columns(x, quant_scale, *fields):  # type: ignore[no-untyped-def]
    return _empty(x, _scaling(*fields), x.shape[1], x.shape[0])


def _fake_both(x, quant_scale, *fields):  # type: ignore[no-untyped-def]
    return (*_fake_rows(x, quant_scale, *fields), *_fake_columns(x, quant_scale, *fields))


_FIELDS = "Tensor x, Tensor? quant_scale, ScalarType dtype, int[] block_size, str scale_format, float amax_floor"
_rows_op = register(
    f"quantize_rows({_FIELDS}) -> (Tensor, Tensor)",
    reference=_reference(reference.rows),
    fake=_fake_rows,
    cuda=_cuda("rows"),
)
_columns_op = register(
    f"quantize_columns({_FIELDS}) -> (Tensor, Tensor)",
    reference=_reference(reference.columns),
    fake=_fake_columns,
    cuda=_cuda("columns"),
)
_both_op = register(
    f"quantize_both({_FIELDS}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_reference(reference.both),
    fake=_fake_both,
    cuda=_cuda("both"),
)


def _check(x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None) -> None:
    check_matrix(x, "x")
    if quant_scale is not None:
        check_known_scale(quant_scale, scaling)


def quantize(x: torch.Tensor, scaling: Scaling, *, quant_scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize a matrix along its rows: the operand of a GEMM that sums over x's columns.

    Args:
        x: [M, K] fp32, bf16 or fp16; any M and K, zero included.
        scaling: format, block shape, scale format and floor.
        quant_scale: fp32 scalar tensor, a known quant_scale (delayed scaling); per_tensor only.
    Returns:
        QuantizedTensor: qdata [M, K], scale [ceil(M/bm), ceil(K/bk)] fp32 (decodes).
    Raises:
        ShapeError, DtypeError: if x is no matrix of these dtypes, or quant_scale comes with blocks.
    Source: docs/numerics.md; the rule is TransformerEngine's. Exactness: bitwise, CPU and GPU.
    """
    _check(x, scaling, quant_scale)
    codes, scale = _rows_op(x, quant_scale, *_args(scaling))
    return QuantizedTensor(codes, scale, scaling)


def quantize_columns(x: torch.Tensor, scaling: Scaling, *, quant_scale: torch.Tensor | None = None) -> QuantizedTensor:
    """Quantize x.t(): the operand of a GEMM that sums over x's rows (Hopper takes K-major FP8 operands only).

    Args:
        x: [M, K] as in quantize.
    Returns:
        QuantizedTensor of shape [K, M]; blocks run along M.
    Raises, Exactness: as quantize.
    """
    _check(x, scaling, quant_scale)
    codes, scale = _columns_op(x, quant_scale, *_args(scaling))
    return QuantizedTensor(codes, scale, scaling)


def quantize_both(
    x: torch.Tensor, scaling: Scaling, *, quant_scale: torch.Tensor | None = None
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """quantize(x) and quantize_columns(x) from one read of x.

    Returns:
        (rows [M, K], columns [K, M]).
    Raises, Exactness: as quantize.
    """
    _check(x, scaling, quant_scale)
    row_codes, row_scale, col_codes, col_scale = _both_op(x, quant_scale, *_args(scaling))
    return QuantizedTensor(row_codes, row_scale, scaling), QuantizedTensor(col_codes, col_scale, scaling)
