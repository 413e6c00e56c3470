"""What a training script calls: initialize, and Apex's scale_loss; the handle does the work."""

import contextlib
from collections.abc import Callable, Mapping
from typing import Literal

import torch
from torch import nn

from octavo.amp.fallback import Fallback
from octavo.amp.grad_scaler import GradScaler
from octavo.amp.handle import Event, Handle, Schedule
from octavo.amp.levels import Levels, check_level
from octavo.deprecation import former_keywords
from octavo.errors import ConfigError
from octavo.nn.conversion import DEFAULT_IGNORE
from octavo.numerics.recipe import Recipe

_ATTRIBUTE = "octavo_amp"


@former_keywords(skip="ignore")
def initialize(
    model: nn.Module,
    optimizer: torch.optim.Optimizer,
    opt_level: str = "O1",
    *,
    recipe: Recipe | str | None = "blockwise",
    dtype: torch.dtype = torch.bfloat16,
    fallback: Fallback | None = None,
    grad_scaler: GradScaler | Literal["dynamic"] | None = None,
    schedule: Schedule | None = None,
    ignore: tuple[str, ...] = DEFAULT_IGNORE,
    overrides: Mapping[str, Recipe | str] | None = None,
    max_skips: int = 50,
    on_event: Callable[[Event], None] | None = None,
) -> tuple[nn.Module, torch.optim.Optimizer]:
    """Train a model in FP8 (O1) or in bf16 or fp16 (O2), and let it change between the two during the run.

    The model is changed in place and its parameters stay the optimizer's. From then on every optimizer.step() leaves
    out updates whose gradients are not finite (counted, and named in handle(optimizer).events), commits the new
    weights, and chooses the level of the next step: fallback's rules first, then the schedule, then opt_level.

    Args:
        model: any module.
        optimizer: of torch.optim's kind, over the model's parameters.
        opt_level: "O1" or "O2".
        recipe: what O1 computes with; None keeps the recipes that octavo.convert gave the linears.
        dtype: what the same linears compute in under O2, torch.bfloat16 or torch.float16.
        fallback: leave O1 for a while on a loss spike, on too many bad steps, or on overflow.
        grad_scaler: scaling of the loss, under both levels; "dynamic" is GradScaler(). None scales fp16 dynamically
            and bf16 not at all.
        schedule: a function of the step (from 0) that returns a level, or (first step, level) pairs.
        ignore: as octavo.convert takes it.
        overrides: as octavo.convert takes them.
        max_skips: this many skipped updates in a row raise NonFiniteError.
        on_event: called with each Event; they are logged to "octavo.amp" as well.
    Returns:
        (model, optimizer); `octavo.amp.handle(optimizer)` is the handle.
    Raises:
        RecipeError: see Levels; O2, a fallback or a schedule for a model whose weights are gathered as FP8 codes.
        DtypeError: see Levels.
        ConfigError: the optimizer is initialized already, or a bad schedule.
    """
    if hasattr(optimizer, _ATTRIBUTE):
        raise ConfigError("this optimizer was given to octavo.amp.initialize before; make a new one")
    check_level(opt_level)
    if grad_scaler == "dynamic" or (grad_scaler is None and dtype == torch.float16):
        grad_scaler = GradScaler()
    made = Handle(
        Levels(model, recipe, dtype=dtype, ignore=ignore, overrides=overrides),
        model,
        opt_level=opt_level,
        scaler=grad_scaler,
        fallback=fallback,
        schedule=schedule,
        max_skips=max_skips,
        on_event=on_event,
    )
    made.attach(optimizer)
    setattr(optimizer, _ATTRIBUTE, made)
    return model, optimizer


def handle(optimizer: torch.optim.Optimizer) -> Handle:
    """The handle that initialize left on an optimizer.

    Raises:
        ConfigError: it left none.
    """
    found = getattr(optimizer, _ATTRIBUTE, None)
    if not isinstance(found, Handle):
        raise ConfigError("this optimizer has no amp handle; call octavo.amp.initialize(model, optimizer) first")
    return found


def scale_loss(
    loss: torch.Tensor, optimizer: torch.optim.Optimizer, *, delay_unscale: bool = False
) -> contextlib.AbstractContextManager[torch.Tensor]:
    """Apex's block: `with amp.scale_loss(loss, optimizer) as scaled_loss: scaled_loss.backward()`; see Handle."""
    return handle(optimizer).scale_loss(loss, delay_unscale=delay_unscale)
