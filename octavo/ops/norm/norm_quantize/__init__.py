"""A norm and the quantization of what it feeds in one pass, with the residual add before it and its input saved in FP8.

T tokens, K hidden. Equal in every bit to residual add, norm_forward and quantize_both one after the other.
"""

from typing import Any, NamedTuple

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.registry import register
from octavo.ops.moe import ExpertRows
from octavo.ops.norm import NormKind, check_norm, check_stored_kind, norm_backward
from octavo.ops.norm.norm_quantize import reference
from octavo.ops.one_shot import Places
from octavo.ops.quantize import check_scales, empty_operand, scaling_of, text_of

__all__ = ["NormQuantized", "exchange_norm_quantize", "norm_backward", "norm_quantize"]


class NormQuantized(NamedTuple):
    """What norm_quantize returns.

    Attributes:
        rows: [T, K], the operand of the next linear's output GEMM.
        columns: [K, T], the operand of its grad_weight GEMM; None where not asked for.
        summed: x + residual in x's dtype, with which the residual stream goes on; None without a residual.
        stored: x (+ residual) in FP8 for norm_backward; None without a store_scaling.
        mean: [T] fp32; None for rms_norm.
        rstd: [T] fp32.
        normed: [T, K] in x's dtype, what rows were quantized from; None where not asked for.
    """

    rows: QuantizedTensor
    columns: QuantizedTensor | None
    summed: torch.Tensor | None
    stored: QuantizedTensor | None
    mean: torch.Tensor | None
    rstd: torch.Tensor
    normed: torch.Tensor | None


def norm_quantize(
    x: torch.Tensor,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    eps: float,
    kind: NormKind,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor | ExpertRows | None = None,
    scaling: Scaling,
    column_scaling: Scaling | None = None,
    quant_scale: torch.Tensor | None = None,
    amax_out: torch.Tensor | None = None,
    store_scaling: Scaling | None = None,
    keeps_norm: bool = False,
) -> NormQuantized:
    """Residual add, norm, and quantization along rows and, where asked for, columns.

    Args:
        x: as in norm_forward.
        weight: as in norm_forward.
        bias: as in norm_forward.
        eps: as in norm_forward.
        kind: as in norm_forward.
        zero_centered_gamma: as in norm_forward.
        residual: as in norm_forward; or experts' rows, which are first added up as combine_rows does.
        scaling: of the rows.
        column_scaling: of the columns; None for no columns.
        quant_scale: as in quantize: a known quant_scale, per tensor.
        amax_out: as in quantize: where max|norm| is folded into.
        store_scaling: of the copy of x (+ residual) that norm_backward takes; its scales run along rows.
        keeps_norm: return the norm too.
    Returns:
        NormQuantized.
    Raises:
        ShapeError: shapes that do not fit together.
        DtypeError: dtypes that do not fit together.
        RecipeError: kinds and scalings that do not fit together.
    Exactness: bitwise equal to its parts on the same device.
    """
    check_norm(x, weight, bias, kind, residual)
    check_scales(quant_scale, amax_out, *(s for s in (scaling, column_scaling) if s is not None))
    if store_scaling is not None:
        check_stored_kind(store_scaling.kind)
    routed: tuple[torch.Tensor, ...] = ()
    added = residual
    if isinstance(residual, ExpertRows):
        added, routed = residual.rows, (residual.routing.rows, residual.routing.weights)
    out = _op(
        x, weight, bias, added, quant_scale, amax_out, eps, kind, zero_centered_gamma,
        scaling.text, text_of(column_scaling), text_of(store_scaling), keeps_norm, *routed,
    )  # fmt: skip
    row_q, row_s, col_q, col_s, summed, stored_q, stored_s, mean, rstd, normed = out
    return NormQuantized(
        QuantizedTensor(row_q, row_s, scaling),
        None if column_scaling is None else QuantizedTensor(col_q, col_s, column_scaling),
        None if residual is None else summed,
        None if store_scaling is None else QuantizedTensor(stored_q, stored_s, store_scaling),
        mean if kind == "layer_norm" else None,
        rstd,
        normed if keeps_norm else None,
    )


def exchange_norm_quantize(
    part: torch.Tensor,
    places: Places,
    is_sum: bool,
    weight: torch.Tensor,
    *,
    bias: torch.Tensor | None = None,
    eps: float,
    kind: NormKind,
    zero_centered_gamma: bool = False,
    residual: torch.Tensor,
    scaling: Scaling,
) -> NormQuantized | None:
    """norm_quantize of an x of which each rank has a part, codes along rows alone; one launch, which all ranks make.

    Args:
        part: this rank's, on a GPU: [T, K], what is to be added, or its columns [T, K / ranks].
        places: what the ranks share.
        is_sum: which of the two.
        residual: [T, K], the same on all ranks. The rest is norm_quantize's.
    Returns:
        NormQuantized without columns and stored; None, on all ranks alike, for what does not fit.
    Exactness: bitwise what norm_quantize makes of the whole x, whose sum is made in fp32 in the order of the ranks.
    """
    from octavo.ops.norm.norm_quantize import triton
    from octavo.ops.norm.triton import NormLaunch

    if part.dtype != residual.dtype or not triton.can_exchange(part, weight.numel(), scaling):
        return None
    norm = NormLaunch.of(part.contiguous(), weight, bias, residual, kind)
    exchange = triton.RankExchange(places, is_sum)
    rows, summed, mean, rstd = triton.exchange_norm_quantize(norm, exchange, eps, zero_centered_gamma, scaling)
    return NormQuantized(rows, None, summed, None, mean if kind == "layer_norm" else None, rstd, None)


def _reference(*arguments: Any) -> tuple[torch.Tensor, ...]:
    return reference.norm_quantize(*_operands(arguments))


def _cuda(*arguments: Any) -> tuple[torch.Tensor, ...]:
    if env.force_reference() or arguments[0].numel() == 0:
        return _reference(*arguments)
    from octavo.ops.norm.norm_quantize import triton

    return triton.norm_quantize(*_operands(arguments))


def _operands(arguments: tuple[Any, ...]) -> list[Any]:
    return [*arguments[:9], *map(scaling_of, arguments[9:12]), *arguments[12:]]


def _fake(x: torch.Tensor, *rest: Any) -> tuple[torch.Tensor, ...]:
    residual, kind = rest[2], rest[6]
    T, K = x.shape
    rstd = x.new_empty(T, dtype=torch.float32)
    return (
        *empty_operand(x, rest[8], T, K),
        *empty_operand(x, rest[9], K, T),
        x.new_empty(0) if residual is None else x.new_empty((T, K)),
        *empty_operand(x, rest[10], T, K),
        torch.empty_like(rstd) if kind == "layer_norm" else rstd.new_empty(0),
        rstd,
        x.new_empty((T, K) if rest[11] else 0),
    )


_op = register(
    "norm_quantize(Tensor x, Tensor weight, Tensor? bias, Tensor? residual, Tensor? quant_scale, "
    "Tensor(a!)? amax_out, float eps, str kind, bool zero_centered_gamma, str scaling, str column_scaling, "
    "str store_scaling, bool keeps_norm, Tensor? rows_of=None, Tensor? row_weights=None) "
    "-> (Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor, Tensor)",
    reference=_reference,
    fake=_fake,
    cuda=_cuda,
)
