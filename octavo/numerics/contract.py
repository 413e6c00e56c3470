"""Numerics: recipe, KV cache, attention and exactness as one frozen object, hashed into checkpoints and cache keys."""

import dataclasses
import hashlib
import json
import warnings
from typing import Any, Literal, get_args

from octavo.errors import RecipeError
from octavo.numerics.recipe import Recipe, get_recipe

KV_CACHE_DTYPES = ("bf16", "fp8")
ATTENTION_DTYPES = ("bf16", "fp8")
KVScales = Literal["per_token_head", "engine", "trainer"]
KV_SCALES: tuple[str, ...] = get_args(KVScales)
# What bench.rl_matrix compares those with: of the first batch of all; 1, or whatever they are set to. No user's choice.
EXPERIMENT_KV_SCALES = ("_calibrated_once", "_fixed")
_FORMER_KV_SCALES = dict(zip(("calibrated_once", "one"), EXPERIMENT_KV_SCALES, strict=True))


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What decides the bits of a model's forward pass.

    Args:
        recipe: the linears' recipe.
        kv_cache_dtype: "bf16" (the model's own dtype) or "fp8" (E4M3).
        exact: the trainer's logprob of a token equals the sampler's, bit for bit.
        attention_dtype: what attention multiplies in. "bf16": queries and probabilities in high precision. "fp8": both
            products take E4M3 operands, queries with a scale a token and head, probabilities with one a row and 64
            keys; needs kv_cache_dtype="fp8".
        kv_scales: of an FP8 cache. "per_token_head": fp32, one a token and kv head, which nothing can outdate. The
            others are one of K and one of V a layer: "engine" (made by the first batch of each weight version) or
            "trainer" (handed over with the weights).

    Raises:
        RecipeError: for an unknown KV format, attention dtype or kind of scales, FP8 attention or such scales over
            another cache, an exact that is no bool, or exact with a recipe that is emulated or whose activation scales
            see other tokens.
    """

    recipe: Recipe = dataclasses.field(default_factory=lambda: get_recipe("bf16"))
    kv_cache_dtype: str = "bf16"
    exact: bool = False
    attention_dtype: str = "bf16"
    kv_scales: str = "per_token_head"

    def __post_init__(self) -> None:
        if self.kv_cache_dtype not in KV_CACHE_DTYPES:
            raise RecipeError(f"kv_cache_dtype must be one of {KV_CACHE_DTYPES}, got {self.kv_cache_dtype!r}")
        if self.attention_dtype not in ATTENTION_DTYPES:
            raise RecipeError(f"attention_dtype must be one of {ATTENTION_DTYPES}, got {self.attention_dtype!r}")
        if self.attention_dtype == "fp8" and self.kv_cache_dtype != "fp8":
            raise RecipeError(
                "attention_dtype='fp8' multiplies the cache's codes, so it needs kv_cache_dtype='fp8', got "
                f"{self.kv_cache_dtype!r}"
            )
        if self.kv_scales not in KV_SCALES + EXPERIMENT_KV_SCALES:
            raise RecipeError(f"kv_scales must be one of {KV_SCALES}, got {self.kv_scales!r}")
        if self.has_known_kv_scales and self.kv_cache_dtype != "fp8":
            raise RecipeError(
                f"kv_scales={self.kv_scales!r} scales an FP8 cache, got kv_cache_dtype={self.kv_cache_dtype!r}; set "
                "kv_cache_dtype='fp8', or leave kv_scales out"
            )
        check_exact(self.exact, self.recipe)

    @property
    def has_known_kv_scales(self) -> bool:
        """Whether the cache has one scale of K and one of V a layer."""
        return self.kv_scales != "per_token_head"

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = {"recipe": self.recipe.as_dict(), "kv_cache_dtype": self.kv_cache_dtype, "exact": self.exact}
        # absent by default: the fingerprints of older checkpoints stay true
        optional = {"attention_dtype": (self.attention_dtype, "bf16"), "kv_scales": (self.kv_scales, "per_token_head")}
        return fields | {name: value for name, (value, default) in optional.items() if value != default}

    def fingerprint(self) -> str:
        """16 hex digits, equal for equal numerics in every process."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]


def named_kv_scales(name: str) -> str:
    """The kv_scales that a command or a TOML file names; former names are taken for one release, with a warning."""
    if name in _FORMER_KV_SCALES:
        warnings.warn(
            f"kv_scales = {name!r} leaves octavo with the next release; use one of {', '.join(KV_SCALES)}",
            DeprecationWarning,
            stacklevel=2,
        )
    return _FORMER_KV_SCALES.get(name, name)


def check_exact(exact: bool, recipe: Recipe) -> None:
    """Refuse an exact that is no bool, and exact mode under a recipe that has none.

    Raises:
        RecipeError: exact is no bool, or the recipe has no exact mode.
    """
    if not isinstance(exact, bool):
        raise RecipeError(f"exact must be True or False, got {exact!r}")
    if not exact or recipe.is_row_local:
        return
    if recipe.is_emulated:
        raise RecipeError(
            f"exact=True has no path for recipe {recipe.name!r}, which is emulated: its operands are decoded, and "
            "multiplied in high precision; use 'rowwise' or 'blockwise', without fake_quant"
        )
    raise RecipeError(
        f"exact=True needs activation scales of one token each, but recipe {recipe.name!r} shares a scale "
        "between tokens, so a request's bits would depend on its neighbours; use 'rowwise' or 'blockwise'"
    )
