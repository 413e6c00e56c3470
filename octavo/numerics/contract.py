"""Numerics: recipe, KV cache, attention and exactness as one frozen object, hashed into checkpoints and cache keys."""

import dataclasses
import hashlib
import json
from typing import Any

from octavo.errors import RecipeError
from octavo.numerics.recipe import Recipe, get_recipe

KV_CACHE_DTYPES = ("bf16", "fp8")
ATTENTION_DTYPES = ("bf16", "fp8")


@dataclasses.dataclass(frozen=True)
class Numerics:
    """What decides the bits of a model's forward pass.

    Args:
        recipe: the linears' recipe.
        kv_cache_dtype: "bf16" (the model's own dtype) or "fp8" (E4M3, one fp32 scale per token and kv head).
        exact: the trainer's logprob of a token equals the sampler's, bit for bit.
        attention_dtype: what attention multiplies in. "bf16": queries and probabilities in high precision. "fp8": both
            products take E4M3 operands, queries with a scale a token and head, probabilities with one a row and 64
            keys; needs kv_cache_dtype="fp8".

    Raises:
        RecipeError: for an unknown KV format or attention dtype, FP8 attention over another cache, or exact with a
            recipe whose activation scales see other tokens.
    """

    recipe: Recipe = dataclasses.field(default_factory=lambda: get_recipe("bf16"))
    kv_cache_dtype: str = "bf16"
    exact: bool = False
    attention_dtype: str = "bf16"

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
        if self.exact and not self.recipe.is_row_local:
            raise RecipeError(
                f"exact=True needs activation scales of one token each, but recipe {self.recipe.name!r} shares a scale "
                "between tokens, so a request's bits would depend on its neighbours; use 'rowwise' or 'blockwise'"
            )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        fields = {"recipe": self.recipe.as_dict(), "kv_cache_dtype": self.kv_cache_dtype, "exact": self.exact}
        # absent by default: the fingerprints of older checkpoints stay true
        return fields if self.attention_dtype == "bf16" else fields | {"attention_dtype": self.attention_dtype}

    def fingerprint(self) -> str:
        """16 hex digits, equal for equal numerics in every process."""
        text = json.dumps(self.as_dict(), sort_keys=True)
        return hashlib.sha256(text.encode()).hexdigest()[:16]
