"""Megatron's experts as grouped GEMMs: all experts of this rank together, in place of one after the other."""

from typing import Any

import torch
from megatron.core.transformer.moe.experts import SequentialMLP

from octavo.errors import ConfigError
from octavo.integrations.megatron.linear import InFp8
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.functional.grouped import GroupedLinearFunction
from octavo.nn.grouped_linear import row_alignment
from octavo.nn.weights.experts import ExpertShapes, ExpertWeight
from octavo.nn.weights.plan import LinearPlan
from octavo.numerics.recipe import Recipe


class OctavoGroupedMLP(SequentialMLP):  # type: ignore[misc]
    """Megatron's SequentialMLP, with its arguments, parameters, keys and checkpoints, whose experts run together.

    The weights of this rank's experts are joined in every forward, and their codes made then. Recipes without state.

    Raises:
        ConfigError: experts with a bias.
    """

    def __init__(self, num_local_experts: int, config: Any, submodules: Any, pg_collection: Any = None) -> None:
        if config.add_bias_linear:
            raise ConfigError("grouped experts have no bias; give --disable-bias-linear, or leave --moe-grouped-gemm")
        super().__init__(num_local_experts, config, submodules, pg_collection)
        self._sources = [ExpertWeight(_shapes(linears)) for linears in self._linears()]

    def forward(
        self, permuted_local_hidden_states: torch.Tensor, tokens_per_expert: torch.Tensor, permuted_probs: torch.Tensor
    ) -> tuple[torch.Tensor, None]:
        """[R, H] tokens sorted by expert, [E] how many each has, [R] their factors -> ([R, H], None).

        Raises:
            ConfigError: a recipe with state.
        """
        first, second = self._linears()
        recipe = effective_recipe(first[0].fp8.recipe)  # type: ignore[union-attr]
        if not recipe.is_fp8 or self.config.moe_apply_probs_on_input:
            out, _ = super().forward(permuted_local_hidden_states, tokens_per_expert, permuted_probs)
            return out, None
        if recipe.has_state or recipe.is_emulated:
            raise ConfigError(f"grouped experts do not run under {recipe.name!r}; leave --moe-grouped-gemm out")
        x, is_training = permuted_local_hidden_states, torch.is_grad_enabled()
        rows, offsets, num_rows = self._places(tokens_per_expert, x, recipe, is_training)
        x = x.new_zeros(num_rows, x.shape[1]).index_copy(0, rows, x)
        x = self._multiply(x, first, 0, offsets, recipe)
        scale = permuted_probs.new_zeros(num_rows).index_copy(0, rows, permuted_probs)
        x = (self._activate(x) * scale.unsqueeze(-1)).to(x.dtype)
        return self._multiply(x, second, 1, offsets, recipe).index_select(0, rows), None

    def _linears(self) -> tuple[list[InFp8], list[InFp8]]:
        return [mlp.linear_fc1 for mlp in self.local_experts], [mlp.linear_fc2 for mlp in self.local_experts]

    def _places(
        self, counts: torch.Tensor, x: torch.Tensor, recipe: Recipe, is_training: bool
    ) -> tuple[torch.Tensor, torch.Tensor, int]:
        """(row of each token where experts' rows are padded, [E] int32 where each expert's rows end, rows in all)."""
        step = row_alignment(recipe, x.device, training=is_training)
        counts = counts.to(x.device, torch.int64)
        ends = ((counts + step - 1) // step * step).cumsum(0)
        padding = ends - ends.diff(prepend=ends.new_zeros(1)) - (counts.cumsum(0) - counts)  # before each expert
        rows = torch.arange(len(x), device=x.device) + padding.repeat_interleave(counts, output_size=len(x))
        num_rows = -(-(len(x) + len(counts) * (step - 1)) // step) * step  # of any counts: nothing waits for a GPU
        return rows, ends.int(), num_rows

    def _multiply(
        self, x: torch.Tensor, linears: list[InFp8], which: int, offsets: torch.Tensor, recipe: Recipe
    ) -> torch.Tensor:
        weight = torch.cat([linear.weight for linear in linears])  # type: ignore[misc]
        plan = LinearPlan(recipe, stages=self.training)
        source, training = self._sources[which], torch.is_grad_enabled()
        return GroupedLinearFunction.apply(x, weight, offsets, source, plan, training)  # type: ignore[no-any-return]

    def _activate(self, x: torch.Tensor) -> torch.Tensor:
        """As MLP does without its fused kernels."""
        config, act = self.config, self.config.activation_func
        if not config.gated_linear_unit:
            return act(x)  # type: ignore[no-any-return]
        gate, up = x.chunk(2, dim=-1)
        if (most := config.activation_func_clamp_value) is not None:
            gate, up = gate.clamp(max=most), up.clamp(-most, most)
        return act(gate) * (up + config.glu_linear_offset)  # type: ignore[no-any-return]


def _shapes(linears: list[InFp8]) -> ExpertShapes:
    rows, columns = linears[0].weight.shape  # type: ignore[union-attr]
    return ExpertShapes(len(linears), columns, (rows,))
