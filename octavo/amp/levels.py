"""The two levels of a model: which recipe its linears compute with under O1, and how they compute under O2."""

import dataclasses
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.hooks import RemovableHandle

from octavo.errors import DtypeError, RecipeError
from octavo.models import Decoder
from octavo.nn import HISTORY_BUFFER, ConversionReport, Linear, convert
from octavo.nn.conversion import DEFAULT_IGNORE
from octavo.nn.fused_experts import experts_recipes, set_experts_recipe
from octavo.numerics.recipe import Recipe, get_recipe

Level = Literal["O1", "O2"]
LEVELS: tuple[Level, ...] = ("O1", "O2")
_HIGH_PRECISION = get_recipe("bf16")


def check_level(level: str) -> Level:
    """The level of that name; RecipeError for another."""
    for known in LEVELS:
        if level == known:
            return known
    raise RecipeError(f"a level is 'O1' (FP8) or 'O2' (bf16 or fp16), got {level!r}")


class Levels:
    """Switches a model's linears between an FP8 recipe (O1) and high precision (O2).

    Nothing but each linear's `recipe` changes: parameters, weight versions, 8-bit copies and delayed scaling's state
    stay where they are, so a return to O1 goes on from them.

    Args:
        model: any module; plain torch.nn.Linear are converted, sharing their parameters.
        recipe: what O1 computes with; None keeps the recipes that the linears have.
        dtype: what those linears compute in under O2: their inputs are cast to it and their outputs back. All else
            computes in the model's own dtype under both levels.
        ignore: as octavo.convert takes it.
        overrides: as octavo.convert takes them.

    Attributes:
        level: the one in force.
        report: what convert did; None where it was not asked to.

    Raises:
        RecipeError: no linear is left in FP8, a linear that holds codes only, or exact mode, which fixes the recipe.
        DtypeError: another dtype than bf16 or fp16, or fp16 parameters.
    """

    def __init__(
        self,
        model: nn.Module,
        recipe: Recipe | str | None,
        *,
        dtype: torch.dtype = torch.bfloat16,
        ignore: tuple[str, ...] = DEFAULT_IGNORE,
        overrides: Mapping[str, Recipe | str] | None = None,
    ) -> None:
        _check_model(model, dtype)
        if recipe is None and overrides:
            raise RecipeError("recipe=None keeps the recipes that the linears have, so overrides have no say; name one")
        self.report: ConversionReport | None = None
        if recipe is not None:
            self.report = convert(model, recipe, ignore=ignore, overrides=overrides)
        linears = (module for module in model.modules() if isinstance(module, Linear))
        self._recipes = {linear: linear.recipe for linear in linears if linear.recipe and linear.recipe.is_fp8}
        if not self._recipes:
            raise RecipeError("no linear of this model would run in FP8 under O1; name an FP8 recipe or shorten ignore")
        self._experts = experts_recipes(model)
        self._decoders = {module: module.numerics for module in model.modules() if isinstance(module, Decoder)}
        if recipe is not None:
            for decoder, numerics in self._decoders.items():
                self._decoders[decoder] = dataclasses.replace(numerics, recipe=get_recipe(recipe))
                decoder.conversion_report = self.report
        self._dtype = dtype
        self._casts: list[RemovableHandle] = []
        self.level: Level = "O1"
        self.set("O1")

    @property
    def linears(self) -> Mapping[Linear, Recipe]:
        """The linears that switch, with their recipes under O1."""
        return self._recipes

    def check_o2(self) -> None:
        """Refuse O2 for linears that FSDP2 gathers as FP8 codes alone.

        Raises:
            RecipeError: naming the first one.
        """
        for linear in self._recipes:
            if not linear.source.has_values:
                raise RecipeError(
                    f"{linear.full_name or 'a linear'} is gathered as FP8 codes, from which O2 cannot compute; shard "
                    "the model without all_gather_dtype='fp8', or stay in O1 without fallback and schedule"
                )

    def set(self, level: Level) -> None:
        """Put a level in force from the next forward on; errors of O2 as check_o2."""
        if level == "O2":
            self.check_o2()
        for linear, recipe in self._recipes.items():
            linear.recipe = recipe if level == "O1" else _HIGH_PRECISION
        for (module, name), recipe in self._experts.items():
            set_experts_recipe(module, name, recipe if level == "O1" else None)
        for decoder, numerics in self._decoders.items():
            in_force = numerics.recipe if level == "O1" else _HIGH_PRECISION
            decoder.numerics = dataclasses.replace(numerics, recipe=in_force)
        for cast in self._casts:
            cast.remove()
        self._casts = (
            [h for linear in self._recipes for h in _Cast(self._dtype).attach(linear)] if level == "O2" else []
        )
        self.level = level

    def overflow_share(self) -> torch.Tensor | None:
        """Share of delayed scaling's operands that this step's forward and backward clipped.

        Returns:
            fp32 scalar on the model's device, from the amaxes staged and the scales in use; None without such state,
            and under O2.
        """
        if self.level == "O2":
            return None
        clipped = [_clipped(linear, recipe) for linear, recipe in self._recipes.items() if recipe.has_state]
        found = [c for c in clipped if c is not None]
        return torch.cat([c.to(found[0].device) for c in found]).float().mean() if found else None


class _Cast:
    """Hooks by which one linear computes in a dtype of its own."""

    def __init__(self, dtype: torch.dtype) -> None:
        self._dtype = self._outer = dtype

    def attach(self, linear: Linear) -> tuple[RemovableHandle, RemovableHandle]:
        enter = linear.register_forward_pre_hook(self._enter, with_kwargs=True)
        return enter, linear.register_forward_hook(self._leave)

    def _enter(
        self, _: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if args:
            self._outer = args[0].dtype
            return (args[0].to(self._dtype), *args[1:]), kwargs
        name = "x" if "x" in kwargs else "input"  # Conv1D's, torch.nn.Linear's
        self._outer = kwargs[name].dtype
        return args, {**kwargs, name: kwargs[name].to(self._dtype)}

    def _leave(self, _: nn.Module, __: tuple[Any, ...], output: torch.Tensor) -> torch.Tensor:
        return output.to(self._outer)


def _clipped(linear: Linear, recipe: Recipe) -> torch.Tensor | None:
    """For each slot of delayed scaling that staged something: whether it passed the range of its scale."""
    if linear.recipe is not recipe or HISTORY_BUFFER not in dict(linear.named_buffers(recurse=False)):
        return None
    assert recipe.input is not None and recipe.weight is not None, "delayed scaling quantizes the forward"
    state = linear.delayed_state(recipe)
    num_weights = state.quant_scale.numel() - state.WEIGHT
    grad = recipe.grad_output or recipe.input
    limits = [recipe.input.fp8_max, grad.fp8_max, *[recipe.weight.fp8_max] * num_weights]
    staged = state.history[0]
    # a value is clipped where it rounds beyond the largest code; one part in 32 covers both formats' half step
    return staged * state.quant_scale > staged.new_tensor(limits) * (1 + 1 / 32)


def _check_model(model: nn.Module, dtype: torch.dtype) -> None:
    if dtype not in (torch.bfloat16, torch.float16):
        raise DtypeError(f"O2 computes in torch.bfloat16 or torch.float16, got {dtype}")
    for name, parameter in model.named_parameters():
        if parameter.dtype == torch.float16:
            raise DtypeError(
                f"parameter {name} is float16, in which unscaled gradients underflow; keep parameters in float32 or "
                "bfloat16 (dtype=torch.float16 computes in fp16 all the same)"
            )
    for name, module in model.named_modules():
        if isinstance(module, Linear) and module.weight is None:
            raise RecipeError(f"{name} holds FP8 codes only; load the checkpoint with trainable=True")
        if getattr(module, "exact", False) is True:
            raise RecipeError(
                f"{name} is exact, which fixes its recipe for trainer and sampler; turn exact off for amp"
            )
