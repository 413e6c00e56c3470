"""Linear: a high-precision parameter whose GEMMs run under a recipe; a WeightSource owns its 8-bit copies."""

import copy
from typing import Any

import torch
from torch import nn

from octavo.errors import CheckpointError, DtypeError, RecipeError, ShapeError
from octavo.nn.autocast_context import effective_recipe
from octavo.nn.delayed import DelayedLinear
from octavo.nn.functional.emulated import EmulatedLinearFunction
from octavo.nn.functional.linear import (
    HighPrecisionLinearFunction,
    ScaledLinearFunction,
    scaled_linear,
    warn_of_fp16,
)
from octavo.nn.fusion import fusable
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.delayed import DelayedState
from octavo.nn.weights.operands import Operands, merge_parts, moved_device
from octavo.nn.weights.plan import LinearPlan, Observer
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import INPUT_DTYPES, reciprocal


@fusable
class Linear(DelayedLinear):
    """y = x @ weight.t() + bias under a recipe.

    The recipe is the module's own (`recipe`, set by convert or a model's numerics), else the autocast context's, else
    high precision. Any token count works; FP8 copies of the weight are derived state and never in a state dict.

    Args:
        in_features, out_features: K and N.
        bias: add a bias [N].
        parts: row counts of the projections fused in this weight (they sum to N); each keeps its own blocks.
        dtype: of the parameters, bf16 or fp32.

    Attributes:
        weight: Parameter [N, K], or None where the layer was loaded for inference from codes.
        source: owner of the weight's FP8 codes (octavo.nn.weights).
        input_scale: [1] fp32 decode scale of the input for recipes with static_input, None without; set_input_scale.
        exact: a row's output bits depend on that row alone.
        observer: None, or a function (role, tensor, codes or None) that sees every operand and result: roles "input",
            "weight", "output", "grad_output", "grad_input" and "grad_weight". Fused modules run unfused under one.
        saves_input: keep the input itself for grad_weight, and quantize it along the tokens in the backward: for one
            that somebody else saves anyway, such as attention's output. The bits are the same.
        follows_autocast: compute in torch.autocast's dtype, as the torch.nn.Linear did that convert replaced.
        weight_version: grows by one each time that the weight is committed (optimizer, load, refit).
    """

    def __init__(
        self,
        in_features: int,
        out_features: int,
        bias: bool = False,
        *,
        parts: tuple[int, ...] | None = None,
        device: torch.device | str | None = None,
        dtype: torch.dtype = torch.bfloat16,
    ) -> None:
        super().__init__()
        self.in_features, self.out_features = in_features, out_features
        self.parts = parts or (out_features,)
        if sum(self.parts) != out_features:
            raise ShapeError(f"parts {self.parts} must sum to out_features={out_features}")
        self.source: CachedWeight | CodesOnly = self._new_source(0)
        self.weight: nn.Parameter | None = nn.Parameter(
            torch.empty(out_features, in_features, device=device, dtype=dtype)
        )
        self.bias = nn.Parameter(torch.zeros(out_features, device=device, dtype=dtype)) if bias else None
        self.recipe: Recipe | None = None
        self.exact = False
        self.observer: Observer | None = None
        self.saves_input = False
        self.follows_autocast = False
        self.input_scale: torch.Tensor | None = None
        self._input_quant_scale: torch.Tensor | None = None
        nn.init.kaiming_uniform_(self.weight, a=5**0.5)

    def _new_source(self, version: int, codes: Operands | None = None) -> CachedWeight | CodesOnly:
        return CachedWeight(self.parts, version) if codes is None else CodesOnly(self.parts, codes, version)

    def __setattr__(self, name: str, value: Any) -> None:
        # FSDP2 puts the gathered parameter here, and the sharded one when it frees that: none keeps the other's codes
        if name == "weight" and "source" in self.__dict__:
            self.source.release()
            self.source.is_sharded |= hasattr(value, "device_mesh")
        super().__setattr__(name, value)

    def extra_repr(self) -> str:
        recipe = self.recipe.name if self.recipe else None
        return f"{self.in_features} -> {self.out_features}, recipe={recipe}, exact={self.exact}"

    def set_recipe(self, recipe: Recipe | None) -> None:
        """Give this linear a recipe of its own, with the buffers that it needs where the weight has values."""
        self.recipe = recipe
        if recipe is not None and recipe.has_state and self.weight is not None and not self.weight.is_meta:
            self.delayed_state(recipe)

    def plan_for(self, recipe: Recipe) -> LinearPlan:
        """How this linear computes under a recipe, as it stands."""
        return self._plan(recipe, None if recipe.delayed is None else self.delayed_state(recipe))

    def begin(self, recipe: Recipe) -> LinearPlan:
        """plan_for at the beginning of a forward: delayed scaling takes over what the last training step staged."""
        return self._plan(recipe, None if recipe.delayed is None else self.begin_forward(recipe))

    def _plan(self, recipe: Recipe, state: DelayedState | None) -> LinearPlan:
        known = self._input_quant_scale
        return LinearPlan(recipe, self.exact, self.training, self.saves_input, self.observer, state, known)

    def forward(self, x: torch.Tensor, *, add_bias: bool = True) -> torch.Tensor:
        """x [..., K] bf16, fp16 or fp32 -> [..., N] of x's dtype.

        Args:
            add_bias: False leaves the bias to an activation that adds it.
        Raises:
            ShapeError: if the last dim is not in_features. DtypeError: for other dtypes.
        """
        bias = self.bias if add_bias else None
        if x.shape[-1] != self.in_features:
            raise ShapeError(f"the last dim of x must be in_features={self.in_features}, got shape {tuple(x.shape)}")
        if x.dtype not in INPUT_DTYPES:
            raise DtypeError(f"a Linear takes bfloat16, float16 or float32, got {x.dtype}")
        if self.follows_autocast and torch.is_autocast_enabled(x.device.type):
            x = x.to(torch.get_autocast_dtype(x.device.type))
        is_matrix = x.dim() == 2
        flat = x if is_matrix else x.reshape(-1, self.in_features)  # [T, K]
        recipe = effective_recipe(self.recipe)
        if recipe.input is not None:  # in FP8
            if self.exact:
                self._check_exact(recipe)
            out = self._forward_fp8(flat, bias, recipe)
        else:
            if self.weight is None:
                raise RecipeError(
                    "this layer holds FP8 codes only, so it cannot run in high precision; load it with a bf16 recipe"
                )
            out = HighPrecisionLinearFunction.apply(flat, self.weight, bias, self.exact, self.observer)
        return out if is_matrix else out.view(*x.shape[:-1], self.out_features)

    def _check_exact(self, recipe: Recipe) -> None:
        if self.exact and recipe != self.recipe:
            raise RecipeError(
                f"this layer is exact under {self.recipe.name if self.recipe else 'bf16'}, and autocast asks for "
                f"{recipe.name!r}: trainer and sampler would differ; change the model's numerics instead (set_numerics)"
            )

    def _forward_fp8(self, flat: torch.Tensor, bias: torch.Tensor | None, recipe: Recipe) -> torch.Tensor:
        weight, is_training = self.weight, torch.is_grad_enabled()
        is_emulated = recipe.fake_quant or recipe.emulated
        if weight is None and (is_emulated or recipe.high_precision_gemms):
            raise RecipeError(
                f"this layer holds FP8 codes only, and recipe {recipe.name!r} with fake_quant, an emulated format or "
                "high_precision_gemms computes from the high-precision weight; load the checkpoint for training"
            )
        plan = self.begin(recipe)
        if is_emulated:
            return EmulatedLinearFunction.apply(flat, weight, bias, self.source, plan, is_training)
        if not is_training:
            return scaled_linear(flat, weight, bias, self.source, plan, training=False, needs_wgrad=False)[0]
        if flat.dtype == torch.float16 and not torch.compiler.is_compiling():
            warn_of_fp16()
        return ScaledLinearFunction.apply(flat, weight, bias, self.source, plan)

    # 8-bit copies

    def forward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the weight for the output GEMM: (row range, [rows, K]) pairs, shared, not copied."""
        return self.source.forward(self.weight, self.plan_for(recipe))

    def backward_operands(self, recipe: Recipe) -> Operands:
        """Codes of the weight for the grad_input GEMM: (row range, [K, rows]) pairs, shared, not copied."""
        return self.source.backward(self.weight, self.plan_for(recipe))

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
        self.source, self.weight = self._new_source(self.weight_version + 1, operands), None

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

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """Move codes with the module; a dtype change leaves them alone."""
        super()._apply(fn, recurse)
        if isinstance(self.source, CodesOnly):
            self.source.move(fn)
        else:
            self.source = copy.deepcopy(self.source)  # an empty one
        if self.input_scale is not None:
            self.input_scale = self.input_scale.to(moved_device(fn, self.input_scale))
            self._input_quant_scale = reciprocal(self.input_scale)
        return self
