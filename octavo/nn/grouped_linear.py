"""GroupedLinear: one linear an expert, fused in one weight, over a batch whose rows are sorted by expert.

An expert's weight is quantized as it would be alone, so that a checkpoint of single experts has the same codes.
"""

import torch

from octavo.errors import RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.grouped import GroupedLinearFunction, grouped_output, grouped_swiglu
from octavo.nn.fusion import fusable
from octavo.nn.linear import Linear
from octavo.nn.weights.experts import ExpertCodes, ExpertShapes, ExpertWeight
from octavo.nn.weights.operands import Operands
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.grouped_mm import Gather
from octavo.ops.gemm.grouped_mm.library import ALIGNMENT


@fusable
class GroupedLinear(Linear):
    """y[row] = x[row] @ weight[expert of row].t() under a recipe; no bias.

    Args:
        in_features: K of one expert.
        out_features: N of one expert.
        num_experts: E.
        num_experts_per_tok: how many of them a token meets; for the FLOP shares of reports alone.
        parts: row counts of the projections fused in one expert's weight; each keeps its own blocks.
        dtype: of the weight, bf16 or fp32.

    Attributes:
        weight: Parameter [E * N, K], expert after expert (see expert_weights), or None where only codes were loaded.
        out_features: E * N, as every reader of a Linear's weight expects.
        recipe: as in Linear.
        exact: as in Linear.
        observer: as in Linear.
        weight_version: as in Linear.
    """

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
        self._shapes = ExpertShapes(num_experts, in_features, own_parts)
        all_parts = own_parts * num_experts
        super().__init__(in_features, out_features * num_experts, parts=all_parts, device=device, dtype=dtype)
        self.num_experts, self.expert_parts = num_experts, own_parts
        self.active_share = num_experts_per_tok / num_experts

    source: ExpertWeight | ExpertCodes

    def _new_source(self, version: int, codes: Operands | None = None) -> ExpertWeight | ExpertCodes:
        return ExpertWeight(self._shapes, version) if codes is None else ExpertCodes(self._shapes, codes, version)

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
        return row_alignment(effective_recipe(self.recipe), device, training=training, exact=self.exact)

    def forward(self, x: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        """x [R, K] sorted by expert -> [R, N] of x's dtype.

        Args:
            offsets: [E] int32 on x's device, where each expert's rows end, each a multiple of alignment().
        Raises:
            ShapeError: if x is not [R, in_features].
            RecipeError: a recipe that experts do not run under.
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
        plan = self.begin(recipe)
        is_training = torch.is_grad_enabled()
        return GroupedLinearFunction.apply(x, self.weight, offsets, self.source, plan, is_training)

    def multiply_codes(
        self,
        rows: QuantizedTensor,
        offsets: torch.Tensor,
        plan: LinearPlan,
        out_dtype: torch.dtype,
        gather: Gather | None = None,
    ) -> torch.Tensor:
        """forward without gradients of rows [R, K] that are codes already, as the plan quantizes its input -> [R, N].

        Args:
            rows: or what they are gathered from.
            plan: of begin().
        """
        self._check_exact(plan.recipe)
        return grouped_output(rows, self.weight, self.source, plan, offsets, out_dtype, observe=False, gather=gather)

    def multiply_to_swiglu(
        self,
        rows: QuantizedTensor,
        offsets: torch.Tensor,
        plan: LinearPlan,
        dtype: torch.dtype,
        gather: Gather | None,
        *,
        scaling: Scaling,
        quant_scale: torch.Tensor | None = None,
    ) -> QuantizedTensor:
        """SwiGLU of multiply_codes [R, N], whose first half is the gate, as codes [R, N / 2].

        Args:
            rows: as in multiply_codes.
            scaling: of the codes.
            quant_scale: [1] fp32, known; None for the scaling's own.
        """
        self._check_exact(plan.recipe)
        return grouped_swiglu(
            rows, self.weight, self.source, plan, offsets, dtype,
            scaling=scaling, quant_scale=quant_scale, gather=gather,
        )  # fmt: skip


def row_alignment(recipe: Recipe, device: torch.device, *, training: bool, exact: bool = False) -> int:
    """What the rows of each expert must be padded to a multiple of, for grouped GEMMs under a recipe on a device."""
    of_rows = recipe.in_fp8("output") and recipe.input is not None and recipe.input.kind in ("block_1x128", "per_row")
    # Products of codes with scales of their rows, and exact ones, take groups of any size; a few tokens' padding would
    # be most of the batch.
    takes_any = of_rows or exact
    rows = 1 if device.type != "cuda" or (takes_any and not training) else ALIGNMENT
    if training and recipe.in_fp8("grad_weight"):
        assert recipe.wgrad_input is not None and recipe.grad_output is not None, "an FP8 backward quantizes both"
        rows = max(rows, recipe.wgrad_input.block_size[1], recipe.grad_output.block_size[1])
    return rows
