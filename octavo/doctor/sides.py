"""The two sides of a reinforcement-learning policy, and the parts in which they can differ.

A Side says how one of them computes; `differences` lists what is not the same. octavo.doctor.replay runs mixtures.
"""

import dataclasses

import torch

from octavo.errors import RecipeError
from octavo.models import Decoder
from octavo.nn import Linear
from octavo.numerics import QuantizedTensor, Recipe, Scaling
from octavo.numerics.formats import format_of
from octavo.ops.attention import KVScaleTable

PARTS = ("weights", "activations", "kv_cache", "router", "attention", "head", "staleness")
LABELS = {
    "weights": "weight quantization",
    "activations": "activation quantization",
    "kv_cache": "KV quantization",
    "router": "router",
    "attention": "attention kernel",
    "head": "sampling head",
    "staleness": "staleness",
}


@dataclasses.dataclass(frozen=True)
class Side:
    """How one side computes a policy.

    Args:
        model: its weights; its numerics say how linears, KV cache and attention compute.
        temperature: that logits are divided by.
        decodes: token by token over a paged cache, as a sampler does; False scores packed sequences, as a trainer.
        head_recipe: by which the head's weight and hidden states are quantized, or None; octavo's own never are.
        router_recipe: the same of the experts' routers.
        kv_scale: one known scale for all of K and V, in the place of those that the numerics make; 1 is a scale that
            was left out.
    """

    model: Decoder
    temperature: float = 1.0
    decodes: bool = False
    head_recipe: Recipe | None = None
    router_recipe: Recipe | None = None
    kv_scale: float | None = None

    @property
    def recipe(self) -> Recipe:
        """Of the linears."""
        return self.model.numerics.recipe

    def describe(self, part: str) -> str:
        """How this side computes a part, in a few words; equal words are not yet equal numbers."""
        numerics, recipe = self.model.numerics, self.recipe
        match part:
            case "weights":
                return _format(recipe, recipe.weight)
            case "activations":
                return _format(recipe, recipe.input)
            case "kv_cache":
                if self.kv_scale is not None:
                    return f"fp8, scale {self.kv_scale:g}"
                return "bf16" if numerics.kv_cache_dtype == "bf16" else f"fp8, {numerics.kv_scales}"
            case "router":
                return _recipe_name(self.router_recipe)
            case "attention":
                exact = ", exact" if numerics.exact else ""
                return f"{'paged' if self.decodes else 'packed'}, {numerics.attention_dtype}{exact}"
            case "head":
                words = f"{_recipe_name(self.head_recipe)}, temperature {self.temperature:g}"
                return f"{words}, exact" if numerics.exact else f"{words}, {'sampler' if self.decodes else 'trainer'}'s"
        return f"weight version {self.model.weight_version}"

    @property
    def kv_cache_dtype(self) -> str:
        """ "fp8" or "bf16"."""
        return "fp8" if self.kv_scale is not None else self.model.numerics.kv_cache_dtype

    def make_kv_table(self) -> KVScaleTable | None:
        """A copy of the known scales of its cache, which may be written without a trace; None for none.

        Raises:
            RecipeError: scales that the engine has not made yet.
        """
        given = self.model.kv_table
        if self.kv_scale is None and given is None:
            return None
        table = KVScaleTable(self.model.config.num_layers, "_fixed", self.model.device)
        if self.kv_scale is not None:
            scale = torch.tensor(self.kv_scale)
            table.set(dict.fromkeys(range(table.num_layers), (scale, scale)), 0)
        elif given is not None:
            if given.is_calibrating:
                raise RecipeError(
                    f"the engine's first batch makes the KV scales (kv_scales={self.model.numerics.kv_scales!r}), and "
                    "there was none; let it sample first"
                )
            table.load_state_dict(given.state_dict())
        return table


def linears_of(model: Decoder) -> dict[str, Linear]:
    """Every linear but the head, which is never quantized, by its full name."""
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, Linear) and module is not model.lm_head
    }


def differences(trainer: Side, sampler: Side, stale: tuple[str, ...]) -> tuple[str, ...]:
    """The parts in which two sides can differ at all, in the order of PARTS.

    Args:
        stale: names of the weights that differ (stale_weights).
    """
    found = [part for part in PARTS[:-1] if trainer.describe(part) != sampler.describe(part)]
    mixed = linear_recipes(trainer.model) != linear_recipes(sampler.model)
    if mixed:  # one recipe by name, but not in the same layers
        found += [part for part in ("weights", "activations") if part not in found]
    if "kv_cache" not in found and not _same_tables(trainer.model.kv_table, sampler.model.kv_table):
        found.append("kv_cache")
    if trainer.model.config.num_experts == 0:
        found = [part for part in found if part != "router"]
    return tuple(part for part in PARTS if part in found or (part == "staleness" and stale))


def linear_recipes(model: Decoder) -> dict[str, Recipe | None]:
    """Each linear's FP8 recipe; None in high precision."""
    found = {name: linear.recipe for name, linear in linears_of(model).items()}
    return {name: recipe if recipe is not None and recipe.is_fp8 else None for name, recipe in found.items()}


def stale_weights(trainer: Decoder, sampler: Decoder) -> tuple[str, ...]:
    """Names of the parameters whose values are not the same on both sides, and of linears whose codes are others.

    Codes are compared with those of the trainer's weight under the sampler's recipe: codes that were not made again
    after an update, or damaged on their way, are found beside a weight that is right.
    """
    theirs, names = dict(sampler.named_parameters()), []
    for name, param in trainer.named_parameters():
        other = theirs.get(name)
        if other is not None and other is not param and not torch.equal(param, other.to(param.device, param.dtype)):
            names.append(name)
    for name, linear in linears_of(sampler).items():
        recipe = linear_recipes(sampler)[name]
        if recipe is None or recipe.is_emulated or f"{name}.weight" in names:
            continue
        source = linears_of(trainer)[name]
        expected = source.quantized_weight(recipe) if source.weight is not None else []
        if expected and not _same_codes(expected, linear.quantized_weight(recipe)):
            names.append(f"{name}.weight")
    return tuple(names)


def _same_tables(ours: KVScaleTable | None, theirs: KVScaleTable | None) -> bool:
    if ours is None or theirs is None or ours is theirs:
        return ours is theirs
    return torch.equal(ours.scale, theirs.scale) and ours.high_precision == theirs.high_precision


def _same_codes(ours: list[QuantizedTensor], theirs: list[QuantizedTensor]) -> bool:
    pairs = list(zip(ours, theirs, strict=True)) if len(ours) == len(theirs) else []
    return bool(pairs) and all(
        torch.equal(a.qdata.view(torch.uint8), b.qdata.view(torch.uint8)) and torch.equal(a.scale, b.scale)
        for a, b in pairs
    )


def _format(recipe: Recipe, scaling: Scaling | None) -> str:
    if scaling is None:
        return "bf16"
    kind = recipe.emulated or f"{format_of(scaling.dtype).name} {scaling.kind}"
    known = ", delayed" if recipe.has_state else ", static" if recipe.static_input else ""
    return f"{kind}{'' if scaling.scale_format == 'fp32' else ', ' + scaling.scale_format}{known}"


def _recipe_name(recipe: Recipe | None) -> str:
    return "bf16" if recipe is None else recipe.name
