"""The autocast context: which recipe linears use that have none of their own. The only global state of octavo."""

import contextlib
import dataclasses
import threading
from collections.abc import Iterable, Iterator

from torch import nn

from octavo.errors import RecipeError
from octavo.numerics.recipe import Recipe, get_recipe

HIGH_PRECISION = get_recipe("bf16")


@dataclasses.dataclass(frozen=True)
class AutocastContext:
    """What an autocast asks for: whether FP8 is on, the recipe, and the ids of parameters that stay out of it."""

    enabled: bool
    recipe: Recipe
    skipped: frozenset[int] = frozenset()


class _Active(threading.local):
    """This thread's innermost autocast; None outside of any. torch.compile guards on it."""

    context: AutocastContext | None = None


_active = _Active()


@contextlib.contextmanager
def autocast(
    enabled: bool = True, recipe: Recipe | str | None = None, *, skip: Iterable[nn.Module] = ()
) -> Iterator[None]:
    """Run linears under a recipe: octavo's, and every torch.nn.Linear (any F.linear over a Parameter).

    A linear with a recipe of its own (set by convert or by the model's numerics) keeps it; enabled=False computes every
    linear in high precision, such ones included. Contexts nest; the innermost wins. Delayed scaling keeps its
    state with the module that owns the weight, out of its state dict: octavo.nn.fp8_state_dict saves it. A
    float64 input of torch's linears stays in float64; a warning says so once.

    Args:
        enabled: False turns FP8 off inside.
        recipe: a Recipe or its name; None is "blockwise".
        skip: modules with torch's linears that stay in high precision, such as a model's lm_head.
    Raises:
        RecipeError: for an unknown recipe. BackendError: at the first training forward on a GPU, under a recipe whose
            backward would be decoded there (blockwise with fp8_format="hybrid").
    """
    if not isinstance(enabled, bool):
        raise RecipeError(f"autocast(enabled=...) must be True or False, got {enabled!r}; pass a recipe as recipe=...")
    skipped = frozenset(id(parameter) for module in skip for parameter in module.parameters())
    with restore_context(AutocastContext(enabled, get_recipe("blockwise" if recipe is None else recipe), skipped)):
        yield


def active_context() -> AutocastContext | None:
    """The innermost autocast, or None outside of any: for restore_context."""
    return _active.context


@contextlib.contextmanager
def restore_context(context: AutocastContext | None) -> Iterator[None]:
    """Compute under what active_context returned elsewhere, on another thread perhaps."""
    from octavo.nn.plain_linears import PlainLinears, untraced  # which compute as linears do, and those ask here

    if context is not None and context.recipe.has_state:
        untraced()
    outer = _active.context
    _active.context = context
    try:
        with PlainLinears() if outer is None and context is not None else contextlib.nullcontext():
            yield
    finally:
        _active.context = outer


def effective_recipe(own: Recipe | None) -> Recipe:
    """The recipe a linear computes with here and now, given its own."""
    active = _active.context
    if active is None:
        return own or HIGH_PRECISION
    return (own or active.recipe) if active.enabled else HIGH_PRECISION
