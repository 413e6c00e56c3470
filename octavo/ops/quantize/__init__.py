"""Quantize a matrix along its rows, its columns, or both: the same codes and scales, bit for bit, on every device."""

import functools
from collections.abc import Callable

import torch

from octavo import env
from octavo.errors import DtypeError, ShapeError
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import INPUT_DTYPES, Scaling, check_known_scale, check_matrix
from octavo.ops._runtime.registry import bypassing, define
from octavo.ops.quantize import reference

__all__ = ["quantize", "quantize_both", "quantize_columns"]


def text_of(scaling: Scaling | None) -> str:
    """A scaling as an op's argument; "" for none."""
    return "" if scaling is None else scaling.text


def scaling_of(text: str) -> Scaling | None:
    """The scaling of text_of."""
    return Scaling.of_text(text) if text else None


def empty_operand(x: torch.Tensor, text: str, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Unset codes and scale of a [rows, cols] operand as quantize lays them out; two empty tensors for no scaling."""
    scaling = scaling_of(text)
    if scaling is None:
        return x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    codes = x.new_empty((rows, cols), dtype=scaling.dtype)
    num_rows, num_cols = scaling.scale_shape(rows, cols)
    if scaling.kind in ("block_1x128", "mx_1x32"):
        return codes, x.new_empty((num_cols, num_rows), dtype=torch.float32).t()  # strides (1, rows)
    return codes, x.new_empty((num_rows, num_cols), dtype=torch.float32)


@functools.cache
def _kernels():  # type: ignore[no-untyped-def]
    from octavo.ops.quantize import triton

    return triton


def _quantize_cuda(x, scaling, column_scaling, quant_scale, amax_out, out=None, shares_zeros=True):  # type: ignore[no-untyped-def]
    if env.force_reference():
        return reference.quantize_matrix(x, scaling, column_scaling, quant_scale, amax_out, out)
    return _kernels().quantize_matrix(x, scaling, column_scaling, quant_scale, amax_out, out, shares_zeros)


def _make(name: str, *directions: str) -> Callable[..., reference.Operands]:
    """reference.quantize_matrix on every device, as the op `octavo::quantize_NAME` where something looks on."""

    def texts_of(texts):  # type: ignore[no-untyped-def]
        return texts[0] if "rows" in directions else "", texts[-1] if "columns" in directions else ""

    def run(quantize_matrix, x, quant_scale, amax_out, *texts):  # type: ignore[no-untyped-def]
        made = quantize_matrix(x, *map(scaling_of, texts_of(texts)), quant_scale, amax_out)
        return tuple(part for q in made if q is not None for part in (q.qdata, q.scale))

    def fake(x, quant_scale, amax_out, *texts):  # type: ignore[no-untyped-def]
        rows, columns = texts_of(texts)
        made = empty_operand(x, rows, *x.shape) if rows else ()
        return (*made, *empty_operand(x, columns, *x.shape[::-1])) if columns else made

    def dispatched(x, scaling, column_scaling, quant_scale, amax_out, out=None):  # type: ignore[no-untyped-def]
        parts = op(x, quant_scale, amax_out, *[s.text for s in (scaling, column_scaling) if s is not None])
        rows = None if scaling is None else QuantizedTensor(parts[0], parts[1], scaling)
        columns = None if column_scaling is None else QuantizedTensor(parts[-2], parts[-1], column_scaling)
        return reference.placed(rows, out), columns

    texts = ", ".join(f"str {direction}" for direction in directions)
    tensors = ", ".join("Tensor, Tensor" for _ in directions)
    schema = f"quantize_{name}(Tensor x, Tensor? quant_scale, Tensor(a!)? amax_out, {texts}) -> ({tensors})"
    cpu = functools.partial(run, reference.quantize_matrix)
    # an allocator of the graph around this call, as torch.compile's CUDA graphs have one, knows of no shared zeros
    cuda = functools.partial(run, functools.partial(_quantize_cuda, shares_zeros=False))
    op = define(schema, reference=cpu, fake=fake, cuda=cuda)
    return bypassing(f"quantize_{name}", dispatched, reference=reference.quantize_matrix, cuda=_quantize_cuda)


_rows = _make("rows", "rows")
_columns = _make("columns", "columns")
_both = _make("both", "rows", "columns")


def check_scales(quant_scale: torch.Tensor | None, amax_out: torch.Tensor | None, *scalings: Scaling) -> None:
    """Refuse a known quant_scale that is no number per tensor, and an amax_out without one or that is no fp32 number.

    Raises:
        ShapeError: quant_scale or amax_out is no number, or amax_out comes alone.
        DtypeError: amax_out is not fp32.
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
        ShapeError: its shape, device or scaling is another.
    """
    if (out.qdata.shape, out.qdata.device, out.scaling) != (x.shape, x.device, scaling):
        raise ShapeError(
            f"out must be a {tuple(x.shape)} operand of {scaling} on {x.device}, as quantize made one, got "
            f"{tuple(out.shape)} of {out.scaling} on {out.device}"
        )


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
        ShapeError: if x is no matrix, quant_scale comes with blocks, amax_out without, or out is another operand's.
        DtypeError: if x is of another dtype, or amax_out is not fp32.
    Source:
        docs/numerics.md; the rule is TransformerEngine's.
    Exactness: bitwise, CPU and GPU.
    """
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling)
    if out is not None:
        check_place(out, x, scaling)
    return _rows(x, scaling, None, quant_scale, amax_out, out)[0]  # type: ignore[return-value]


def quantize_columns(
    x: torch.Tensor,
    scaling: Scaling,
    *,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
) -> QuantizedTensor:
    """Quantize x.t(): the operand of a GEMM that sums over x's rows (Hopper takes K-major FP8 operands only).

    Args:
        x: as in quantize.
        scaling: as in quantize.
        quant_scale: as in quantize.
        amax_out: as in quantize.
    Returns:
        QuantizedTensor of shape [K, M]; blocks run along M.
    Errors and exactness as quantize.
    """
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling)
    return _columns(x, None, scaling, quant_scale, amax_out)[1]  # type: ignore[return-value]


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
        x: as in quantize.
        scaling: as in quantize.
        quant_scale: as in quantize.
        amax_out: as in quantize.
        column_scaling: of the columns, where it is another than the rows'.
        out: as in quantize, for the rows.
    Returns:
        (rows [M, K], columns [K, M]).
    Errors and exactness as quantize.
    """
    columns = scaling if column_scaling is None else column_scaling
    if x.dim() != 2 or x.dtype not in INPUT_DTYPES:
        check_matrix(x, "x")
    if quant_scale is not None or amax_out is not None:
        check_scales(quant_scale, amax_out, scaling, columns)
    if out is not None:
        check_place(out, x, scaling)
    return _both(x, scaling, columns, quant_scale, amax_out, out)  # type: ignore[return-value]
