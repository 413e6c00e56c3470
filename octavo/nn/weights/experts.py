"""Sources of the experts' fused weight [E * N, K]: each expert is quantized as it would be alone."""

from typing import Any

import torch

from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import Operands, row_ranges
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.grouped_mm.reference import row_slice
from octavo.ops.quantize import quantize

# (rows of one expert's weight, their codes: one operand of all experts, or one an expert)
GroupedOperands = list[tuple[slice, list[QuantizedTensor]]]


class ExpertShapes:
    """How experts lie in one weight.

    Args:
        num_experts: E.
        in_features: K.
        expert_parts: row counts of the projections fused in one expert's weight.
    """

    def __init__(self, num_experts: int, in_features: int, expert_parts: tuple[int, ...]) -> None:
        self.num_experts, self.in_features, self.expert_parts = num_experts, in_features, expert_parts

    @property
    def expert_rows(self) -> int:
        """N: rows of one expert's weight."""
        return sum(self.expert_parts)

    def part_ranges(self) -> list[slice]:
        """Each part's rows in one expert's weight."""
        ends = [sum(self.expert_parts[: i + 1]) for i in range(len(self.expert_parts))]
        return [slice(end - rows, end) for end, rows in zip(ends, self.expert_parts, strict=True)]

    def by_expert(self, operands: Operands) -> GroupedOperands:
        """A flat list of ranges as one entry a range of an expert's weight."""
        codes = [q for _, q in operands]
        if len(codes) in (1, self.num_experts):
            return [(slice(0, self.expert_rows), codes)]
        num_parts = len(self.expert_parts)
        return [(rows, codes[i::num_parts]) for i, rows in enumerate(self.part_ranges())]

    def room_for(self, scaling: Scaling, device: torch.device | None) -> Operands | None:
        """Room for codes whose blocks end with the parts: one part of all experts lies together, as one GEMM reads it.

        None where experts are quantized as one operand, or one scale is a part's.
        """
        ranges = row_ranges(self.expert_parts * self.num_experts, scaling)
        if len(ranges) == 1 or scaling.kind != "block_128x128":
            return None
        stacks = []
        for size in self.expert_parts:
            shape = scaling.scale_shape(size, self.in_features)
            codes = torch.empty(self.num_experts, size, self.in_features, dtype=scaling.dtype, device=device)
            stacks.append((codes, torch.empty(self.num_experts, *shape, device=device)))
        found = []
        for i, rows in enumerate(ranges):
            expert, part = divmod(i, len(stacks))
            codes, scales = stacks[part]
            found.append((rows, QuantizedTensor(codes[expert], scales[expert], scaling)))
        return found


class ExpertWeight(CachedWeight):
    """The experts' parameter."""

    has_whole = False  # a GEMM takes one operand of all experts, or one an expert

    def __init__(self, shapes: ExpertShapes, version: int = 0, is_scaled: bool = False) -> None:
        super().__init__(shapes.expert_parts * shapes.num_experts, version, is_scaled)
        self.shapes = shapes

    def _own_arguments(self) -> tuple[Any, ...]:
        return self.shapes, self.version, self.is_scaled

    def whole_of_training(self, weight: torch.Tensor, plan: LinearPlan) -> QuantizedTensor | None:
        return self.whole(weight, plan, observe=True)

    def renew(self, weight: torch.Tensor | None, plan: LinearPlan) -> None:
        """See WeightSource: for the output GEMM; the backward's codes are transposed when it comes."""
        self.forward(weight, plan)

    def _quantize(
        self, weight: torch.Tensor, plan: LinearPlan, observe: bool, place: Operands | None = None
    ) -> Operands:
        scaling = plan.recipe.weight
        if place is None and scaling is not None:
            place = self.shapes.room_for(scaling, weight.device)
        return super()._quantize(weight, plan, observe, place)

    def _quantize_backward(self, weight: torch.Tensor, plan: LinearPlan) -> Operands:
        """The transposed weights: one operand [E * K, N], one [K, N] an expert, or one [K, rows] a part."""
        scaling, shapes = plan.recipe.weight, self.shapes
        assert scaling is not None, f"recipe {plan.recipe.name!r} quantizes no weight"
        of_expert = weight.view(shapes.num_experts, shapes.expert_rows, shapes.in_features)
        weights = of_expert.detach().to(torch.bfloat16).transpose(1, 2).contiguous()  # [E, K, N]
        if scaling.is_per_tensor:
            rows = slice(0, shapes.expert_rows)
            return [(rows, self._quantize_expert(w, e, plan)) for e, w in enumerate(weights)]
        part_ends_block = all(part % scaling.block_size[1] == 0 for part in shapes.expert_parts[:-1])
        if scaling.block_size[0] == 1 or (part_ends_block and shapes.in_features % scaling.block_size[0] == 0):
            # blocks of one expert end where the next begins: all in one pass
            return [(slice(0, len(weight)), quantize(weights.flatten(0, 1), scaling))]
        if part_ends_block:
            return [(slice(0, shapes.expert_rows), quantize(w, scaling)) for w in weights]
        return [(rows, quantize(w[:, rows].contiguous(), scaling)) for w in weights for rows in shapes.part_ranges()]

    def _quantize_expert(self, weight: torch.Tensor, expert: int, plan: LinearPlan) -> QuantizedTensor:
        """One expert's transposed weight with one scale: the parts' smallest known one in delayed scaling."""
        recipe: Recipe = plan.recipe
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        if plan.state is None:
            return quantize(weight, recipe.weight)
        num_parts = len(self.shapes.expert_parts)
        first = DelayedState.WEIGHT + expert * num_parts
        scales = plan.state.quant_scale[first : first + num_parts]
        return quantize(weight, recipe.weight, quant_scale=scales.min())


class ExpertCodes(CodesOnly):
    """Experts of which there are codes alone."""

    has_whole = False

    def __init__(self, shapes: ExpertShapes, operands: Operands, version: int = 0) -> None:
        self.shapes = shapes
        super().__init__(shapes.expert_parts * shapes.num_experts, operands, version)

    def hold(self, operands: Operands) -> None:
        """Let these be the codes, laid out as a GEMM reads them."""
        first = operands[0][1]
        place = self.shapes.room_for(first.scaling, first.device)
        for (_, to), (_, q) in zip(place or [], operands, strict=bool(place)):
            to.qdata.view(torch.uint8).copy_(q.qdata.view(torch.uint8))
            to.scale.copy_(q.scale)
        super().hold(place or operands)

    def backward(self, weight: torch.Tensor | None, plan: LinearPlan, *, after: torch.Tensor | None = None) -> Operands:
        """See WeightSource: square blocks are transposed, expert by expert and part by part."""
        found = []
        held = self.shapes.by_expert(self._square(weight, plan))
        for expert in range(self.shapes.num_experts):
            for rows, codes in held:
                size = rows.stop - rows.start
                code = codes[expert] if len(codes) > 1 else row_slice(codes[0], expert, size)
                found.append((rows, code.t()))
        return found
