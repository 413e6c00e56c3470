"""The operands of a weight: which row ranges are quantized as one, and how they are made, joined and named.

Fused projections are fused in storage, never in meaning: each part keeps the blocks and scales it would have alone.
"""

import dataclasses
from collections.abc import Callable
from typing import Any

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize, quantize_both, quantize_columns

Operands = list[tuple[slice, QuantizedTensor]]  # (rows of the weight, their codes)


def row_ranges(parts: tuple[int, ...], scaling: Scaling) -> list[slice]:
    """Row ranges that can be quantized as one operand without a block crossing from one part into the next."""
    if len(parts) == 1:
        return [slice(0, parts[0])]
    block_rows = scaling.block_size[0]
    if block_rows == 1 or (block_rows > 1 and all(p % block_rows == 0 for p in parts[:-1])):
        return [slice(0, sum(parts))]
    starts = [sum(parts[:i]) for i in range(len(parts))]
    return [slice(start, start + part) for start, part in zip(starts, parts, strict=True)]


def ranges_of(weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling) -> list[tuple[slice, torch.Tensor]]:
    """The row ranges with the values that are quantized there, bf16."""
    values, ranges = values_of(weight), row_ranges(parts, scaling)
    return [(ranges[0], values)] if len(ranges) == 1 else [(rows, values[rows]) for rows in ranges]


def values_of(weight: torch.Tensor) -> torch.Tensor:
    """The weight in bf16, apart from autograd."""
    values = weight.detach() if torch.is_grad_enabled() else weight
    return values if values.dtype == torch.bfloat16 else values.to(torch.bfloat16)


def quantize_forward(
    weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling, place: Operands | None = None
) -> Operands:
    """Operands of the output GEMM: the weight quantized along K.

    Args:
        weight: [N, K]; what is quantized is its bf16 value.
        place: older operands of such a weight, which are overwritten and returned (PinnedCodes.out_buffer_for).
    """
    ranges = ranges_of(weight, parts, scaling)
    return [(rows, quantize(source, scaling, out=out_of(place, i))) for i, (rows, source) in enumerate(ranges)]


def out_of(place: Operands | None, i: int) -> QuantizedTensor | None:
    """The operand of range i that a quantizer overwrites, None for a new one."""
    return None if place is None else place[i][1]


def quantize_both_ways(
    weight: torch.Tensor,
    parts: tuple[int, ...],
    scaling: Scaling,
    known: dict[str, Any],
    place: Operands | None = None,
) -> tuple[Operands, Operands] | None:
    """quantize_forward and quantize_backward from one read of the weight; None where it has more than one range.

    Args:
        known: the scale and the place of the amax (delayed scaling), as quantize takes them.
        place: as in quantize_forward.
    """
    ranges = row_ranges(parts, scaling)
    if len(ranges) > 1:
        return None
    rows, columns = quantize_both(values_of(weight), scaling, out=out_of(place, 0), **known)
    return [(ranges[0], rows)], [(ranges[0], columns)]


def quantize_backward(
    weight: torch.Tensor, parts: tuple[int, ...], scaling: Scaling, *, quant_scale: torch.Tensor | None = None
) -> Operands:
    """Operands of the grad_input GEMM: the weight quantized along N, [K, N] a range.

    That GEMM sums over the parts of a fused weight, so scales of whole tensors are made for all of them together: the
    smallest quant_scale of any.

    Args:
        quant_scale: known scales of the parts (delayed scaling).
    """
    if scaling.is_per_tensor:
        known = quant_scale if quant_scale is None or quant_scale.numel() == 1 else quant_scale.min()
        return [(slice(0, weight.shape[0]), quantize_columns(values_of(weight), scaling, quant_scale=known))]
    return [(rows, quantize_columns(source, scaling)) for rows, source in ranges_of(weight, parts, scaling)]


def one_operand(operands: Operands) -> QuantizedTensor | None:
    """The whole weight as one operand of the output GEMM, or None where that takes a GEMM a range.

    Parts with one scale each become rows with one scale each, equal within a part: the same codes and meaning.
    """
    first = operands[0][1]
    if len(operands) == 1:
        return first
    if not first.scaling.is_per_tensor:
        return None
    codes = torch.cat([q.qdata.view(torch.uint8) for _, q in operands]).view(first.qdata.dtype)
    scale = torch.cat([q.scale.expand(q.shape[0], 1) for _, q in operands])  # [N, 1]
    return QuantizedTensor(codes, scale, dataclasses.replace(first.scaling, block_size=(1, -1)))


def join_ranges(operands: Operands) -> tuple[Operands, QuantizedTensor | None]:
    """The ranges and one_operand of them, as one storage: the ranges are views of the whole where there is one."""
    whole = one_operand(operands)
    if whole is None or len(operands) == 1:
        return operands, whole
    return [(rows, QuantizedTensor(whole.qdata[rows], q.scale, q.scaling)) for rows, q in operands], whole


def name_tensors(operands: Operands, whole: QuantizedTensor | None) -> dict[str, torch.Tensor]:
    """What the output GEMM reads of a weight's codes, each storage once, under names that follow from the ranges."""
    named: dict[str, torch.Tensor] = {}
    for i, (_, q) in enumerate(operands):
        named |= {f"codes.{i}": q.qdata, f"scales.{i}": q.scale}
    if whole is not None and len(operands) > 1:
        named["scales"] = whole.scale
    return named


def merge_parts(parts: list[QuantizedTensor], sizes: tuple[int, ...]) -> Operands:
    """Operands from one QuantizedTensor a part, as a checkpoint holds them."""
    scaling = parts[0].scaling
    ranges = row_ranges(sizes, scaling)
    if len(ranges) == len(parts):
        return list(zip(ranges, parts, strict=True))
    codes = torch.cat([p.qdata.view(torch.uint8) for p in parts]).view(scaling.dtype)
    return [(ranges[0], QuantizedTensor(codes, torch.cat([p.scale for p in parts]), scaling))]


def moved_device(fn: Callable[[torch.Tensor], torch.Tensor], tensor: torch.Tensor) -> torch.device:
    """Where Module._apply's fn moves a tensor that keeps its dtype."""
    return fn(torch.empty(0, device=tensor.device)).device
