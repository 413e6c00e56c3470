"""What tells that a weight may have changed: torch's counters, and a count of optimizer steps."""

from collections.abc import Iterable
from weakref import WeakKeyDictionary

import torch
from torch.optim.optimizer import register_optimizer_step_post_hook


class _OptimizerSteps:
    """Counts the steps of every torch optimizer: fused ones write weights without moving Tensor._version."""

    def __init__(self) -> None:
        self.count = 0
        self.is_counting = False
        self.by_optimizer: WeakKeyDictionary[torch.optim.Optimizer, int] = WeakKeyDictionary()

    def begin(self) -> None:
        """Count from here on; torch then calls this for every optimizer of the process."""
        if not self.is_counting:
            self.is_counting = True
            register_optimizer_step_post_hook(self._add)

    def _add(self, optimizer: torch.optim.Optimizer, *_: object) -> None:
        self.count += 1
        self.by_optimizer[optimizer] = self.by_optimizer.get(optimizer, 0) + 1


_optimizer_steps = _OptimizerSteps()


def count_optimizer_steps() -> None:
    """Begin to count: called with the first FP8 weight, so that importing octavo registers no hook."""
    _optimizer_steps.begin()


def num_optimizer_steps() -> int:
    """Steps of all optimizers since the count began."""
    return _optimizer_steps.count


def count_writes(parameters: Iterable[torch.Tensor]) -> int:
    """A number that grows when any of a model's parameters is written by an in-place operation or an optimizer of its.

    As weight_state, it does not see a write into .data; call count_optimizer_steps before the first one.
    """
    held = {id(parameter): parameter for parameter in parameters}
    in_place = sum(parameter._version for parameter in held.values() if not parameter.is_inference())
    return in_place + sum(
        count
        for optimizer, count in _optimizer_steps.by_optimizer.items()
        if any(id(parameter) in held for group in optimizer.param_groups for parameter in group["params"])
    )


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
