"""Quantize a matrix along its rows, its columns, or both: the same codes and scales, bit for bit, on every device."""

import functools

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import INPUT_DTYPES, Scaling, check_known_scale, check_matrix
from octavo.ops._runtime.registry import is_unwatched, register
from octavo.ops.quantize import reference

__all__ = ["quantize", "quantize_both", "quantize_columns"]


def _scalings(fields: tuple) -> list[Scaling]:  # type: ignore[type-arg]
    """The Scalings of an op's flat arguments, four fields each."""
    quadruples = [fields[i : i + 4] for i in range(0, len(fields), 4)]
    return [_scaling(dtype, *block, fmt, floor) for dtype, block, fmt, floor in quadruples]


@functools.lru_cache(maxsize=256)
def _scaling(dtype: torch.dtype, rows: int, cols: int, scale_format: str, amax_floor: float) -> Scaling:
    return Scaling(dtype, (rows, cols), scale_format, amax_floor)


def _fields(scaling: Scaling) -> tuple[torch.dtype, list[int], str, float]:
    return scaling.dtype, list(scaling.block_size), scaling.scale_format, scaling.amax_floor


def _reference(fn):  # type: ignore[no-untyped-def]
    def run(x, quant_scale, amax_out, *fields):  # type: ignore[no-untyped-def]
        return fn(x, *_scalings(fields), quant_scale, amax_out)

    return run


def _cuda(name: str):  # type: ignore[no-untyped-def]
    def run(x, quant_scale, amax_out, *fields):  # type: ignore[no-untyped-def]
        scalings = _scalings(fields)
        if env.force_reference():
            return getattr(reference, name)(x, *scalings, quant_scale, amax_out)
        from octavo.ops.quantize import triton

        return getattr(triton, f"quantize_{name}")(x, *scalings, quant_scale, amax_out)

    return run


def _empty(x: torch.Tensor, scaling: Scaling, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    codes = x.new_empty((rows, cols), dtype=scaling.dtype)
    num_rows, num_cols = scaling.scale_shape(rows, cols)
    if scaling.kind in ("block_1x128", "mx_1x32"):
        return codes, x.new_empty((num_cols, num_rows), dtype=torch.float32).t()  # strides (1, rows)
    return codes, x.new_empty((num_rows, num_cols), dtype=torch.float32)


def _fake_rows(x, quant_scale, amax_out, *fields):  # type: ignore[no-untyped-def]
    return _empty(x, _scalings(fields)[0], x.shape[0], x.shape[1])


def _fake_columns(x, quant_scale, amax_out, *fields):  # type: ignore[no-untyped-def]
    return _empty(x, _scalings(fields)[0], x.shape[1], x.shape[0])


def _fake_both(x, quant_scale, amax_out, *fields):  # type: ignore[no-untyped-def]
    return (
        *_fake_rows(x, quant_scale, amax_out, *fields[:4]),
        *_fake_columns(x, quant_scale, amax_out, *fields[4:]),
    )


_INPUTS = "Tensor x, Tensor? quant_scale, Tensor(a!)? amax_out"
_SCALING = "ScalarType dtype, int[] block_size, str scale_format, float amax_floor"
_COLUMN_SCALING = "ScalarType column_dtype, int[] column_block_size, str column_scale_format, float column_amax_floor"
_rows_op = register(
    f"quantize_rows({_INPUTS}, {_SCALING}) -> (Tensor, Tensor)",
    reference=_reference(reference.rows),
    fake=_fake_rows,
    cuda=_cuda("rows"),
)
_columns_op = register(
    f"quantize_columns({_INPUTS}, {_SCALING}) -> (Tensor, Tensor)",
    reference=_reference(reference.columns),
    fake=_fake_columns,
    cuda=_cuda("columns"),
)
_both_op = register(
    f"quantize_both({_INPUTS}, {_SCALING}, {_COLUMN_SCALING}) -> (Tensor, Tensor, Tensor, Tensor)",
    reference=_reference(reference.both),
    fake=_fake_both,
    cuda=_cuda("both"),
)


def check_scales(quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None, *scalings: Scaling) -> None:
    """Refuse a known quant_scale that is no number per tensor, and an amax_out without one or that is no fp32 number.

    Raises:
        ShapeError, DtypeError.
    """
    if quant_scale is not None:
        for scaling in scalings:
            if scaling.block_size != (-1, -1) or quant_scale.numel() != 1:
                check_known_scale(quant_scale, scaling)
    if amax_out is None:
        return
    if quant_scale is None or amax_out.numel() != 1:
        raise ShapeError(
            f"amax_out is one number and goes with a known quant_scale (delayed scaling), got shape "
            f"{tuple(amax_out.shape)} and {'a' if quant_scale is not None else 'no'} quant_scale"
        )
    if amax_out.dtype != torch.float32:
        raise DtypeError(f"amax_out must be float32, got {amax_out.dtype}; make it with torch.zeros(1)")


def check_place(out: QuantizedTensor, x: torch.Tensor, scaling: Scaling) -> None:
    """Refuse an operand that cannot take the rows of x under this scaling.

    Raises:
        ShapeError.
    """
    if (out.qdata.shape, out.qdata.device, out.scaling) != (x.shape, x.device, scaling):
        raise ShapeError(
            f"out must be a {tuple(x.shape)} operand of {scaling} on {x.device}, as quantize made one, got "
            f"{tuple(out.shape)} of {out.scaling} on {out.device}"
        )


def _is_laid_out(out: QuantizedTensor) -> bool:
    """Whether kernels can write into it: strides and alignment are those of a new operand."""
    is_grouped = out.scaling.kind in ("block_1x128", "mx_1x32")
    scale = out.scale.t() if is_grouped else out.scale
    is_aligned = out.qdata.data_ptr() % 16 == 0 == out.scale.data_ptr() % 16
    return is_aligned and out.qdata.is_contiguous() and scale.is_contiguous()


def _put(made: QuantizedTensor, out: QuantizedTensor | None) -> QuantizedTensor:
    """What was made, in the place of `out` where there is one."""
    if out is None or made is out:
        return made
    out.qdata.copy_(made.qdata)
    out.scale.copy_(made.scale)
    return out


def _runs_kernels(x: torch.Tensor) -> bool:
    """Whether the kernels can be called without the op around them, which costs a small launch's time on the CPU."""
    return x.is_cuda and is_unwatched(x) and not env.force_reference()


@functools.cache
def _kernels():  # type: ignore[no-untyped-def]
    from octavo.ops.quantize import triton

    return triton


def quantize(
    x: torch.Tensor,
    scaling: Scaling,
    *,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """Quantize a matrix along its rows: the operand of a GEMM that sums over x's columns.

    Args:
        x: [M, K] fp32, bf16 or fp16; any M and K, zero included.
        scaling: format, block shape, scale format and floor.
        quant_scale: fp32 scalar tensor, a known quant_scale (delayed scaling); per_tensor only.
        amax_out: fp32 tensor of one number >= 0, into which max|x| (NaN dropped) is folded in place by the same
            pass; only with quant_scale.
        out: an operand that an earlier call returned for such a matrix; it is overwritten and returned.
    Returns:
        QuantizedTensor: qdata [M, K], scale [ceil(M/bm), ceil(K/bk)] fp32 (decodes), with strides (1, M) for 1xB
        blocks, as cuBLASLt takes them.
    Raises:
        ShapeError, DtypeError: if x is no matrix of these dtypes, quant_scale comes with blocks, amax_out without, or
        out is another operand's.
    Source: docs/numerics.md; the rule is TransformerEngine's. Exactness: bitwise, CPU and GPU.
    """
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling)
    if out is not None:
        check_place(out, x, scaling)
    if _runs_kernels(x):
        place = out if out is not None and _is_laid_out(out) else None
        return _put(_kernels().codes_of(x, scaling, None, quant_scale, amax_out, True, place)[0], out)
    codes, scale = _rows_op(x, quant_scale, amax_out, *_fields(scaling))
    return _put(QuantizedTensor(codes, scale, scaling), out)


def quantize_columns(
    x: torch.Tensor,
    scaling: Scaling,
    *,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize x.t(): the operand of a GEMM that sums over x's rows (Hopper takes K-major FP8 operands only).

    Args:
        x, scaling, quant_scale, amax_out: as in quantize.
    Returns:
        QuantizedTensor of shape [K, M]; blocks run along M.
    Raises, Exactness: as quantize.
    """
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling)
    if _runs_kernels(x):
        return _kernels().codes_of(x, None, scaling, quant_scale, amax_out, True)[1]
    codes, scale = _columns_op(x, quant_scale, amax_out, *_fields(scaling))
    return QuantizedTensor(codes, scale, scaling)


def quantize_both(
    x: torch.Tensor,
    scaling: Scaling,
    *,
    column_scaling: Scaling | None = None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    out: QuantizedTensor | None = None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """quantize(x, scaling) and quantize_columns(x, column_scaling) from one read of x.

    Args:
        x, scaling, quant_scale, amax_out: as in quantize.
        column_scaling: of the columns, where it is another than the rows'.
        out: as in quantize, for the rows.
    Returns:
        (rows [M, K], columns [K, M]).
    Raises, Exactness: as quantize.
    """
    columns = scaling if column_scaling is None else column_scaling
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling, columns)
    if out is not None:
        check_place(out, x, scaling)
    if _runs_kernels(x):
        place = out if out is not None and _is_laid_out(out) else None
        made = _kernels().codes_of(x, scaling, columns, quant_scale, amax_out, True, place)
        return made if out is None else (_put(made[0], out), made[1])
    row_codes, row_scale, col_codes, col_scale = _both_op(
        x, quant_scale, amax_out, *_fields(scaling), *_fields(columns)
    )
    return _put(QuantizedTensor(row_codes, row_scale, scaling), out), QuantizedTensor(col_codes, col_scale, columns)
