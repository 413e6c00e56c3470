"""The autocast context: which recipe linears use that have none of their own. The only global state of octavo."""

import contextlib
import contextvars
from collections.abc import Iterator

from octavo.errors import RecipeError
from octavo.numerics.recipe import Recipe, get_recipe

HIGH_PRECISION = get_recipe("bf16")
# None outside of any autocast; HIGH_PRECISION with force=True under autocast(enabled=False)
_active: contextvars.ContextVar[tuple[bool, Recipe] | None] = contextvars.ContextVar("octavo_autocast", default=None)


@contextlib.contextmanager
def autocast(enabled: bool = True, recipe: Recipe | str | None = None) -> Iterator[None]:
    """Run octavo's linears under a recipe.

    A linear with a recipe of its own (set by convert or by the model's numerics) keeps it; enabled=False computes every
    linear in high precision, such ones included. Contexts nest; the innermost wins.

    Args:
        enabled: False turns FP8 off inside.
        recipe: a Recipe or its name; None is "blockwise".
    Raises:
        RecipeError: for an unknown recipe.
    """
    if not isinstance(enabled, bool):
        raise RecipeError(f"autocast(enabled=...) must be True or False, got {enabled!r}; pass a recipe as recipe=...")
    token = _active.set((enabled, get_recipe("blockwise" if recipe is None else recipe)))
    try:
        yield
    finally:
        _active.reset(token)


def effective_recipe(own: Recipe | None) -> Recipe:
    """The recipe a linear computes with here and now, given its own."""
    active = _active.get()
    if active is None:
        return own or HIGH_PRECISION
    enabled, recipe = active
    return (own or recipe) if enabled else HIGH_PRECISION
