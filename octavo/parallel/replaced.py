"""Parameters that shard and parallelize have replaced by others: an optimizer that holds them trains nothing."""

import weakref
from collections.abc import Iterable
from typing import Any

import torch
from torch.optim.optimizer import register_optimizer_step_pre_hook

from octavo.errors import ConfigError

_replaced: dict[int, "weakref.ref[torch.Tensor]"] = {}
_hooks: list[Any] = []


def note_replaced(before: Iterable[torch.Tensor], after: Iterable[torch.Tensor]) -> None:
    """Refuse the next step of an optimizer that was made with parameters which the model no longer has.

    Args:
        before: the model's parameters.
        after: those that it has now.
    """
    if not _hooks:
        _hooks.append(register_optimizer_step_pre_hook(_check))
    kept = {id(param) for param in after}
    for param in before:
        key = id(param)
        if key not in kept:
            _replaced[key] = weakref.ref(param, lambda _, key=key: _replaced.pop(key, None))  # type: ignore[misc]


def _check(optimizer: torch.optim.Optimizer, *_: object) -> None:
    if not _replaced:  # what was replaced is gone
        return
    for group in optimizer.param_groups:
        for param in group["params"]:
            held = _replaced.get(id(param))
            if held is not None and held() is param:
                raise ConfigError(
                    f"this {type(optimizer).__name__} was made before the model was sharded or cut: it holds "
                    "parameters that the model no longer has, and would train nothing; make it after "
                    "octavo.parallel.shard or parallelize"
                )
