"""Recipes by name, their fields and refusals, and Numerics: fingerprints and what exact mode refuses."""

import dataclasses
from typing import Any

import pytest
import torch

from octavo.errors import RecipeError
from octavo.numerics.contract import Numerics
from octavo.numerics.emulated_config import Mxfp8Config, Nvfp4Config
from octavo.numerics.formats import Format
from octavo.numerics.recipe import (
    EMULATED_RECIPES,
    GEMMS,
    RECIPE_NAMES,
    DelayedConfig,
    DelayedScaling,
    Recipe,
    get_recipe,
)
from octavo.numerics.scaling import Scaling
from tests.assertions import assert_raises
from tests.recipes import FP8_RECIPES

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
DEFAULT_FORMATS = {
    "delayed": Format.HYBRID,
    "tensorwise": Format.HYBRID,
    "rowwise": Format.E4M3,
    "blockwise": Format.E4M3,
}


def operands(recipe: Recipe) -> tuple[Scaling, Scaling, Scaling]:
    assert recipe.input is not None
    assert recipe.weight is not None
    assert recipe.grad_output is not None
    return recipe.input, recipe.weight, recipe.grad_output


# recipes


def test_bf16_quantizes_nothing() -> None:
    recipe = get_recipe("bf16")
    assert (recipe.input, recipe.weight, recipe.grad_output, recipe.delayed) == (None, None, None, None)
    assert not recipe.is_fp8
    assert not recipe.has_fp8_backward
    assert not recipe.has_state


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_overrides(name: str) -> None:
    for fmt in ("e4m3", "E4M3", Format.E4M3):
        assert [scaling.dtype for scaling in operands(get_recipe(name, fp8_format=fmt))] == [E4M3] * 3
    hybrid = get_recipe(name, fp8_format="hybrid")
    assert [scaling.dtype for scaling in operands(hybrid)] == [E4M3, E4M3, E5M2]
    assert get_recipe(name, fp8_format=DEFAULT_FORMATS[name]) == get_recipe(name)
    high_precision = get_recipe(name, backward="bf16")
    assert high_precision.grad_output is None
    assert high_precision.input == get_recipe(name).input
    assert not high_precision.has_fp8_backward
    e8m0 = get_recipe(name, scale_format="e8m0")
    assert {scaling.scale_format for scaling in operands(e8m0)} == {"e8m0"}
    # a floor erases small gradients, so grad_output never has one
    floored = get_recipe(name, amax_floor=1e-4)
    assert [scaling.amax_floor for scaling in operands(floored)] == [1e-4, 1e-4, 0.0]


@pytest.mark.parametrize("name", FP8_RECIPES)
def test_switches(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.fast_accum == ("output",)
    assert recipe.saved_activations == Scaling.block_1x128()
    assert all(recipe.in_fp8(gemm) for gemm in GEMMS)
    assert get_recipe(name, saved_activations="bf16").saved_activations is None
    some = get_recipe(name, high_precision_gemms=["grad_weight"], fast_accum="grad_input")
    assert [some.in_fp8(gemm) for gemm in GEMMS] == [True, True, False]
    assert some.fast_accum == ("grad_input",)
    assert not any(get_recipe(name, fake_quant=True).in_fp8(gemm) for gemm in GEMMS)
    for bad in ({"fast_accum": "wgrad"}, {"high_precision_gemms": ["fprop"]}, {"fake_quant": 1}):
        assert_raises(RecipeError, next(iter(bad)), get_recipe, name, **bad)


def test_the_weight_gradients_operand_of_blockwise() -> None:
    assert get_recipe("blockwise").wgrad_input == Scaling.block_128x128()
    assert get_recipe("blockwise", input_for_grad_weight="block_1x128").wgrad_input == Scaling.block_1x128()
    assert get_recipe("rowwise").wgrad_input == Scaling.per_row()
    assert_raises(RecipeError, "input_for_grad_weight", get_recipe, "blockwise", input_for_grad_weight="per_row")


@pytest.mark.parametrize("name", EMULATED_RECIPES)
def test_emulated_recipes(name: str) -> None:
    recipe = get_recipe(name)
    assert recipe.is_fp8 and recipe.is_emulated and not recipe.is_row_local
    assert not any(recipe.in_fp8(gemm) for gemm in GEMMS)
    assert_raises(RecipeError, "no field 'amax_floor'", get_recipe, name, amax_floor=1.0)


def test_switches_of_emulated_recipes() -> None:
    assert get_recipe("mxfp8").emulation == Mxfp8Config("up")
    assert [scaling.dtype for scaling in operands(get_recipe("mxfp8"))] == [E4M3] * 3
    assert get_recipe("mxfp8", scale_rounding="down").emulation == Mxfp8Config("down")
    assert get_recipe("nvfp4").emulation == Nvfp4Config(True, True, True)
    assert Recipe("mine", emulated="nvfp4").emulation == Nvfp4Config()
    for name in ("stochastic_rounding", "random_hadamard", "square_weight_blocks"):
        recipe = get_recipe("nvfp4", **{name: False})
        assert recipe.emulation == dataclasses.replace(Nvfp4Config(), **{name: False})
        assert recipe.as_dict()["emulation"][name] is False
        assert Numerics(recipe).fingerprint() != Numerics(get_recipe("nvfp4")).fingerprint()
        assert_raises(RecipeError, f"{name} must be True or False, got 'no'", get_recipe, "nvfp4", **{name: "no"})
    assert_raises(RecipeError, "scale_rounding must be 'up'", get_recipe, "mxfp8", scale_rounding="rceil")
    assert_raises(RecipeError, "did you mean 'stochastic_rounding'", get_recipe, "nvfp4", stochastic_round=False)
    assert_raises(RecipeError, "'mxfp8' has no field 'random_hadamard'", get_recipe, "mxfp8", random_hadamard=True)
    with pytest.raises(RecipeError, match="emulation must be a Nvfp4Config"):
        Recipe("mine", emulated="nvfp4", emulation=Mxfp8Config())
    with pytest.raises(RecipeError, match="emulation must be None where nothing is emulated"):
        dataclasses.replace(get_recipe("blockwise"), emulation=Mxfp8Config())


def test_a_recipe_passes_through() -> None:
    recipe = get_recipe("rowwise")
    assert get_recipe(recipe) is recipe
    assert_raises(RecipeError, r"takes no overrides, got \['backward'\]", get_recipe, recipe, backward="bf16")


def test_delayed_scaling_has_transformer_engines_defaults() -> None:
    recipe = DelayedScaling()
    assert recipe == get_recipe("delayed")
    assert recipe.delayed == DelayedConfig(0, 1024, "max", None)
    assert recipe.fp8_format is Format.HYBRID
    other = DelayedScaling(margin=2, fp8_format=Format.E4M3, amax_history_len=31, amax_compute_algo="most_recent")
    assert other.delayed == DelayedConfig(2, 31, "most_recent")
    assert other.fp8_format is Format.E4M3


@pytest.mark.parametrize(
    ("name", "overrides", "text"),
    [
        ("blockwize", {}, "unknown recipe 'blockwize'; known: bf16, delayed, .*; did you mean 'blockwise'"),
        ("FP8", {}, "unknown recipe 'FP8'.* for FP8 take 'blockwise'"),
        (None, {}, "unknown recipe None"),
        ("rowwise", {"backwards": "bf16"}, "has no field 'backwards'; fields: .*; did you mean 'backward'"),
        ("rowwise", {"margin": 1}, "recipe 'rowwise' has no field 'margin'"),
        ("delayed", {"amax_history": 3}, "did you mean 'amax_history_len'"),
        ("delayed", {"override_linear_precision": ()}, "has no field 'override_linear_precision'"),
        ("bf16", {"backward": "bf16"}, "recipe 'bf16' has no field 'backward'; fields: none"),
        ("rowwise", {"backward": "fp16"}, "backward must be 'fp8' or 'bf16', got 'fp16'"),
        ("rowwise", {"fp8_format": "e3m4"}, "fp8_format must be a Format, 'e4m3' or 'hybrid', got 'e3m4'"),
        ("rowwise", {"fp8_format": "e5m2"}, "E5M2 has too few mantissa bits"),
        ("rowwise", {"scale_format": "bf16"}, "scale_format must be one of"),
        ("rowwise", {"amax_floor": -1.0}, "amax_floor must be a finite number >= 0"),
        ("delayed", {"amax_history_len": 0}, "amax_history_len must be an integer >= 1, got 0"),
        ("delayed", {"amax_history_len": 1.5}, "amax_history_len must be an integer >= 1, got 1.5"),
        ("delayed", {"amax_compute_algo": "mean"}, "must be 'max', 'most_recent' or a callable, got 'mean'"),
    ],
    ids=lambda value: str(value)[:24],
)
def test_what_get_recipe_refuses(name: Any, overrides: dict[str, Any], text: str) -> None:
    assert_raises(RecipeError, text, get_recipe, name, **overrides)


def test_what_a_recipe_refuses() -> None:
    assert_raises(RecipeError, "input and weight are quantized together or not at all", Recipe, "half", input=Scaling())
    assert_raises(RecipeError, "grad_output needs a quantized forward", Recipe, "backward", grad_output=Scaling())
    with pytest.raises(dataclasses.FrozenInstanceError):
        get_recipe("bf16").name = "other"  # type: ignore[misc]


# numerics


@pytest.mark.parametrize("name", ["delayed", "tensorwise"])
def test_exact_refuses_scales_that_tokens_share(name: str) -> None:
    with pytest.raises(RecipeError, match=rf"exact=True .*'{name}' shares a scale between tokens.*'rowwise' or"):
        Numerics(get_recipe(name), exact=True)
    Numerics(get_recipe(name))


@pytest.mark.parametrize(
    "recipe", [*map(get_recipe, EMULATED_RECIPES), get_recipe("rowwise", fake_quant=True)], ids=lambda r: r.name
)
def test_exact_refuses_emulated_recipes_for_what_they_are(recipe: Recipe) -> None:
    with pytest.raises(RecipeError, match=rf"no path for recipe '{recipe.name}', which is emulated.*use 'rowwise' or"):
        Numerics(recipe, exact=True)


@pytest.mark.parametrize("exact", ["no", 1, None])
def test_exact_is_a_bool(exact: object) -> None:
    assert_raises(RecipeError, f"exact must be True or False, got {exact!r}", Numerics, exact=exact)


@pytest.mark.parametrize("name", ["bf16", "rowwise", "blockwise"])
def test_exact_takes_row_local_recipes(name: str) -> None:
    assert Numerics(get_recipe(name), "fp8", exact=True).exact


def test_unknown_kv_format_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"kv_cache_dtype must be one of \('bf16', 'fp8'\), got 'int8'"):
        Numerics(kv_cache_dtype="int8")


def test_fp8_attention_needs_fp8_keys_and_values() -> None:
    assert Numerics(kv_cache_dtype="fp8", attention_dtype="fp8").attention_dtype == "fp8"
    with pytest.raises(RecipeError, match=r"attention_dtype='fp8' multiplies the cache's codes.*got 'bf16'"):
        Numerics(attention_dtype="fp8")
    with pytest.raises(RecipeError, match=r"attention_dtype must be one of \('bf16', 'fp8'\), got 'e4m3'"):
        Numerics(kv_cache_dtype="fp8", attention_dtype="e4m3")


def test_a_field_at_its_default_changes_no_older_fingerprint() -> None:
    """They stand in checkpoints that were written before attention_dtype existed."""
    assert Numerics(get_recipe("blockwise"), "fp8", True).fingerprint() == "ad5c7fece9b515e5"
    fp8 = Numerics(get_recipe("blockwise"), "fp8", True, "fp8")
    assert fp8.as_dict()["attention_dtype"] == "fp8"
    assert "attention_dtype" not in Numerics().as_dict()


def scale_by_half(amax: torch.Tensor) -> torch.Tensor:
    return amax[0] / 2


def all_numerics() -> list[Numerics]:
    """Numerics that all differ."""
    recipes = [get_recipe(name) for name in RECIPE_NAMES]
    for name in FP8_RECIPES:
        other = "hybrid" if DEFAULT_FORMATS[name] is Format.E4M3 else "e4m3"
        recipes += [get_recipe(name, fp8_format=other), get_recipe(name, backward="bf16")]
        recipes += [get_recipe(name, scale_format="e8m0"), get_recipe(name, amax_floor=1e-12)]
    recipes += [DelayedScaling(margin=1), DelayedScaling(amax_history_len=16)]
    recipes += [DelayedScaling(amax_compute_algo=algo) for algo in ("most_recent", scale_by_half)]
    made = [Numerics(recipe, kv) for recipe in recipes for kv in ("bf16", "fp8")]
    made += [Numerics(get_recipe(name), "fp8", exact, "fp8") for name in ("bf16", "rowwise") for exact in (False, True)]
    return made + [Numerics(get_recipe(name), kv, True) for name in ("bf16", "rowwise") for kv in ("bf16", "fp8")]


def test_fingerprints_tell_numerics_apart() -> None:
    fingerprints = [numerics.fingerprint() for numerics in all_numerics()]
    assert len(set(fingerprints)) == len(fingerprints)
    assert fingerprints == [numerics.fingerprint() for numerics in all_numerics()]
    assert all(len(fingerprint) == 16 and int(fingerprint, 16) >= 0 for fingerprint in fingerprints)


def test_fingerprints_are_equal_in_every_process() -> None:
    """Checkpoints hold them, and every field of a recipe is in them; each test process has another hash seed."""
    found = {name: Numerics(get_recipe(name), "fp8").fingerprint() for name in RECIPE_NAMES}
    assert found == {
        "bf16": "358f5a3157699b4b",
        "delayed": "9f6c11e1ade87298",
        "tensorwise": "657237a3e2ea5326",
        "rowwise": "a277b64e164983d3",
        "blockwise": "2631ab052ba967b8",
        "mxfp8": "5a5a16db52608e94",
        "nvfp4": "8c7df57db225cff4",
    }


def test_as_dict_is_plain() -> None:
    recipe = DelayedScaling(amax_compute_algo=scale_by_half)
    plain = Numerics(recipe, "fp8").as_dict()
    assert plain["kv_cache_dtype"] == "fp8"
    scaling = {"dtype": "float8_e4m3fn", "block_size": [-1, -1], "scale_format": "fp32", "amax_floor": 0.0}
    assert plain["recipe"]["input"] == scaling
    assert plain["recipe"]["fp8_format"] == "HYBRID"
    assert plain["recipe"]["delayed"]["amax_compute_algo"].endswith(".scale_by_half")
