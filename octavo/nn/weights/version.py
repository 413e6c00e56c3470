"""What tells that a weight may have changed: torch's counters, and a count of optimizer steps."""

import itertools
import weakref
from collections.abc import Sequence

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook

from octavo.distributed.torch_private import sharded_parameters


class _OptimizerSteps:
    """Counts the steps of every torch optimizer: fused ones write weights without moving Tensor._version."""

    def __init__(self) -> None:
        self.count = 0
        self.is_counting = False
        self._order = itertools.count()
        self._models: weakref.WeakValueDictionary[int, ModelState] = weakref.WeakValueDictionary()

    def begin(self) -> None:
        """Count from here on; torch then calls this for every optimizer of the process."""
        if not self.is_counting:
            self.is_counting = True
            register_optimizer_step_post_hook(self._add)

    def tell(self, model: "ModelState") -> None:
        """Let a model note the steps from here on, after those that did so before it: in one order on all ranks."""
        self.begin()
        self._models[next(self._order)] = model

    def _add(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.count += 1
        held = {id(p) for group in optimizer.param_groups for p in group["params"]}
        stepped = [model for model in list(self._models.values()) if model.note_step(held)]
        kinds: dict[type[ModelState], list[ModelState]] = {}
        for model in stepped:
            kinds.setdefault(type(model), []).append(model)
        for kind, of_kind in kinds.items():
            kind.end_step(of_kind)


_optimizer_steps = _OptimizerSteps()


def count_optimizer_steps() -> None:
    """Begin to count: called with the first FP8 weight, so that importing octavo registers no hook."""
    _optimizer_steps.begin()


def num_optimizer_steps() -> int:
    """Steps of all optimizers since the count began."""
    return _optimizer_steps.count


def weight_state(weight: torch.Tensor) -> tuple[int, int, int]:
    """Changes when a weight may have: by an in-place operation, other storage, or, if trained, any optimizer's step.

    Not by a write into .data (that needs mark_weights_updated), nor where FSDP2 gathers a weight again at the same
    place: a source is released there.
    """
    in_place = 0 if weight.is_inference() else weight._version
    return in_place, weight.data_ptr(), _optimizer_steps.count if weight.requires_grad else 0


def is_current(steps: int) -> bool:
    """Whether no optimizer has stepped since weight_state gave this count; 0 is that of a frozen weight."""
    return steps in (0, _optimizer_steps.count)


class ModelState:
    """What tells that any weight of a model may have changed, as weight_state does of one.

    Attributes:
        num_steps: of optimizers that hold any of its parameters; others do not count.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._model, self.num_steps = weakref.ref(model), 0
        _optimizer_steps.tell(self)

    def note_step(self, held: set[int]) -> bool:
        """Some optimizer has stepped, which holds parameters of these ids; whether any is of the model."""
        model = self._model()
        own = () if model is None else itertools.chain(model.parameters(), sharded_parameters(model))
        is_own = any(id(parameter) in held for parameter in own)
        self.num_steps += is_own
        return is_own

    @classmethod
    def end_step(cls, stepped: "Sequence[ModelState]") -> None:
        """An optimizer's step is over, and these are all of this class that it was of."""

    def now(self) -> tuple[int, list[tuple[int, int]]]:
        """Equal to what it was as long as no weight has changed."""
        model = self._model()
        parameters = () if model is None else model.parameters()
        return self.num_steps, [weight_state(parameter)[:2] for parameter in parameters]
