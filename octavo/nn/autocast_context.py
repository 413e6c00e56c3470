"""The autocast context: which recipe linears use that have none of their own. The only global state of octavo."""

import dataclasses
import threading

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


ACTIVE = _Active()  # set by octavo.nn.autocast_scope alone


def active_context() -> AutocastContext | None:
    """The innermost autocast, or None outside of any: for autocast_scope.restore_context."""
    return ACTIVE.context


def effective_recipe(own: Recipe | None) -> Recipe:
    """The recipe a linear computes with here and now, given its own."""
    active = ACTIVE.context
    if active is None:
        return own or HIGH_PRECISION
    return (own or active.recipe) if active.enabled else HIGH_PRECISION
