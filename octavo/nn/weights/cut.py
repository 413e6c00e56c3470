"""Scales of what tensor-parallel ranks have slices of: one a row or tensor is made of all ranks' largest values."""

from typing import Any, Literal

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.operands import Operands, out_of, ranges_of, values_of
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize, quantize_columns

CutDim = Literal["in", "out"]
_PADDING = 16  # elements: 16-byte accesses in every row


class CutWeight(CachedWeight):
    """A rank's rows (cut_dim "out") or columns ("in") of a weight; its codes are those of the whole one.

    Making them is a collective where a scale spans the slices, which all ranks come to alike.
    """

    def __init__(
        self,
        parts: tuple[int, ...],
        version: int = 0,
        is_scaled: bool = False,
        group: TensorGroup | None = None,
        cut_dim: CutDim = "out",
    ) -> None:
        super().__init__(parts, version, is_scaled)
        self.tensor_group, self.cut_dim = group, cut_dim

    def _own_arguments(self) -> tuple[Any, ...]:
        return *super()._own_arguments(), self.tensor_group, self.cut_dim

    def _quantize(
        self, weight: torch.Tensor, plan: LinearPlan, observe: bool, place: Operands | None = None
    ) -> Operands:
        scaling = plan.recipe.weight
        if plan.state is not None or scaling is None or not spans(scaling, self.cut_dim == "in"):
            return super()._quantize(weight, plan, observe, place)
        return [
            (rows, quantize_shared(source, scaling, self.tensor_group, out=out_of(place, i)))
            for i, (rows, source) in enumerate(ranges_of(weight, self.parts, scaling))
        ]

    def _quantize_backward(self, weight: torch.Tensor, plan: LinearPlan) -> Operands:
        scaling = plan.recipe.weight
        if plan.state is not None or scaling is None or not spans(scaling, self.cut_dim == "out"):
            return super()._quantize_backward(weight, plan)
        return [
            (slice(0, weight.shape[0]), quantize_shared(values_of(weight), scaling, self.tensor_group, columns=True))
        ]

    def _quantize_both(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        scaling = plan.recipe.weight
        if plan.state is not None or scaling is None or not (spans(scaling, True) or spans(scaling, False)):
            super()._quantize_both(weight, plan)


def spans(scaling: Scaling, sums_over_cut: bool) -> bool:
    """Whether one scale is of values of several ranks.

    Args:
        sums_over_cut: the GEMM sums over the dim that is cut, along which a row's scale runs.
    """
    return scaling.is_per_tensor or (scaling.block_size[1] == -1 and sums_over_cut)


def quantize_shared(
    x: torch.Tensor,
    scaling: Scaling,
    group: TensorGroup | None,
    *,
    columns: bool = False,
    out: QuantizedTensor | None = None,
) -> QuantizedTensor:
    """quantize, or quantize_columns, of a slice under the scales of the whole: a collective.

    Args:
        x: [M, K]; with one scale a row (a column, with columns) slices of K (M) are put together in thought.
        scaling: per tensor or per row.
    """
    assert group is not None, "only a cut weight is quantized so"
    dim = 0 if columns else 1
    known = x.detach().abs().nan_to_num(0.0, posinf=torch.inf).float()  # an amax is free of NaN
    amax = known.amax().reshape(1, 1) if scaling.is_per_tensor else known.amax(dim, keepdim=True)
    amax = group.largest(amax).to(x.dtype)
    # the quantizers make scales of what they see: let them see the largest value as well
    shape = (_PADDING, x.shape[1]) if columns else (x.shape[0], _PADDING)
    seen = torch.cat([x, amax.expand(shape)], dim=dim)
    made = (quantize_columns if columns else quantize)(seen, scaling)
    codes = made.qdata.view(torch.uint8)[:, : x.shape[dim]].contiguous().view(made.qdata.dtype)
    if out is None:
        return QuantizedTensor.trusted(codes, made.scale, scaling)
    out.qdata.copy_(codes)
    out.scale.copy_(made.scale)
    return out
