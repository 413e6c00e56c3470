"""Precision levels: one setting for the numerics of rollout and training, and the audit that holds both to it."""

import dataclasses
from typing import TYPE_CHECKING, Annotated, Any, Literal

from pydantic import ValidatorFunctionWrapHandler, WrapValidator

from octavo.errors import RecipeError
from octavo.models import Decoder
from octavo.nn import Linear, Router, SparseMoE
from octavo.numerics import Numerics, get_recipe
from octavo.numerics.contract import EXPERIMENT_KV_SCALES, KVScales, named_kv_scales

if TYPE_CHECKING:  # which imports this file
    from octavo.rl.config import RLConfig

Precision = Literal["", "bf16", "linears", "linears+kv", "linears+kv+attention", "end_to_end"]


def _read_kv_scales(value: Any, check: ValidatorFunctionWrapHandler) -> Any:
    name = named_kv_scales(value) if isinstance(value, str) else value
    return name if name in EXPERIMENT_KV_SCALES else check(name)


KVScalesKey = Annotated[KVScales, WrapValidator(_read_kv_scales)]


@dataclasses.dataclass(frozen=True)
class Level:
    """What a level turns to FP8.

    Attributes:
        linears: of the rollout.
        kv: of the rollout.
        attention: of the rollout.
        training: the trainer's linears, backward included.
    """

    linears: bool = True
    kv: bool = True
    attention: bool = False
    training: bool = False


LEVELS: dict[str, Level] = {
    "bf16": Level(linears=False, kv=False),
    "linears": Level(kv=False),
    "linears+kv": Level(),
    "linears+kv+attention": Level(attention=True),
    "end_to_end": Level(training=True),
}


def both_numerics(config: "RLConfig") -> tuple[Numerics, Numerics]:
    """The numerics of (trainer, rollout).

    Exact mode has one numerics on both sides. Its forward is the rollout's; below "end_to_end", where training is to
    stay in bf16, the backward's GEMMs run in bf16.

    Raises:
        RecipeError: no such recipe, or numerics that contradict each other.
    """
    level, own, rollout_keys = config.precision, config.trainer, config.rollout
    fields = {"fp8_format": own.fp8_format, "backward": own.backward}
    given: dict[str, Any] = {name: value for name, value in fields.items() if value is not None}
    if own.recipe == "delayed":
        given["update_every"] = "step"  # the micro-batches of a minibatch share scales
    kv: str = rollout_keys.kv_cache_dtype
    attention: str = rollout_keys.attention_dtype
    if not level:
        trainer, rollout = get_recipe(own.recipe, **given), rollout_keys.recipe or own.recipe
    else:
        wanted = LEVELS[level]
        if wanted.training:
            trainer = get_recipe(own.recipe, **given)
        elif wanted.linears and config.exact:
            trainer = get_recipe(own.recipe, **{**given, "backward": "bf16"})
        else:
            trainer = get_recipe("bf16")
        rollout = (rollout_keys.recipe or own.recipe) if wanted.linears else "bf16"
        kv = "fp8" if wanted.kv else "bf16"
        if not wanted.training:  # end_to_end leaves attention to its own key
            attention = "fp8" if wanted.attention else "bf16"
    cache = (kv, config.exact, attention, rollout_keys.kv_scales)
    if config.exact:
        both = Numerics(trainer, *cache)
        return both, both
    return Numerics(trainer), Numerics(get_recipe(rollout), *cache)


def contradictions(config: "RLConfig") -> list[str]:
    """Keys that a config sets to something else than its level does, each with the remedy."""
    level, trainer, rollout = config.precision, config.trainer, config.rollout
    if not level:
        return []
    given = {f"{name}.{key}" for name in ("trainer", "rollout") for key in getattr(config, name).model_fields_set}
    wanted, found = LEVELS[level], []
    kv, attention = "fp8" if wanted.kv else "bf16", "fp8" if wanted.attention else "bf16"
    values: list[tuple[str, str, str]] = [("rollout.kv_cache_dtype", rollout.kv_cache_dtype, kv)]
    if not wanted.training:  # end_to_end leaves attention to its own key
        values.append(("rollout.attention_dtype", rollout.attention_dtype, attention))
    for key, value, meant in values:
        if key in given and value != meant:
            said = f"precision = {level!r} means {key} = {meant!r}, got {value!r}"
            found.append(f"{said}; leave one of the two out, or make them agree")
    for key, value in (("trainer.recipe", trainer.recipe), ("rollout.recipe", rollout.recipe)):
        if key in given and value and get_recipe(value).is_fp8 != wanted.linears:
            none = "no FP8 linears; leave the recipe out, or give 'bf16'"
            meant = "FP8 linears; name an FP8 recipe" if wanted.linears else none
            found.append(f"precision = {level!r} with {key} = {value!r}: the level means {meant}")
    if not wanted.training and trainer.backward == "fp8":
        found.append(f"precision = {level!r} trains in bf16, got trainer.backward = 'fp8'; use 'end_to_end'")
    return found


def audit_precision(model: Decoder, what: str) -> None:
    """Hold each layer to the model's numerics: every linear but lm_head in the recipe, routers in high precision.

    Args:
        what: "trainer" or "sampler", for the message.
    Raises:
        RecipeError: naming the layers that were skipped, the routers that were quantized, or linears in FP8 where none
            should be.
    """
    recipe = model.numerics.recipe
    modules = list(model.named_modules())
    routers = [f"{name}.gate" for name, module in modules if isinstance(module, SparseMoE) and _is_coded(module.gate)]
    if routers:
        raise RecipeError(
            f"the {what}'s router {routers[0]} is quantized ({len(routers)} in all): rounding its logits sends tokens "
            "to other experts; leave routers in high precision"
        )
    linears = {name: m for name, m in modules if isinstance(m, Linear) and name != "lm_head"}
    if not recipe.is_fp8:
        coded = [name for name, linear in linears.items() if linear.recipe is not None and linear.recipe.is_fp8]
        if coded:
            raise RecipeError(f"the {what} is in {recipe.name!r}, but {_listed(coded)} run in FP8; call set_numerics")
        return
    skipped = [name for name, linear in linears.items() if linear.recipe != recipe]
    if skipped:
        raise RecipeError(
            f"the {what} is in {recipe.name!r}, but {_listed(skipped)} do not run in it: skipped layers; call "
            "set_numerics, which converts every linear"
        )


def _is_coded(module: object) -> bool:
    """Whether what stands in a router's place computes with codes: only octavo's Router is sure not to."""
    return not isinstance(module, Router) or module.weight.dtype.itemsize < 2


def _listed(names: list[str]) -> str:
    return ", ".join(names[:3]) + (f" and {len(names) - 3} others" if len(names) > 3 else "")
