"""Megatron's column- and row-parallel linears whose products run under a recipe; all else of them is Megatron's own."""

import functools
import warnings
from typing import Any

import torch
from megatron.core import parallel_state
from megatron.core.tensor_parallel.layers import ColumnParallelLinear, RowParallelLinear
from megatron.core.tensor_parallel.mappings import (
    copy_to_tensor_model_parallel_region,
    gather_from_sequence_parallel_region,
)
from torch import nn

from octavo.errors import ConfigError, DtypeError
from octavo.integrations.megatron.recipe import choose_recipe
from octavo.nn import Linear
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.fp8_state import agree_on_staged_amaxes
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import INPUT_DTYPES


class LinearOfMegatron(Linear):
    """What a Megatron linear multiplies by: its own weight, under a recipe.

    It is a submodule, so that octavo's tools find it; the weight is no parameter of it, so that nothing else does.

    Args:
        weight: [N, K], of the linear that holds this.
        only_tensor_amaxes: delayed scaling's are reduced over tensor-parallel ranks alone (--tp-only-amax-red).
    """

    def __init__(self, weight: nn.Parameter, only_tensor_amaxes: bool) -> None:
        out_features, in_features = weight.shape
        super().__init__(in_features, out_features, device="meta")
        self._only_tensor_amaxes = only_tensor_amaxes
        del self._parameters["weight"]
        vars(self)["weight"] = weight

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Delayed scaling's amaxes are those of the ranks that Megatron reduces them over."""
        super().set_recipe(recipe)
        if recipe is not None and recipe.has_state:
            self.source.group = parallel_state.get_amax_reduction_group(True, self._only_tensor_amaxes)

    def follow(self, weight: nn.Parameter) -> None:
        """Multiply by this parameter, where another one is in its place now."""
        if self.weight is not weight:
            self.source.replace_weight(weight)
            vars(self)["weight"] = weight

    def run(self, x: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
        """x [..., K] bf16, fp16 or fp32 -> [..., N] of x's dtype.

        Raises:
            DtypeError: for other dtypes.
        """
        if x.dtype not in INPUT_DTYPES:
            raise DtypeError(f"a linear under a recipe takes bfloat16, float16 or float32, got {x.dtype}")
        out = self._forward_fp8(x.reshape(-1, self.in_features), bias, recipe)
        return out.view(*x.shape[:-1], self.out_features)


class InFp8(nn.Module):
    """What both linears add: `fp8`, with the recipe of the config's --fp8-* flags, or of their layer."""

    config: Any
    weight: nn.Parameter | None
    fp8: LinearOfMegatron | None

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        recipe = choose_recipe(kwargs["config"], None)  # refuses before Megatron does
        super().__init__(*args, **kwargs)
        self.awaits_layer = self.config.first_last_layers_bf16
        self.fp8 = None  # where the weight is another module's
        if self.weight is not None:
            self.fp8 = LinearOfMegatron(self.weight, self.config.tp_only_amax_red)
            self.fp8.set_recipe(recipe)

    def _forward_impl(self, input: torch.Tensor, weight: torch.Tensor, **options: Any) -> torch.Tensor:
        """input [..., K] -> [..., N]: Megatron's hook for the product and what surrounds it."""
        held = self.fp8
        if held is None or weight is not self.weight:
            return super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[no-any-return, misc]
        if self.awaits_layer:
            raise ConfigError(
                "--first-last-layers-bf16 needs to know a linear's layer, and this one is in none of octavo's; build "
                "the model from octavo.integrations.megatron.gpt_layer_spec()"
            )
        recipe = effective_recipe(held.recipe)
        if not recipe.is_fp8:
            return super()._forward_impl(input=input, weight=weight, **options)  # type: ignore[no-any-return, misc]
        group = options.get("tp_group")
        if options.get("sequence_parallel"):
            input = gather_from_sequence_parallel_region(input, tensor_parallel_output_grad=True, group=group)
        elif options.get("allreduce_dgrad"):
            input = copy_to_tensor_model_parallel_region(input, group=group)
        held.follow(self.weight)
        return held.run(input, options.get("bias"), recipe)

    def sharded_state_dict(self, *args: Any, **kwargs: Any) -> Any:
        """Megatron's, on all ranks; delayed scaling's state is the same on all of them from here on."""
        agree_on_staged_amaxes(self)
        return super().sharded_state_dict(*args, **kwargs)  # type: ignore[misc]

    def get_extra_state(self) -> dict[str, torch.Tensor] | None:
        """Delayed scaling's state, where Megatron's checkpoints keep that of FP8; None without."""
        held = {} if self.fp8 is None else self.fp8.held_state()
        return {name: tensor.to("cpu", copy=True) for name, tensor in held.items()} or None

    def set_extra_state(self, state: Any) -> None:
        """Take it back; TransformerEngine's, of a model that was trained with its layers, is left alone.

        Raises:
            CheckpointError: it is of a linear of another kind, or a history of another length.
        """
        held = self.fp8
        if held is None or held.recipe is None or not held.recipe.has_state:
            return
        if not isinstance(state, dict):
            _warn_of_no_state()
            return
        held.check_state(state, held.full_name)
        held.load_state(state)


class OctavoColumnParallelLinear(InFp8, ColumnParallelLinear):  # type: ignore[misc]
    """Megatron's ColumnParallelLinear, with its arguments, whose product runs under a recipe.

    Raises:
        ConfigError: see octavo.integrations.megatron.recipe_of.
    """


class OctavoRowParallelLinear(InFp8, RowParallelLinear):  # type: ignore[misc]
    """Megatron's RowParallelLinear, with its arguments; each rank's partial product runs under a recipe.

    Raises:
        ConfigError: see octavo.integrations.megatron.recipe_of.
    """


@functools.cache  # once a process
def _warn_of_no_state() -> None:
    warnings.warn(
        "the checkpoint has no state of octavo's delayed scaling, which begins with empty amax histories; a run that "
        "shall go on with the same bits needs a checkpoint of its own",
        stacklevel=2,
    )
