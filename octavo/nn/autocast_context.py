"""The autocast context: which recipe linears use that have none of their own. The only global state of octavo."""

import dataclasses
import threading
from typing import Any

from octavo.numerics.recipe import Recipe, get_recipe

HIGH_PRECISION = get_recipe("bf16")


@dataclasses.dataclass(frozen=True)
class AutocastContext:
    """What an autocast asks for.

    Attributes:
        enabled: whether FP8 is on.
        skipped: ids of the parameters that stay out of it.
        amax_reduction_group: process group of delayed scaling's amaxes; None for each linear's own, else all ranks.
    """

    enabled: bool
    recipe: Recipe
    skipped: frozenset[int] = frozenset()
    amax_reduction_group: Any = None


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
