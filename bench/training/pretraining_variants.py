"""Variants: numerics and optimizer of a pretraining run, by names that say them. `parse_variant` reads GRAMMAR."""

import dataclasses
import re
from typing import Any, Literal

from octavo.errors import ConfigError, RecipeError
from octavo.models import Decoder
from octavo.numerics.recipe import EMULATED_RECIPES, RECIPE_NAMES
from octavo.run.sections import OptimizerSection
from octavo.train.build import set_precision
from octavo.train.config import PrecisionSection, RecipeSection

GRAMMAR = (
    "PRECISION[-to-PRECISION][+fp8-optimizer][+nudged], PRECISION being "
    "RECIPE[+FIELD=VALUE...][+firstN][+lastN][+RECIPE@MODULE...]"
)
EXAMPLES = "nvfp4+last1, nvfp4+stochastic_rounding=false, mxfp8+bf16@down_proj"
_FIELDS = tuple(name for name in RecipeSection.model_fields if name != "recipe")
_ENDS = {"first": "num_layers_at_start_in_bf16", "last": "num_layers_at_end_in_bf16"}
_LAYERS = re.compile(r"(first|last)([1-9]\d*)")
_SEVERAL = "."  # between the values of a field that takes several; a variant's name is a part of a file's


@dataclasses.dataclass(frozen=True)
class PretrainingVariant:
    """In which numerics a run computes, and what its optimizer keeps.

    Args:
        precision: of every linear but lm_head.
        later: the precision from the middle of the run on; None for the same throughout.
        optimizer: "fp32" moments and masters, or "fp8" moments with 16-bit remainders of the masters.
        nudged: one weight starts an ulp away: what rounding alone makes of a run.
    """

    precision: PrecisionSection
    later: PrecisionSection | None = None
    optimizer: Literal["fp32", "fp8"] = "fp32"
    nudged: bool = False

    @property
    def name(self) -> str:
        """See GRAMMAR; one variant has one name."""
        name = "-to-".join(map(_name_of, self._phases))
        return name + "+fp8-optimizer" * (self.optimizer == "fp8") + "+nudged" * self.nudged

    @property
    def label(self) -> str:
        """For tables and plots: the name, with what it changes in a recipe in words."""
        if not any(map(_changes, self._phases)):
            return self.name
        label = ", then ".join(", ".join([phase.recipe, *_changes(phase)]) for phase in self._phases)
        return label + ", FP8 optimizer" * (self.optimizer == "fp8") + ", nudged" * self.nudged

    @property
    def _phases(self) -> list[PrecisionSection]:
        return [self.precision] if self.later is None else [self.precision, self.later]

    @property
    def parent(self) -> str | None:
        """The variant whose first half this one shares."""
        return dataclasses.replace(self, later=None).name if self.later else None

    @property
    def final_precision(self) -> PrecisionSection:
        """The precision at the end of the run."""
        return self.later or self.precision

    @property
    def is_one_precision(self) -> bool:
        """Whether only the linears' numerics tell it from bf16, the same from the first step to the last."""
        return self.later is None and self.optimizer == "fp32" and not self.nudged

    @property
    def is_plain(self) -> bool:
        """Whether it is a recipe as it is, on every linear."""
        return self.is_one_precision and self.precision == PrecisionSection(recipe=self.precision.recipe)

    @property
    def keeps_recipe(self) -> bool:
        """Whether no recipe's field is changed; other linears may have other recipes."""
        return not any(_fields_of(phase) for phase in self._phases)

    @property
    def is_emulated(self) -> bool:
        """Whether linears compute in a format that Hopper has no GEMM for, at any time of the run."""
        recipes = [r.name for phase in self._phases for r in (phase.make_recipe(), *phase.module_recipes().values())]
        return any(recipe in EMULATED_RECIPES for recipe in recipes)

    def optimizer_section(self, learning_rate: float) -> OptimizerSection:
        """AdamW with decay 0.1 and clipping at 1."""
        if self.optimizer == "fp8":
            return OptimizerSection(lr=learning_rate, state_dtype="fp8", master_weights="remainder")
        return OptimizerSection(lr=learning_rate)

    def check_model(self, model: Decoder) -> None:
        """Give a model every precision of the variant, one after the other.

        Raises:
            ConfigError: layers or modules that the model does not have.
        """
        for phase in self._phases:
            try:
                set_precision(model, phase)
            except (ConfigError, RecipeError) as error:
                raise ConfigError(f"variant {self.name!r}: {error}") from None


def parse_variant(name: str) -> PretrainingVariant:
    """A variant by its name.

    Raises:
        ConfigError: no variant's name, a field or value that the recipe does not have, a change without effect, or
            another spelling than PretrainingVariant.name's.
    """
    *earlier, last = name.split("-to-")
    precision, *options = last.split("+")
    own = [option for option in options if option not in ("fp8-optimizer", "nudged")]
    try:
        phases = [_parse_precision(text) for text in (*earlier, "+".join([precision, *own]))]
    except (ConfigError, RecipeError) as error:
        raise ConfigError(f"variant {name!r}: {error}") from None
    if len(phases) == 2 and phases[0] == phases[1]:
        raise ConfigError(f"variant {name!r}: it changes to the precision that it has; leave -to- out")
    if len(phases) > 2:
        raise ConfigError(f"variant {name!r}: a run changes its precision once; a variant is {GRAMMAR}")
    later = phases[1] if len(phases) == 2 else None
    variant = PretrainingVariant(phases[0], later, "fp8" if "fp8-optimizer" in options else "fp32", "nudged" in options)
    if variant.name != name:
        raise ConfigError(f"variant {name!r} is written {variant.name!r}: one variant has one name")
    return variant


def _parse_precision(text: str) -> PrecisionSection:
    recipe, *options = text.split("+")
    if recipe not in RECIPE_NAMES:
        raise ConfigError(f"{recipe!r} is no recipe; a variant is {GRAMMAR} with recipes of {', '.join(RECIPE_NAMES)}")
    values: dict[str, Any] = {}
    modules: dict[str, str] = {}
    for option in options:
        field, is_field, value = option.partition("=")
        other, is_module, module = option.partition("@")
        if is_field and field in _FIELDS:
            values[field] = tuple(value.split(_SEVERAL)) if field == "high_precision_gemms" else value
        elif is_module and module:
            modules[module] = other
        elif layers := _LAYERS.fullmatch(option):
            values[_ENDS[layers[1]]] = int(layers[2])
        else:
            raise ConfigError(
                f"{option!r} is no option; a variant is {GRAMMAR} ({EXAMPLES}), fields: {', '.join(_FIELDS)}"
            )
    section = PrecisionSection(recipe=recipe, **values, modules=modules)
    _check_effect(section)
    return section


def _check_effect(section: PrecisionSection) -> None:
    """Refuse a change that changes nothing: its run would be another variant's."""
    recipe = section.make_recipe()
    for field in _fields_of(section):
        if section.model_copy(update={field: None}).make_recipe() == recipe:
            raise ConfigError(f"{field} is so in {section.recipe} anyway; leave it out")
    others = section.module_recipes()
    for module, other in others.items():
        if other == recipe:
            raise ConfigError(f"{module} is in {section.recipe} anyway; leave it out")
    if not recipe.is_fp8 and (section.num_layers_at_start_in_bf16 or section.num_layers_at_end_in_bf16) and not others:
        raise ConfigError(f"every layer of {section.recipe} is in bf16 anyway; leave first and last out")


def _fields_of(section: PrecisionSection) -> dict[str, str]:
    values = {field: getattr(section, field) for field in _FIELDS}
    return {field: _write(value) for field, value in values.items() if value is not None}


def _write(value: Any) -> str:
    if isinstance(value, tuple):
        return _SEVERAL.join(value)
    return str(value).lower() if isinstance(value, bool) else f"{value:g}" if isinstance(value, float) else str(value)


def _name_of(section: PrecisionSection) -> str:
    parts = [section.recipe, *(f"{field}={value}" for field, value in _fields_of(section).items())]
    parts += [f"{end}{count}" for end, key in _ENDS.items() if (count := getattr(section, key))]
    return "+".join([*parts, *(f"{recipe}@{module}" for module, recipe in sorted(section.modules.items()))])


def _changes(section: PrecisionSection) -> list[str]:
    switches = {"true": "with {}", "false": "without {}"}
    words = [
        switches[value].format(field.replace("_", " ")) if value in switches else f"{field.replace('_', ' ')} {value}"
        for field, value in _fields_of(section).items()
    ]
    counts = {end: count for end, key in _ENDS.items() if (count := getattr(section, key))}
    if counts:
        ends = " and ".join(end if count == 1 else f"{end} {count}" for end, count in counts.items())
        words.append(f"{ends} {'layer' if list(counts.values()) == [1] else 'layers'} in bf16")
    return [*words, *(f"{module} in {recipe}" for module, recipe in sorted(section.modules.items()))]
