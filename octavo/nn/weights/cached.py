"""CachedWeight: codes made once a weight version, from a parameter that its module keeps."""

import weakref
from collections.abc import Callable
from typing import Any

import torch

from octavo.nn.weights.capture import is_partitioned, may_not_hold
from octavo.nn.weights.operands import (
    Operands,
    join_ranges,
    name_tensors,
    one_operand,
    out_of,
    quantize_backward,
    quantize_both_ways,
    quantize_forward,
    ranges_of,
)
from octavo.nn.weights.pinned import PinnedCodes
from octavo.nn.weights.plan import LinearPlan
from octavo.nn.weights.source import WeightSource
from octavo.nn.weights.version import count_optimizer_steps, is_current, weight_state
from octavo.nn.weights.write_watch import WriteWatch
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.recipe import Recipe
from octavo.ops.quantize import quantize


class CachedWeight(WeightSource):
    """Codes of one weight version; derived state, never in a state dict, and empty in a pickle or a deep copy.

    Attributes:
        is_transient: the weight may be freed at any time without notice, so nothing is held.
        prequantizes: a training forward may make the backward's codes too; over once it did so in vain.
        has_waited: a backward has read codes that were there before it, so memory has room for them in a forward.
    """

    is_transient = False

    def __init__(self, parts: tuple[int, ...], version: int = 0, is_scaled: bool = False) -> None:
        super().__init__(parts, version, is_scaled)
        self._weight: Callable[[], torch.Tensor | None] = _no_weight
        self._key: tuple[int, tuple[int, int, int], Recipe] | None = None
        self._observed = False
        self._forward: Operands | None = None
        self._whole: QuantizedTensor | None = None
        self._backward: Operands | None = None
        self._is_prequantized, self.prequantizes, self.has_waited = False, True, False
        self._pinned: PinnedCodes | None = None
        self._watch = WriteWatch()

    def _own_arguments(self) -> tuple[Any, ...]:
        """What a copy of this source begins with."""
        return self.parts, self.version, self.is_scaled

    def __reduce__(self) -> tuple[Any, ...]:
        return type(self), self._own_arguments(), {"full_name": self.full_name}

    def __deepcopy__(self, memo: dict[int, Any]) -> "CachedWeight":
        copied = type(self)(*self._own_arguments())
        copied.full_name, copied.group, copied.is_sharded = self.full_name, self.group, self.is_sharded
        return copied

    # Operands

    def forward(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> Operands:
        """See WeightSource; made once a weight version."""
        assert weight is not None, "a cached weight is there"
        observe = observe and plan.stages and plan.state is not None
        if self.is_transient or may_not_hold(weight):
            if self._key is not None and is_partitioned(weight):
                self.release()  # codes from before the partition
            return self._quantize(weight, plan, observe)
        self._start(weight, plan.recipe, observe)
        if self._forward is not None:
            self._watch.look((weight,), self.full_name)
            return self._forward
        return self._keep(self._quantize(weight, plan, observe, self._out_buffer_for(weight, plan.recipe)))

    def whole(self, weight: torch.Tensor | None, plan: LinearPlan, *, observe: bool = False) -> QuantizedTensor | None:
        operands = self.forward(weight, plan, observe=observe)
        assert weight is not None, "a cached weight is there"
        if len(operands) == 1 or self.is_transient or may_not_hold(weight):
            return one_operand(operands)
        if self._whole is None:
            self._forward, self._whole = join_ranges(operands)
        return self._whole

    def whole_of_training(self, weight: torch.Tensor, plan: LinearPlan) -> QuantizedTensor | None:
        """See WeightSource; where the weight is one range, both GEMMs' codes come from one read of it."""
        if self.is_transient or may_not_hold(weight):
            return self.whole(weight, plan, observe=True)
        self._start(weight, plan.recipe, plan.state is not None and plan.stages)
        if self._forward is None and self.prequantizes:
            self._quantize_both(weight, plan)
        elif self._forward is not None and len(self._forward) == 1:
            self._watch.look((weight,), self.full_name)
        held = self._forward
        return held[0][1] if held is not None and len(held) == 1 else self.whole(weight, plan, observe=True)

    def backward(self, weight: torch.Tensor | None, plan: LinearPlan, *, after: torch.Tensor | None = None) -> Operands:
        """See WeightSource; made by the first backward, if no forward has."""
        assert weight is not None, "a cached weight is there"
        if self.is_transient or may_not_hold(weight):
            return self._quantize_backward(weight, plan)
        if not self._is_of(weight, plan.recipe):
            self._start(weight, plan.recipe, False)
        if self._backward is None:
            self._backward = self._quantize_backward(weight, plan)
        else:
            self.has_waited = True
        self._is_prequantized = False
        return self._backward

    # What codes are made from

    def _quantize(
        self, weight: torch.Tensor, plan: LinearPlan, observe: bool, place: Operands | None = None
    ) -> Operands:
        scaling = plan.recipe.weight
        assert scaling is not None, f"recipe {plan.recipe.name!r} quantizes no weight"
        state = plan.state
        if state is None:
            return quantize_forward(weight, self.parts, scaling, place)
        ranges = ranges_of(weight, self.parts, scaling)
        if not (self.is_scaled or weight.requires_grad):
            state.scale_frozen_weight(plan.recipe, [source for _, source in ranges])
            self.is_scaled = True
        known = [state.known(state.WEIGHT + i, observe=observe) for i in range(len(ranges))]
        return [
            (rows, quantize(source, scaling, out=out_of(place, i), **known[i]))
            for i, (rows, source) in enumerate(ranges)
        ]

    def _quantize_backward(self, weight: torch.Tensor, plan: LinearPlan) -> Operands:
        scaling = plan.recipe.weight
        assert scaling is not None, f"recipe {plan.recipe.name!r} quantizes no weight"
        known = None if plan.state is None else plan.state.weight_scales
        return quantize_backward(weight, self.parts, scaling, quant_scale=known)

    def _quantize_both(self, weight: torch.Tensor, plan: LinearPlan) -> None:
        """Hold the codes of both GEMMs from one read of the weight, where it is one range."""
        scaling, state = plan.recipe.weight, plan.state
        assert scaling is not None, f"recipe {plan.recipe.name!r} quantizes no weight"
        known = {} if state is None else state.known(state.WEIGHT, observe=plan.stages)
        made = quantize_both_ways(weight, self.parts, scaling, known, self._out_buffer_for(weight, plan.recipe))
        if made is not None:
            self._keep(made[0])
            self._backward, self._is_prequantized = made[1], True

    # What is held

    def _start(self, weight: torch.Tensor, recipe: Recipe, observe: bool) -> None:
        """Drop the codes unless they were made of this tensor, as it is, and by a training forward if one asks."""
        key = (self.version, weight_state(weight), recipe)
        if self._weight() is weight and key == self._key and (self._observed or not observe):
            return
        self.release()
        count_optimizer_steps()
        self._weight, self._key, self._observed = weakref.ref(weight), key, observe
        self._watch.begin((weight,), (self.version, key[1][0]))

    def _is_of(self, weight: torch.Tensor, recipe: Recipe) -> bool:
        """Whether codes are held of a weight that a forward saved: it may be an alias, which knows of no optimizer."""
        key = self._key
        if key is None:
            return False
        version, (in_place, address, steps), made_for = key
        now = weight_state(weight)
        return (version, made_for, (in_place, address)) == (self.version, recipe, now[:2]) and is_current(steps)

    def release(self) -> None:
        """See WeightSource. Pinned codes keep their place, into which the next ones are written."""
        if self._pinned is not None and self._forward is not None:
            self._pinned.hold(self._forward, self._whole)
        if self._is_prequantized:
            self.drop_prequantized()
        self._weight, self._key = _no_weight, None
        self._forward = self._whole = self._backward = None
        self.has_waited = False

    def drop_prequantized(self) -> None:
        if self._is_prequantized:
            self._backward, self._is_prequantized, self.prequantizes = None, False, False

    def held_for(self, weight: torch.Tensor) -> tuple[Operands, Recipe] | None:
        key = self._key
        if self._forward is None or key is None or self._weight() is not weight:
            return None
        return (self._forward, key[-1]) if key[:-1] == (self.version, weight_state(weight)) else None

    def held_bytes(self) -> int:
        operands = [q for held in (self._forward, self._backward) if held is not None for _, q in held]
        return sum(q.num_bytes for q in operands)

    def renew(self, weight: torch.Tensor | None, plan: LinearPlan) -> None:
        """See WeightSource: both GEMMs' codes where a backward has read such that lay in memory."""
        assert weight is not None, "a cached weight is there"
        if plan.state is None and self.has_waited and not (self.is_transient or may_not_hold(weight)):
            self._start(weight, plan.recipe, False)
            if self._forward is None:
                self._quantize_both(weight, plan)
        self.forward(weight, plan)

    def stop_watching(self) -> None:
        self._watch.end()

    # Pinned codes

    def pin(self, weight: torch.Tensor | None, plan: LinearPlan) -> None:
        """See WeightSource. A sharded weight's codes go when it goes, and are not pinned."""
        if self.is_sharded:
            return
        if self._pinned is None:
            self._pinned = PinnedCodes()
        self.forward(weight, plan)
        if self.has_whole:
            self.whole(weight, plan)

    def live_tensors(self) -> dict[str, torch.Tensor]:
        """See WeightSource: the pinned codes."""
        return {} if self._pinned is None else name_tensors(self._forward or [], self._whole)

    def mark_fresh(self, weight: torch.Tensor | None, recipe: Recipe) -> None:
        if self._pinned is None or weight is None:
            return
        self._weight, self._observed, self._backward = weakref.ref(weight), False, None
        state = weight_state(weight)
        self._key = (self.version, state, recipe)
        self._is_prequantized = self.has_waited = False
        self._watch.begin((weight,), (self.version, state[0]))
        self.is_scaled = self.is_scaled or recipe.has_state

    def _out_buffer_for(self, weight: torch.Tensor, recipe: Recipe) -> Operands | None:
        assert recipe.weight is not None, f"recipe {recipe.name!r} quantizes no weight"
        return None if self._pinned is None else self._pinned.out_buffer_for(weight, self.parts, recipe.weight)

    def _keep(self, operands: Operands) -> Operands:
        self._forward = operands
        if self._pinned is not None:
            self._forward, self._whole = self._pinned.store(operands)
        return self._forward


class TransientWeight(CachedWeight):
    """A weight of which nothing is held: every call quantizes it."""

    is_transient = True


def _no_weight() -> torch.Tensor | None:
    return None
