"""Notices that delayed scaling's scale has lost its tensor: a batch far out of range stays in the history for long."""

import functools
import warnings

import torch
from torch import nn

from octavo.nn.weights.capture import is_captured
from octavo.nn.weights.delayed import DelayedState
from octavo.numerics.formats import format_of
from octavo.numerics.recipe import Recipe
from octavo.numerics.scaling import Scaling

EVERY = 16  # updates between two looks, and amaxes that count as recent
MAX_WAITING = 256  # training forwards without an update, after which one is missed
_SLOTS = ("input", "grad_output", "weight")


class _Said:
    """What this process has warned of; reset_amax_history lets it speak again."""

    has_warned = False


def speak_again() -> None:
    """Let the next scale that is lost be warned of."""
    _Said.has_warned = False


@functools.cache  # once a process
def warn_of_no_step() -> None:
    """Say that scales have not changed for long."""
    warnings.warn(
        f'delayed scaling with update_every="step" has seen {MAX_WAITING} training forwards and no optimizer step: the '
        "scales stay as they are. It follows the steps of torch optimizers that hold a parameter of the model that was "
        "converted; after those of others call octavo.nn.update_scales(model), or use update_every='forward'",
        stacklevel=6,
    )


class AmaxWatch:
    """Every 16 updates compares a linear's scales with its last 16 amaxes, and warns where next to nothing is left.

    A GPU is never waited for: what it has computed is read at a later update. Derived state, in no copy and no pickle.
    """

    def __init__(self) -> None:
        self._num_updates = self._num_waiting = 0
        self._sent: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def __reduce__(self) -> tuple[type["AmaxWatch"], tuple[()]]:
        return AmaxWatch, ()

    def wait(self) -> None:
        """A training forward whose amaxes wait for an optimizer's step."""
        self._num_waiting += 1
        if self._num_waiting == MAX_WAITING:
            warn_of_no_step()

    def look(self, linear: nn.Module, state: DelayedState, recipe: Recipe) -> None:
        """After an update: read what was sent, if it has arrived, and send the next."""
        self._num_updates, self._num_waiting = self._num_updates + 1, 0
        is_due = self._num_updates % EVERY == 0 and len(state.history) > EVERY + 1  # a short window forgets by itself
        if not (is_due or self._sent) or is_captured(state.history):
            return
        if self._sent is not None:
            values, event = self._sent
            if event is not None and not event.query():
                return
            self._sent = None
            _judge(linear, values.tolist(), recipe)
        if is_due:
            self._sent = _to_host(_encoded(state))


def _encoded(state: DelayedState) -> torch.Tensor:
    """[n]: what the largest finite value of the last updates becomes under the scales in use."""
    recent = state.history[-EVERY:]
    return torch.where(recent.isfinite(), recent, 0.0).amax(dim=0) * state.quant_scale


def _to_host(values: torch.Tensor) -> tuple[torch.Tensor, torch.cuda.Event | None]:
    if not values.is_cuda:
        return values, None
    host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
    host.copy_(values, non_blocking=True)
    event = torch.cuda.Event()
    event.record(torch.cuda.current_stream(values.device))
    return host, event


def _judge(linear: nn.Module, encoded: list[float], recipe: Recipe) -> None:
    """Warn of the first operand whose recent amax lies below the smallest normal number of its format."""
    assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
    for slot, value in enumerate(encoded):
        role = _SLOTS[min(slot, DelayedState.WEIGHT)]
        scaling: Scaling | None = getattr(recipe, role) or recipe.input
        assert scaling is not None, "delayed scaling quantizes the forward"
        if 0.0 < value < format_of(scaling.dtype).min_normal and not _Said.has_warned:
            _Said.has_warned = True
            ratio = scaling.fp8_max * 2.0**-recipe.delayed.margin / value
            name = getattr(linear, "full_name", "") or str(linear)
            warnings.warn(
                f"delayed scaling of {name}: the scale of its {role} is made for values {ratio:.2g} times as large as "
                f"those of the last {EVERY} updates, which become zero or keep next to no bits, for up to "
                f"{recipe.delayed.amax_history_len} updates: one step had a value far out of range. Call "
                "octavo.nn.reset_amax_history(model), or use a recipe with amax_compute_algo='most_recent' or a "
                "shorter amax_history_len. Said once; look at other linears too",
                stacklevel=2,
            )
