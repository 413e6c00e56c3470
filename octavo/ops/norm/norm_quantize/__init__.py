"""A norm and the quantization of what it feeds in one pass, with the residual add before it and its input saved in FP8.

T tokens, K hidden. Equal in every bit to residual add, norm_forward and quantize_both one after the other.
"""

from typing import Any, NamedTuple

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.norm import NormKind, check_norm, check_stored_kind, norm_backward
from octavo.ops.norm.norm_quantize import reference
from octavo.ops.quantize import check_scales

__all__ = ["NormQuantized", "norm_backward", "norm_quantize"]


class NormQuantized(NamedTuple):
    """What norm_quantize returns.

    Attributes:
        rows: [T, K], the operand of the next linear's output GEMM.
        columns: [K, T], the operand of its grad_weight GEMM; None where not asked for.
        summed: x + residual in x's dtype, with which the residual stream goes on; None without a residual.
        stored: x (+ residual) in FP8 for norm_backward; None without a store_scaling.
        mean: [T] fp32; None for rms_norm. rstd: [T] fp32.
    """

    rows: QuantizedTensor
    columns: QuantizedTensor | None
    summed: torch.Tensor | None
    stored: QuantizedTensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    eps: float,
    kind: NormKind,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | None = None,
    scaling: Scaling,
    column_scaling: Scaling | None = None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    store_scaling: Scaling | None = None,
) -> NormQuantized:
    """Residual add, norm, and quantization along rows and, where asked for, columns.

    Args:
        x, weight, bias, eps, kind, zero_centered_gamma, residual: as in norm_forward.
        scaling: of the rows. column_scaling: of the columns; None for no columns.
        quant_scale, amax_out: as in quantize: a known quant_scale, per tensor, and where max|norm| is folded into.
        store_scaling: of the copy of x (+ residual) that norm_backward takes; its scales run along rows.
    Returns:
        NormQuantized.
    Raises:
        ShapeError, DtypeError, RecipeError: operands that do not fit together.
    Exactness: bitwise equal to its parts on the same device.
    """
    check_norm(x, weight, bias, kind, residual)
    check_scales(quant_scale, amax_out, *(s for s in (scaling, column_scaling) if s is not None))
    if store_scaling is not None:
        check_stored_kind(store_scaling.kind)
    out = _op(
        x, weight, bias, residual, quant_scale, amax_out, eps, kind, zero_centered_gamma,
        *_pack(scaling), *_pack(column_scaling), *_pack(store_scaling),
    )  # fmt: skip
    row_q, row_s, col_q, col_s, summed, stored_q, stored_s, mean, rstd = out
    return NormQuantized(
        QuantizedTensor(row_q, row_s, scaling),
        None if column_scaling is None else QuantizedTensor(col_q, col_s, column_scaling),
        None if residual is None else summed,
        None if store_scaling is None else QuantizedTensor(stored_q, stored_s, store_scaling),
        mean if kind == "layer_norm" else None,
        rstd,
    )


Packed = tuple[torch.dtype | None, list[int], str, float]


def _pack(scaling: Scaling | None) -> Packed:
    """A scaling as the flat values that an op's schema can carry."""
    if scaling is None:
        return None, [], "", 0.0
    return scaling.dtype, list(scaling.block_size), scaling.scale_format, scaling.amax_floor


def _unpack(fields: Any) -> tuple[Scaling | None, Scaling | None, Scaling | None]:
    """rows, columns, stored."""
    rows, columns, stored = (
        None if dtype is None else Scaling(dtype, (block[0], block[1]), scale_format, amax_floor)
        for dtype, block, scale_format, amax_floor in (fields[i : i + 4] for i in (0, 4, 8))
    )
    return rows, columns, stored


def _reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    operands: list[Any] = [*arguments[:9], *_unpack(arguments[9:])]
    return reference.norm_quantize(*operands)


def _cuda(*arguments: Any) -> tuple[torch.Tensor, ...]:
    if env.force_reference() or arguments[0].numel() == 0:
        return _reference(*arguments)
    from octavo.ops.norm.norm_quantize import triton

    operands: list[Any] = [*arguments[:9], *_unpack(arguments[9:])]
    return triton.norm_quantize(*operands)


def _empty_pair(x: torch.Tensor, scaling: Scaling | None, rows: int, cols: int) -> tuple[torch.Tensor, torch.Tensor]:
    if scaling is None:
        return x.new_empty(0), x.new_empty(0, dtype=torch.float32)
    num_rows, num_cols = scaling.scale_shape(rows, cols)
    scale = x.new_empty((num_cols, num_rows), dtype=torch.float32).t()  # strides (1, rows)
    if scaling.kind not in ("block_1x128", "mx_1x32"):
        scale = x.new_empty((num_rows, num_cols), dtype=torch.float32)
    return x.new_empty((rows, cols), dtype=scaling.dtype), scale


def _fake(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    residual, kind = rest[2], rest[6]
    scaling, column_scaling, store_scaling = _unpack(rest[8:])
    T, K = x.shape
    rstd = x.new_empty(T, dtype=torch.float32)
    return (
        *_empty_pair(x, scaling, T, K),
        *_empty_pair(x, column_scaling, K, T),
        x.new_empty(0) if residual is None else x.new_empty((T, K)),
        *_empty_pair(x, store_scaling, T, K),
        torch.empty_like(rstd) if kind == "layer_norm" else rstd.new_empty(0),
        rstd,
    )


_SCALINGS = ", ".join(
    f"ScalarType? {name}dtype, int[] {name}block_size, str {name}scale_format, float {name}amax_floor"
    for name in ("", "column_", "store_")
)
_op = register(
    "norm_quantize(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? quant_scale, "
    f"Tensor(a!)? amax_out, float eps, str kind, bool zero_centered_gamma, {_SCALINGS}) -> "
    "(Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cuda=_cuda,
)
