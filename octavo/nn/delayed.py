"""Delayed scaling's state in a linear: two fp32 buffers that are in no state dict, and the rule of when they change."""

import functools
import warnings
import weakref
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import nn

from octavo.distributed.amax import reduce_staged
from octavo.errors import CheckpointError, RecipeError
from octavo.nn.amax_watch import AmaxWatch
from octavo.nn.autocast_context import active_context
from octavo.nn.weights.cached import CachedWeight
from octavo.nn.weights.capture import is_captured
from octavo.nn.weights.codes import CodesOnly
from octavo.nn.weights.delayed import DELAYED_BUFFERS, HISTORY_BUFFER, SCALE_BUFFER, DelayedState
from octavo.nn.weights.gathered import GatheredWeight
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize.delayed import update_delayed_

# In a saved state alone, where it is so: what was staged is taken over by a forward without gradients as well.
AWAITS_UPDATE = "fp8_awaits_update"
STATE_NAMES = (*DELAYED_BUFFERS, AWAITS_UPDATE)


@functools.cache  # once a process
def warn_of_eval_mode() -> None:
    """Say that a module in eval mode computes with scales that no training step has made."""
    warnings.warn(
        "delayed scaling in eval mode, before any training step: its scales are still 1, and eval mode leaves them as "
        "they are, with gradients too; call model.train() to train, or load a state (octavo.nn.load_fp8_state_dict)",
        stacklevel=4,
    )


# Linears that were converted together, in the order of their model; in no copy and no pickle.
_peers: "weakref.WeakKeyDictionary[DelayedLinear, list[weakref.ref[DelayedLinear]]]" = weakref.WeakKeyDictionary()


def join_model(linears: Sequence["DelayedLinear"]) -> None:
    """Let a model's linears be reduced together where they have state, in this order, whether they run or not."""
    refs = [weakref.ref(linear) for linear in linears]
    for linear in linears:
        _peers[linear] = refs


def _peers_of(linear: "DelayedLinear", asked: Any) -> Callable[[], list[DelayedState]] | None:
    """What gives the states that are reduced with a linear's in a forward; None where no model is known.

    Args:
        asked: autocast's group, which all linears then have.
    """
    refs = _peers.get(linear)
    if refs is None:
        return None

    def states() -> list[DelayedState]:
        found = []
        for peer in (ref() for ref in refs):
            recipe = None if peer is None else peer.recipe
            if peer is None or recipe is None or recipe.delayed is None or recipe.updates_at_steps:
                continue
            same = asked is not None or peer.source.group is linear.source.group
            if same and recipe.delayed.reduce_amax and not (peer.weight is not None and peer.weight.is_meta):
                found.append(peer.delayed_state(recipe))
        device = linear.delayed_state(linear.recipe).history.device  # type: ignore[arg-type]
        return [state for state in found if state.history.device == device]

    return states


class DelayedLinear(nn.Module):
    """What a linear has for delayed scaling; Linear builds on it.

    A training forward stages amaxes. Under update_every="forward" it takes over first what the last one and its
    backward staged; under "step" only update_scales does. In eval mode a forward computes with the scales as they are,
    and neither it nor its backward stages anything. docs/adr/0003, 0017, 0024.

    Attributes:
        full_name: the name by which convert found the module, for messages; empty where it is unknown.
    """

    weight: nn.Parameter | None
    recipe: Recipe | None = None
    parts: tuple[int, ...]
    source: CachedWeight | CodesOnly | GatheredWeight

    def __init__(self) -> None:
        super().__init__()
        self._delayed: DelayedState | None = None
        self._has_begun = False  # the last forward outside of a backward had gradients
        self._awaits_update = False  # a recomputation has staged what no forward with gradients will take over
        self._was_checked = False  # for scales, in eval mode
        self._watch = AmaxWatch()

    @property
    def full_name(self) -> str:
        return self.source.full_name

    @full_name.setter
    def full_name(self, name: str) -> None:
        self.source.full_name = name

    @property
    def weight_version(self) -> int:
        return self.source.version

    @weight_version.setter
    def weight_version(self, version: int) -> None:
        self.source.version = version

    def begin_forward(self, recipe: Recipe) -> DelayedState:
        """Take over what was staged, if it is time to; the first thing that a forward under delayed scaling does.

        Activation checkpointing runs a forward again inside the backward, which must see the first one's scales. If
        that one had no gradients (reentrant checkpointing), it could not know that it trains: what its recomputation
        stages is taken over by the next forward in training mode, with gradients or without.
        """
        state = self.delayed_state(recipe)
        if not self.source.begins_early:
            self._begin(state, recipe)
        elif not (torch.compiler.is_compiling() or self.source.has_begun) and self.training and torch.is_grad_enabled():
            raise RecipeError(
                f"the scales of {self.full_name or 'a linear'} change when a forward of the sharded model begins, and "
                "none has; call the model that was sharded, not a part of it alone"
            )
        return state

    def begin_early(self, recipe: Recipe) -> None:
        """begin_forward's rule for a weight that is gathered as codes: before they are made, by the model's forward."""
        self._begin(self.delayed_state(recipe), recipe)
        if torch._C._current_graph_task_id() == -1:
            self.source.stages = self.training and torch.is_grad_enabled()  # type: ignore[union-attr]
            self.source.has_begun |= self.source.stages  # type: ignore[union-attr]

    def _begin(self, state: DelayedState, recipe: Recipe) -> None:
        trains = torch.is_grad_enabled()
        if not self.training:
            if trains and not (self._was_checked or torch.compiler.is_compiling()):
                self._check_scales()
        elif recipe.updates_at_steps:
            if trains and not torch.compiler.is_compiling():
                self._check_group()
                self._watch.wait()
        elif torch.compiler.is_compiling():
            if trains:
                self._roll_history(state, recipe)
        elif torch._C._current_graph_task_id() != -1:
            self._awaits_update |= trains and not self._has_begun
        elif not torch.is_inference_mode_enabled():
            if self._has_begun is not trains:  # setting a module's attribute takes as long as a small kernel
                self._has_begun = trains
            if trains or self._awaits_update:
                if self._awaits_update:
                    self._awaits_update = False
                self._roll_history(state, recipe)
                self._watch.look(self, state, recipe)

    def _check_scales(self) -> None:
        """One read of the device, the first time: whether a step has ever made scales."""
        if is_captured(self.weight):
            return
        self._was_checked = True
        scale = self._buffers.get(SCALE_BUFFER)
        if scale is None or float(scale[DelayedState.INPUT]) == 1.0:
            warn_of_eval_mode()

    def delayed_state(self, recipe: Recipe) -> DelayedState:
        """History and scales as this layer's buffers, made at first use."""
        if torch.compiler.is_compiling():
            self._make_buffers(recipe)
            return DelayedState(self.fp8_amax_history, self.fp8_quant_scale)  # type: ignore[arg-type]
        held, buffers = self._delayed, self._buffers
        if held is None or not held.is_of(buffers.get(HISTORY_BUFFER), buffers.get(SCALE_BUFFER), recipe):
            self._make_buffers(recipe)
            held = DelayedState(self.fp8_amax_history, self.fp8_quant_scale).keep_for(recipe)  # type: ignore[arg-type]
            self._delayed = held
        return held

    def _make_buffers(self, recipe: Recipe) -> None:
        """Add the buffers that a recipe needs, where there are none or of other sizes."""
        assert recipe.delayed is not None, f"recipe {recipe.name!r} has no state"
        slots = DelayedState.num_slots(self.parts, recipe)
        held = self._buffers.get(HISTORY_BUFFER)
        if held is None or held.shape != (recipe.delayed.amax_history_len, slots):
            if torch.compiler.is_compiling():
                raise RecipeError(
                    f"compiled code cannot add the buffers of recipe {recipe.name!r}; call octavo.convert(model, "
                    "recipe) first, or run one forward before torch.compile"
                )
            device = self.weight.device if self.weight is not None else None
            with torch.inference_mode(False):  # training updates in place what an evaluation may have made first
                self._set_buffer(HISTORY_BUFFER, torch.zeros(recipe.delayed.amax_history_len, slots, device=device))
                if held is None or held.shape[1] != slots:  # another history length keeps the scales
                    self._set_buffer(SCALE_BUFFER, torch.ones(slots, device=device))
                    self.source.is_scaled = False

    def _set_buffer(self, name: str, tensor: torch.Tensor) -> None:
        # no part of the module's state dict, which is the framework's own
        self.register_buffer(name, tensor, persistent=False)

    def _roll_history(self, state: DelayedState, recipe: Recipe) -> None:
        """Turn what the last forward and its backward staged into scales, the largest of all ranks."""
        assert recipe.delayed is not None, f"recipe {recipe.name!r} has no amax history"
        if recipe.delayed.reduce_amax:
            context = active_context()
            asked = None if context is None else context.amax_reduction_group
            peers = None if torch.compiler.is_compiling() else _peers_of(self, asked)
            reduce_staged(state, self.source.group if asked is None else asked, peers)
        self._take_over(state, recipe)

    def note_new_scales(self, state: DelayedState, recipe: Recipe) -> None:
        """octavo.nn.update_scales has made scales of what was staged."""
        self.source.drop_prequantized()  # encoded with the scale that has gone
        self._watch.look(self, state, recipe)

    def _take_over(self, state: DelayedState, recipe: Recipe) -> None:
        """The scales only change here, and in octavo.nn.update_scales."""
        self.source.drop_prequantized()  # encoded with the scale that goes now
        update_delayed_(state.history, state.quant_scale, recipe)

    def _check_group(self) -> None:
        """autocast's group is over when an optimizer steps, and a linear that a rank skips would not know of it."""
        context = active_context()
        if context is not None and context.amax_reduction_group not in (None, self.source.group):
            raise RecipeError(
                'under update_every="step" the scales change after the optimizer\'s step, outside of octavo.autocast, '
                "whose amax_reduction_group is not the linear's; call octavo.nn.set_amax_reduction_group(model, group)"
            )

    def _apply(self, fn, recurse: bool = True):  # type: ignore[no-untyped-def]
        """The state stays fp32."""
        state = {name: self._buffers[name] for name in DELAYED_BUFFERS if name in self._buffers}
        super()._apply(fn, recurse)
        self._delayed = None
        for name, buffer in state.items():
            moved = self._buffers[name]
            self._buffers[name] = buffer.to(moved.device) if moved is not None and buffer is not None else moved
        return self

    def _load_from_state_dict(self, state_dict, prefix, *args):  # type: ignore[no-untyped-def]
        """Also take the state from inside the model's state dict, where older checkpoints have it."""
        held = {name: state_dict[prefix + name] for name in DELAYED_BUFFERS if prefix + name in state_dict}
        if len(held) == len(DELAYED_BUFFERS):
            state_dict = {key: tensor for key, tensor in state_dict.items() if key.removeprefix(prefix) not in held}
            try:
                self.check_state(held, prefix.removesuffix("."))
                self.load_state(held)
            except CheckpointError as error:
                args[-1].append(str(error))  # as torch's own do; the last of args is the list of errors
        super()._load_from_state_dict(state_dict, prefix, *args)
        self.weight_version += 1

    # The state by itself; see fp8_state

    def held_state(self) -> dict[str, torch.Tensor]:
        """The tensors of the state by the names of STATE_NAMES, shared; empty where no recipe has asked for one yet."""
        buffers = ((name, self._buffers.get(name)) for name in DELAYED_BUFFERS)
        held = {name: buffer for name, buffer in buffers if buffer is not None}
        return held | ({AWAITS_UPDATE: torch.ones(())} if held and self._awaits_update else {})

    def check_state(self, held: Mapping[str, torch.Tensor], name: str) -> None:
        """Refuse a state that is no whole one of a linear of these parts and, where it has a history, of its length.

        Raises:
            CheckpointError: a part is missing, or has another shape or dtype.
        """
        missing = [buffer for buffer in DELAYED_BUFFERS if buffer not in held]
        if missing:
            raise CheckpointError(f"{name}.{missing[0]} is missing; history and scales go together: save both")
        history, scale = (held[buffer] for buffer in DELAYED_BUFFERS)
        slots = 2 + len(self.parts)
        if history.dim() != 2 or history.shape[1] != slots or scale.shape != (slots,):
            raise CheckpointError(
                f"{name}: an amax history [rows, {slots}] and {slots} scales fit its {len(self.parts)} parts, got "
                f"{tuple(history.shape)} and {tuple(scale.shape)}; load a state of the same architecture"
            )
        if not history.dtype == scale.dtype == torch.float32:
            raise CheckpointError(
                f"{name}: the state must be float32, got {history.dtype} and {scale.dtype}; save it without a cast"
            )
        mine = self._buffers.get(HISTORY_BUFFER)
        if mine is not None and mine.shape != history.shape:
            raise CheckpointError(
                f"{name}: the saved amax history has {len(history)} rows, this linear's {len(mine)}; set "
                f"amax_history_len={len(history)}, or leave the state out to begin with an empty one"
            )

    def load_state(self, held: Mapping[str, torch.Tensor]) -> None:
        """Take a state that check_state lets pass; into the buffers where there are some, or as new ones."""
        device = None if self.weight is None else self.weight.device
        with torch.inference_mode(False), torch.no_grad():
            for name in DELAYED_BUFFERS:
                mine = self._buffers.get(name)
                if mine is None:
                    self._set_buffer(name, held[name].detach().to(device, copy=True))
                else:
                    mine.copy_(held[name])
        # a weight that was never scaled has scales of 1, and is scaled when a forward comes
        self.source.is_scaled = bool((held[SCALE_BUFFER][DelayedState.WEIGHT :] != 1.0).any())
        self._awaits_update = AWAITS_UPDATE in held
        self._watch = AmaxWatch()
        self.weight_version += 1  # codes of other scales are none of this weight's

    def reset_history(self) -> None:
        """Forget the amaxes of all steps but the last; the scales are made from that, at the next training forward.

        Under update_every="step" at once: the last step is no longer staged, and alike on all ranks.
        """
        history, recipe = self._buffers.get(HISTORY_BUFFER), self.recipe
        if history is not None:
            with torch.no_grad():
                staged, newest = history[0].clone(), history[-1].clone()
                history[1:] = 0.0
                if recipe is not None and recipe.updates_at_steps and len(history) > 1:
                    history[0] = newest
                    self._take_over(self.delayed_state(recipe), recipe)
                    history[0] = staged
        self._watch = AmaxWatch()
