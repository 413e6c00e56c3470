"""GroupedLinear: one linear an expert, fused in one weight, over a batch whose rows are sorted by expert.

An expert's weight is quantized as it would be alone, so that a checkpoint of single experts has the same codes.
"""

from typing import Any

import torch
from torch.autograd.function import once_differentiable

from octavo.errors import RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.linear import Linear
from octavo.nn.linear_function import check_backward, observe_backward, quantize_grad_output, quantize_input
from octavo.nn.quantized_weight import DelayedState, Operands, is_captured, row_ranges
from octavo.nn.saved_operands import save_operands, saved_operands
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.grouped_mm import grouped_mm, grouped_mm_columns, scaled_grouped_mm, scaled_grouped_mm_columns
from octavo.ops.gemm.grouped_mm.library import ALIGNMENT
from octavo.ops.gemm.grouped_mm.reference import row_slice
from octavo.ops.quantize import quantize

# (rows of one expert's weight, their codes: one operand of all experts, or one an expert)
GroupedOperands = list[tuple[slice, list[QuantizedTensor]]]


class GroupedLinear(Linear):
    """y[row] = x[row] @ weight[expert of row].t() under a recipe; no bias.

    Args:
        in_features, out_features: K and N of one expert.
        num_experts: E.
        num_experts_per_tok: how many of them a token meets; for the FLOP shares of reports alone.
        parts: row counts of the projections fused in one expert's weight; each keeps its own blocks.
        dtype: of the weight, bf16 or fp32.

    Attributes:
        weight: Parameter [E * N, K], expert after expert (see expert_weights), or None where only codes were loaded.
        out_features: E * N, as every reader of a Linear's weight expects.
        recipe, exact, observer, weight_version: as in Linear.
    """

    # a GEMM takes one operand of all experts, or one an expert
    has_whole_operand = False

    def __init__(
        self,
        in_features: int,
        out_features: int,
        num_experts: int,
        *,
        num_experts_per_tok: int = 1,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        own_parts = parts or (out_features,)
        if sum(own_parts) != out_features:
            raise ShapeError(f"parts {own_parts} must sum to out_features={out_features}")
        all_parts = own_parts * num_experts
        super().__init__(in_features, out_features * num_experts, parts=all_parts, device=device, dtype=dtype)
        self.num_experts, self.expert_parts = num_experts, own_parts
        self.active_share = num_experts_per_tok / num_experts

    def extra_repr(self) -> str:
        return f"{super().extra_repr()}, num_experts={self.num_experts}"

    @property
    def expert_rows(self) -> int:
        """N: rows of one expert's weight."""
        return self.out_features // self.num_experts

    def expert_weights(self) -> torch.Tensor:
        """The weight as [E, N, K], a view."""
        assert self.weight is not None, "only asked of layers with their weight"
        return self.weight.view(self.num_experts, self.expert_rows, self.in_features)

    def alignment(self, device: torch.device, *, training: bool) -> int:
        """What the rows of each expert must be padded to a multiple of, for this layer's GEMMs here and now.

        Args:
            training: a backward will follow, whose grad_weight sums over blocks of rows.
        """
        recipe = effective_recipe(self.recipe)
        is_block = recipe.in_fp8("output") and recipe.input is not None and recipe.input.kind == "block_1x128"
        # Our own kernels, of block scales and exact ones, take groups of any size; a few tokens' padding would be most
        # of the batch.
        is_ours = is_block or self.exact
        rows = 1 if device.type != "cuda" or (is_ours and not training) else ALIGNMENT
        if training and recipe.in_fp8("grad_weight"):
            assert recipe.wgrad_input is not None and recipe.grad_output is not None, "an FP8 backward quantizes both"
            rows = max(rows, recipe.wgrad_input.block_size[1], recipe.grad_output.block_size[1])
        return rows

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [R, K] sorted by expert -> [R, N] of x's dtype.

        Args:
            offsets: [E] int32 on x's device, where each expert's rows end, each a multiple of alignment().
        Raises:
            ShapeError: if x is not [R, in_features]. RecipeError: a recipe that experts do not run under.
        """
        if x.dim() != 2 or x.shape[1] != self.in_features:
            raise ShapeError(f"x must be [R, in_features={self.in_features}], got shape {tuple(x.shape)}")
        recipe = effective_recipe(self.recipe)
        if recipe.is_emulated:
            raise RecipeError(
                f"experts do not run under recipe {recipe.name!r}, whose operands are decoded again; give them another "
                "by overrides={'experts': 'bf16'}"
            )
        if recipe.is_fp8:
            self._check_exact(recipe)
        if self.weight is None and (not recipe.is_fp8 or recipe.high_precision_gemms):
            raise RecipeError("these experts hold FP8 codes only, so no GEMM of theirs can run in high precision")
        if recipe.is_fp8:
            self.begin_forward(recipe)
        out: torch.Tensor = GroupedLinearFunction.apply(x, self.weight, offsets, self, recipe, torch.is_grad_enabled())
        return out

    def multiply_codes(
        self, rows: QuantizedTensor, offsets: torch.Tensor, recipe: Recipe, out_dtype: torch.dtype
    ) -> torch.Tensor:
        """forward without gradients of rows [R, K] that are codes already, as recipe quantizes its input -> [R, N]."""
        self._check_exact(recipe)
        return _output(rows, self, recipe, offsets, out_dtype, observe=False)

    def output_operands(self, recipe: Recipe, *, observe: bool = False) -> GroupedOperands:
        """Codes for the output GEMM, [N, K] an expert."""
        return self._by_expert(self.forward_operands(recipe, observe=observe))

    def _quantize_weight(self, recipe: Recipe, observe: bool, place: Operands | None = None) -> Operands:
        if place is None and recipe.weight is not None and recipe.weight.kind == "block_128x128":
            place = self._place(recipe.weight)
        return super()._quantize_weight(recipe, observe, place)

    def _hold(self, operands: Operands) -> None:
        place = self._place(operands[0][1].scaling, operands[0][1].device)
        for (_, to), (_, q) in zip(place or [], operands, strict=bool(place)):
            to.qdata.view(torch.uint8).copy_(q.qdata.view(torch.uint8))
            to.scale.copy_(q.scale)
        super()._hold(place or operands)

    def _place(self, scaling: Scaling, device: torch.device | None = None) -> Operands | None:
        """Room for codes whose blocks end with the parts: one part of all experts lies together, as one GEMM reads it.

        None where experts are quantized as one operand, or one scale is a part's.
        """
        ranges = row_ranges(self.parts, scaling)
        if len(ranges) == 1 or scaling.kind != "block_128x128":
            return None
        device = device or (None if self.weight is None else self.weight.device)
        stacks = []
        for rows in self.expert_parts:
            shape = scaling.scale_shape(rows, self.in_features)
            codes = torch.empty(self.num_experts, rows, self.in_features, dtype=scaling.dtype, device=device)
            stacks.append((codes, torch.empty(self.num_experts, *shape, device=device)))
        num_parts = len(stacks)
        return [
            (
                rows,
                QuantizedTensor(
                    stacks[i % num_parts][0][i // num_parts], stacks[i % num_parts][1][i // num_parts], scaling
                ),
            )
            for i, rows in enumerate(ranges)
        ]

    def grad_input_operands(self, recipe: Recipe) -> GroupedOperands:
        """Codes for the grad_input GEMM, [K, N] an expert."""
        return self._by_expert(self.backward_operands(recipe))

    def backward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the transposed weights: one operand [E * K, N], one [K, N] an expert, or one [K, rows] a part."""
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        if self.weight is None and recipe.weight.block_size[0] != recipe.weight.block_size[1]:
            raise RecipeError(
                f"these experts hold {recipe.weight.kind} codes only, and a backward with such scales needs the "
                "high-precision weight; load the checkpoint for training, or use 'blockwise'"
            )
        if self.weight is None:
            held = self._by_expert(self.forward_operands(recipe))
            return [(rows, code.t()) for rows, code in self._single_codes(held)]
        if is_captured():
            return self._transposed(recipe)
        self._start_cache(recipe, observe=False)
        if self._cache.backward is None:
            self._cache.backward = self._transposed(recipe)
        return self._cache.backward

    def _transposed(self, recipe: Recipe) -> Operands:
        scaling = recipe.weight
        assert scaling is not None, f"recipe {recipe.name!r} quantizes no weight"
        weights = self.expert_weights().detach().to(torch.bfloat16).transpose(1, 2).contiguous()  # [E, K, N]
        if scaling.is_per_tensor:
            return [(slice(0, self.expert_rows), self._quantize_whole(w, e, recipe)) for e, w in enumerate(weights)]
        part_ends_block = all(part % scaling.block_size[1] == 0 for part in self.expert_parts[:-1])
        if scaling.block_size[0] == 1 or (part_ends_block and self.in_features % scaling.block_size[0] == 0):
            # blocks of one expert end where the next begins: all in one pass
            return [(slice(0, self.out_features), quantize(weights.flatten(0, 1), scaling))]
        if part_ends_block:
            return [(slice(0, self.expert_rows), quantize(w, scaling)) for w in weights]
        return [(rows, quantize(w[:, rows].contiguous(), scaling)) for w in weights for rows in self._part_ranges()]

    def _quantize_whole(self, weight: torch.Tensor, expert: int, recipe: Recipe) -> QuantizedTensor:
        """One expert's transposed weight with one scale: the parts' smallest known one in delayed scaling."""
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        if not recipe.has_state:
            return quantize(weight, recipe.weight)
        num_parts = len(self.expert_parts)
        first = DelayedState.WEIGHT + expert * num_parts
        scales = self.delayed_state(recipe).quant_scale[first : first + num_parts]
        return quantize(weight, recipe.weight, quant_scale=scales.min())

    def _part_ranges(self) -> list[slice]:
        ends = [sum(self.expert_parts[: i + 1]) for i in range(len(self.expert_parts))]
        return [slice(end - rows, end) for end, rows in zip(ends, self.expert_parts, strict=True)]

    def _by_expert(self, operands: Operands) -> GroupedOperands:
        """A flat list of ranges as one entry a range of an expert's weight."""
        codes = [q for _, q in operands]
        if len(codes) in (1, self.num_experts):
            return [(slice(0, self.expert_rows), codes)]
        num_parts = len(self.expert_parts)
        return [(rows, codes[i::num_parts]) for i, rows in enumerate(self._part_ranges())]

    def _single_codes(self, operands: GroupedOperands) -> list[tuple[slice, QuantizedTensor]]:
        """Codes expert by expert, part by part, whatever they were quantized together with."""
        found = []
        for expert in range(self.num_experts):
            for rows, codes in operands:
                size = rows.stop - rows.start
                found.append((rows, codes[expert] if len(codes) > 1 else row_slice(codes[0], expert, size)))
        return found


class GroupedLinearFunction(torch.autograd.Function):
    """The three GEMMs of every expert; each in FP8 or not by the recipe. Saves what linear_function's Functions do."""

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        weight: torch.Tensor | None,
        offsets: torch.Tensor,
        layer: GroupedLinear,
        recipe: Recipe,
        training: bool,
    ) -> torch.Tensor:
        """x [R, K] -> [R, N] of x's dtype."""
        needs_wgrad = training and weight is not None and ctx.needs_input_grad[1]
        rows = columns = None
        if training:
            check_backward(recipe, x)
        if recipe.is_fp8:
            both = needs_wgrad and recipe.in_fp8("grad_weight")
            rows, columns = quantize_input(x, layer, recipe, columns=both, observe=training and layer.training)
        if rows is not None and recipe.in_fp8("output"):
            out = _output(rows, layer, recipe, offsets, x.dtype, observe=training)
        else:
            out = grouped_mm(x, layer.expert_weights().detach().to(x.dtype), offsets, exact=layer.exact)
        if layer.observer is not None:
            layer.observer("input", x, rows)
            if weight is not None:
                layer.observer("weight", weight, layer.whole_operand(recipe) if recipe.is_fp8 else None)
            layer.observer("output", out, None)
        if training:
            ctx.layer, ctx.recipe, ctx.in_dtype, ctx.observes = layer, recipe, x.dtype, layer.training
            keeps_input = not recipe.is_fp8 or "grad_weight" in recipe.high_precision_gemms
            saved = (x if keeps_input else columns or rows) if needs_wgrad else None
            save_operands(ctx, offsets, weight, saved)
        return out

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        """grad [R, N] -> gradients of (x, weight)."""
        offsets, weight, saved = saved_operands(ctx)
        grad, recipe, layer = grad.contiguous(), ctx.recipe, ctx.layer
        wants_x, wants_weight = ctx.needs_input_grad[:2]
        rows = columns = None
        if recipe.has_fp8_backward:
            both = wants_weight and recipe.in_fp8("grad_weight")
            rows, columns = quantize_grad_output(grad, layer, recipe, columns=both, observe=ctx.observes)
        grad_x = _grad_input(grad, rows, layer, recipe, offsets, ctx.in_dtype) if wants_x else None
        grad_weight = None
        if wants_weight:
            fast = "grad_weight" in recipe.fast_accum
            if columns is not None:
                by_expert = scaled_grouped_mm_columns(columns, saved, offsets, out_dtype=weight.dtype, fast_accum=fast)
            else:
                x = saved.dequantize(grad.dtype) if isinstance(saved, QuantizedTensor) else saved.to(grad.dtype)
                by_expert = grouped_mm_columns(grad.t(), x.t(), offsets, out_dtype=weight.dtype)
            grad_weight = by_expert.view(weight.shape)
        observe_backward(layer, grad, rows, grad_x, grad_weight)
        return grad_x, grad_weight, None, None, None, None


def _output(
    rows: QuantizedTensor,
    layer: GroupedLinear,
    recipe: Recipe,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
    *,
    observe: bool,
) -> torch.Tensor:
    fast = "output" in recipe.fast_accum and not layer.exact
    pieces = [
        scaled_grouped_mm(rows, codes, offsets, out_dtype=out_dtype, exact=layer.exact, fast_accum=fast)
        for _, codes in layer.output_operands(recipe, observe=observe)
    ]
    return pieces[0] if len(pieces) == 1 else torch.cat(pieces, dim=1)


def _grad_input(
    grad: torch.Tensor,
    rows: QuantizedTensor | None,
    layer: GroupedLinear,
    recipe: Recipe,
    offsets: torch.Tensor,
    out_dtype: torch.dtype,
) -> torch.Tensor:
    """Sum over the parts of grad[:, part] @ the row's expert's weight[part]: [R, K] of out_dtype."""
    if rows is None or not recipe.in_fp8("grad_input"):
        source = _decoded(layer, recipe, grad.dtype) if recipe.is_fp8 else layer.expert_weights().detach()
        return grouped_mm(grad, source.to(grad.dtype).transpose(1, 2), offsets, out_dtype=out_dtype)
    fast, operands = "grad_input" in recipe.fast_accum, layer.grad_input_operands(recipe)
    if len(operands) == 1:
        return scaled_grouped_mm(rows, operands[0][1], offsets, out_dtype=out_dtype, fast_accum=fast)
    total = None
    for part, codes in operands:
        piece = quantize(grad[:, part].contiguous(), rows.scaling)
        out = scaled_grouped_mm(piece, codes, offsets, out_dtype=torch.float32, fast_accum=fast)
        total = out if total is None else total + out
    assert total is not None, "an expert has at least one part"
    return total.to(out_dtype)


def _decoded(layer: GroupedLinear, recipe: Recipe, dtype: torch.dtype) -> torch.Tensor:
    """[E, N, K]: the weight itself for a high-precision GEMM, its codes decoded for a high-precision backward."""
    if "grad_input" in recipe.high_precision_gemms:
        return layer.expert_weights().detach()
    whole = torch.cat([codes.dequantize(dtype) for _, codes in layer.forward_operands(recipe)])
    return whole.view(layer.num_experts, layer.expert_rows, layer.in_features)
