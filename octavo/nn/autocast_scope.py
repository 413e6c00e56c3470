"""octavo.autocast: sets the context that linears ask (octavo.nn.autocast_context), and watches torch's own linears."""

import contextlib
from collections.abc import Iterable, Iterator
from typing import Any

from torch import nn

from octavo.deprecation import former_keywords
from octavo.errors import RecipeError
from octavo.nn.autocast_context import ACTIVE, AutocastContext
from octavo.numerics.recipe import Recipe, get_recipe


@former_keywords(skip="ignore")
@contextlib.contextmanager
def autocast(
    enabled: bool = True,
    recipe: Recipe | str | None = None,
    *,
    ignore: Iterable[nn.Module] = (),
    amax_reduction_group: Any = None,
) -> Iterator[None]:
    """Run linears under a recipe: octavo's, and every torch.nn.Linear (any F.linear over a Parameter).

    A linear with a recipe of its own (set by convert or by the model's numerics) keeps it; enabled=False computes every
    linear in high precision, such ones included. Contexts nest; the innermost wins. Delayed scaling keeps its
    state with the module that owns the weight, out of its state dict: octavo.nn.fp8_state_dict saves it. A
    float64 input of torch's linears stays in float64; a warning says so once.

    Args:
        enabled: False turns FP8 off inside.
        recipe: a Recipe or its name; None is "blockwise".
        ignore: modules with torch's linears that stay in high precision, such as a model's lm_head.
        amax_reduction_group: torch.distributed process group whose ranks agree on delayed scaling's amaxes; None for
            the linear's own (octavo.nn.set_amax_reduction_group), else all ranks.
    Raises:
        RecipeError: for an unknown recipe, one with update_every="step" (no model is known whose steps it could
            follow), or an ignore that lists no modules.
        BackendError: at the first training forward on a GPU, under a recipe whose backward would be decoded there
            (blockwise with fp8_format="hybrid").
    """
    if not isinstance(enabled, bool):
        raise RecipeError(f"autocast(enabled=...) must be True or False, got {enabled!r}; pass a recipe as recipe=...")
    left_out = tuple(ignore) if isinstance(ignore, Iterable) else (ignore,)
    if not isinstance(ignore, Iterable) or not all(isinstance(module, nn.Module) for module in left_out):
        raise RecipeError(
            f"autocast's ignore takes a list of modules, got {ignore!r:.80}; write ignore=[model.lm_head]"
        )
    skipped = frozenset(id(parameter) for module in left_out for parameter in module.parameters())
    used = get_recipe("blockwise" if recipe is None else recipe)
    if used.updates_at_steps:
        raise RecipeError(
            'update_every="step" follows the optimizers of a model, and octavo.autocast knows of none; call '
            "octavo.convert(model, recipe), or use update_every='forward'"
        )
    with restore_context(AutocastContext(enabled, used, skipped, amax_reduction_group)):
        yield


@contextlib.contextmanager
def restore_context(context: AutocastContext | None) -> Iterator[None]:
    """Compute under what active_context returned in another place, on another thread perhaps."""
    from octavo.nn.plain_linears import PlainLinears, untraced  # which load torch's compiler

    if context is not None and context.recipe.has_state:
        untraced()
    outer = ACTIVE.context
    ACTIVE.context = context
    try:
        with PlainLinears() if outer is None and context is not None else contextlib.nullcontext():
            yield
    finally:
        ACTIVE.context = outer
