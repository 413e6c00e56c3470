"""WeightHolder: what a linear has beside its GEMMs: the source of its weight's codes, plans, codes loaded and held."""

import copy
import warnings
from typing import Any

import torch

from octavo.distributed.tensor_group import TensorGroup
from octavo.errors import CheckpointError, RecipeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.delayed import DelayedLinear
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.gathered import GatheredWeight
from octavo.nn.weights.operands import Operands, merge_parts, moved_device
from octavo.nn.weights.plan import LinearPlan, Observer
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import reciprocal


class WeightHolder(DelayedLinear):
    """A module with a weight [N, K] and its source; Linear builds on it and has the attributes' meaning."""

    in_features: int
    source: CachedWeight | CodesOnly | GatheredWeight
    recipe: Recipe | None
    exact: bool
    observer: Observer | None
    saves_input: bool
    input_scale: torch.Tensor | None
    _input_quant_scale: torch.Tensor | None
    tensor_group: TensorGroup | None = None  # see LinearPlan
    cut_dim = ""

    def _new_source(self, version: int, codes: Operands | None = None) -> CachedWeight | CodesOnly:
        return CachedWeight(self.parts, version) if codes is None else CodesOnly(self.parts, codes, version)

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 puts the gathered parameter here, and the sharded one when it frees that: none keeps the other's codes
        if name == "weight" and "source" in self.__dict__:
            self.source.replace_weight(value)
            if isinstance(value, torch.nn.Parameter) and "weight" in self._parameters:
                self._parameters["weight"] = value  # as FSDP2 itself does where a module has no __setattr__ of its own
                return
        super().__setattr__(name, value)

    @property
    def matrix(self) -> torch.Tensor | None:
        """The weight as GEMMs read it, [N, K]; see TransposedLinear."""
        return self.weight

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Give this linear a recipe of its own, with the buffers that it needs where the weight has values."""
        self.recipe = recipe
        if recipe is not None and recipe.has_state and self.weight is not None and not self.weight.is_meta:
            self.delayed_state(recipe)

    def plan_for(self, recipe: Recipe) -> LinearPlan:
        """How this linear computes under a recipe, as it stands."""
        state, scale = None if recipe.delayed is None else self.delayed_state(recipe), self._input_quant_scale
        saves_input = self.saves_input or (self.source.is_sharded and torch.compiler.is_compiling())
        cut = (self.tensor_group, self.cut_dim)
        return LinearPlan(recipe, self.exact, self.training, saves_input, self.observer, state, scale, *cut)

    def begin(self, recipe: Recipe) -> LinearPlan:
        """plan_for at the beginning of a forward: delayed scaling takes over what the last training step staged."""
        state, scale = None if recipe.delayed is None else self.begin_forward(recipe), self._input_quant_scale
        saves_input = self.saves_input or (self.source.is_sharded and torch.compiler.is_compiling())
        cut = (self.tensor_group, self.cut_dim)
        return LinearPlan(recipe, self.exact, self.training, saves_input, self.observer, state, scale, *cut)

    def forward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the weight for the output GEMM: (row range, [rows, K]) pairs, shared, not copied."""
        return self.source.forward(self.matrix, self.plan_for(recipe))

    def backward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the weight for the grad_input GEMM: (row range, [K, rows]) pairs, shared, not copied."""
        return self.source.backward(self.matrix, self.plan_for(recipe))

    def quantized_weight(self, recipe: Recipe | None = None) -> list[QuantizedTensor]:
        """The weight's codes and scales as one QuantizedTensor a row range; shared, not copied."""
        recipe = recipe or effective_recipe(self.recipe)
        return [q for _, q in self.forward_operands(recipe)] if recipe.is_fp8 else []

    def load_quantized(self, parts: list[QuantizedTensor]) -> None:
        """Take a checkpoint's codes as they are; the layer becomes inference-only and holds no other weight.

        Args:
            parts: one QuantizedTensor [part rows, K] for each of self.parts, all with one scaling.
        Raises:
            CheckpointError: if shapes or scalings do not fit.
        """
        shapes = [tuple(p.shape) for p in parts]
        expected = [(rows, self.in_features) for rows in self.parts]
        if shapes != expected or any(p.scaling != parts[0].scaling for p in parts):
            raise CheckpointError(f"codes of shapes {shapes} do not fit parts {expected} with one scaling")
        self._hold(merge_parts(parts, self.parts))

    def keep_codes_only(self, recipe: Recipe | None = None) -> None:
        """Give up the high-precision weight for its codes, for good: half its memory or less, and no training of it.

        The forward's bits stay, and square blocks (blockwise, one scale a tensor) still send gradients to the input.

        Args:
            recipe: None for the layer's own.
        Raises:
            RecipeError: no FP8 recipe, or one whose operands are no codes.
        """
        recipe = recipe or effective_recipe(self.recipe)
        if not recipe.is_fp8 or recipe.is_emulated:
            raise RecipeError(f"recipe {recipe.name!r} has no codes to keep; use one of delayed to blockwise")
        self._hold(self.forward_operands(recipe))

    def _hold(self, operands: Operands) -> None:
        """Let these codes be all that there is of the weight."""
        name = self.full_name
        self.source, self.weight = self._new_source(self.weight_version + 1, operands), None
        self.full_name = name

    def set_input_scale(self, scale: torch.Tensor) -> None:
        """Give the input a known scale (one positive fp32 number, decodes) for recipes with static_input."""
        home = self.source.device if isinstance(self.source, CodesOnly) else self.weight.device  # type: ignore[union-attr]
        known = scale.detach().reshape(-1).to(None if home.type == "meta" else home, torch.float32, copy=True)
        quant_scale = reciprocal(known)
        if known.numel() != 1 or not (torch.isfinite(quant_scale) & (quant_scale > 0)).all():
            raise CheckpointError(f"an input scale must be one positive finite number, got {scale}")
        self.input_scale, self._input_quant_scale = known, quant_scale

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """What an inference forward reads beside parameters and buffers: codes held or pinned, known scales."""
        known = {"input_scale": self.input_scale, "input_quant_scale": self._input_quant_scale}
        return {name: tensor for name, tensor in known.items() if tensor is not None} | self.source.live_tensors()

    def _save_to_state_dict(self, *args):  # type: ignore[no-untyped-def]
        if isinstance(self.source, CodesOnly):
            warnings.warn(
                "a state dict has no weight of a linear that holds FP8 codes only, and these are not in it; save it "
                "before octavo.nn.keep_codes_only, write octavo's own models by octavo.save_model, or use torch.export",
                stacklevel=2,
            )
        super()._save_to_state_dict(*args)

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move codes with the module; a dtype change leaves them alone."""
        super()._apply(fn, recurse)
        if isinstance(self.source, CodesOnly):
            self.source.move(fn)
        else:
            self.source = copy.deepcopy(self.source)  # an empty one
            self.source.replace_weight(self.weight)
        if self.input_scale is not None:
            self.input_scale = self.input_scale.to(moved_device(fn, self.input_scale))
            self._input_quant_scale = reciprocal(self.input_scale)
        return self
