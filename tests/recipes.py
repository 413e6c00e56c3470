"""The recipes that tests go through: one that is added to octavo.numerics.recipe is tested from then on."""

from octavo.numerics.recipe import EMULATED_RECIPES, RECIPE_NAMES

FP8_RECIPES = [name for name in RECIPE_NAMES if name not in ("bf16", *EMULATED_RECIPES)]
