"""What recipe Megatron's --fp8-* flags name, as a TransformerConfig has them, and which of its settings are refused."""

from typing import Any

from megatron.core.fp8_utils import HAVE_TE

from octavo.errors import ConfigError
from octavo.numerics.recipe import Recipe, get_recipe

_DELAYED = {"fp8_margin": 0, "fp8_amax_history_len": 1, "fp8_amax_compute_algo": "most_recent"}  # Megatron's defaults
_REFUSED = {  # fields of TransformerConfig that must be unset
    "fp8_param": "parameters stay in bf16; leave out --fp8-param-gather",
    "fp8_dot_product_attention": "attention is trained in bf16; leave out --fp8-dot-product-attention",
    "fp8_multi_head_attention": "attention is trained in bf16; leave out --fp8-multi-head-attention",
    "activation_func_fp8_input_store": "activations are stored as Megatron has them; leave the flag out",
    "fp4": "one FP8 backend at a time, and --fp4-format is TransformerEngine's; leave it out",
    "use_kitchen": "a model has one FP8 backend, got octavo's and Kitchen (--use-kitchen); leave one of the two out",
    "gradient_accumulation_fusion": "Apex's kernel adds bf16 products; give --no-gradient-accumulation-fusion",
}


def recipe_of(config: Any) -> Recipe | None:
    """The recipe that --fp8-format and the flags beside it mean; None without --fp8-format.

    delayed has Megatron's defaults then: a history of one step, "most_recent".

    Args:
        config: a TransformerConfig.
    Raises:
        ConfigError: a recipe that octavo does not have, or a flag that would have no effect.
    """
    if not config.fp8:
        return None
    name = str(getattr(config.fp8_recipe, "value", config.fp8_recipe))
    if name == "custom":
        raise ConfigError(
            "--fp8-recipe custom makes TransformerEngine's quantizers; leave --fp8-format out and give a recipe of "
            "octavo's: octavo.integrations.megatron.gpt_layer_spec(recipe)"
        )
    high = () if config.fp8_wgrad else ("grad_weight",)
    if name == "delayed":
        own = {field.removeprefix("fp8_"): getattr(config, field) for field in _DELAYED}
        return get_recipe(name, fp8_format=config.fp8, high_precision_gemms=high, **own)
    if unused := [field for field, default in _DELAYED.items() if getattr(config, field) != default]:
        raise ConfigError(f"{_flag(unused[0])} has no effect with --fp8-recipe {name}: it is delayed scaling's")
    if name == "mxfp8":
        return get_recipe(name, fp8_format=config.fp8)
    return get_recipe(name, fp8_format=config.fp8, high_precision_gemms=high)


def choose_recipe(config: Any, recipe: Recipe | str | None) -> Recipe | None:
    """The recipe that was given, or that of the flags.

    Raises:
        ConfigError: both were given, or see recipe_of and check_config; scales that change once an optimizer step.
    """
    check_config(config)
    if recipe is None:
        return recipe_of(config)
    if config.fp8:
        raise ConfigError(
            f"the spec has the recipe {get_recipe(recipe).name!r}, and --fp8-format {config.fp8} names another; give "
            "one of the two"
        )
    if get_recipe(recipe).updates_at_steps:
        raise ConfigError('update_every="step" needs an optimizer of the model\'s own parameters; use "forward"')
    return get_recipe(recipe)


def check_config(config: Any) -> None:
    """Refuse settings that the layers cannot keep.

    Raises:
        ConfigError: one is on.
    """
    for field, reason in _REFUSED.items():
        if getattr(config, field, None):
            raise ConfigError(f"{field}={getattr(config, field)!r} is refused in octavo's layers: {reason}")
    if config.fp8 and config.recompute_granularity == "full" and not HAVE_TE:
        raise ConfigError(
            "with --fp8-format Megatron recomputes by TransformerEngine's checkpoint, which is not installed; leave "
            "--fp8-format out and name the recipe in octavo.integrations.megatron.gpt_layer_spec(recipe)"
        )


def _flag(field: str) -> str:
    return "--" + field.replace("_", "-")
