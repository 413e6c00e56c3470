"""Whole weights of a model that FSDP2 has sharded, for as long as a caller samples from it."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch
from torch import nn

from octavo.distributed.torch_private import has_fsdp, is_unsharded, keep_reshard_rule
from octavo.nn.linear import Linear
from octavo.nn.weights.gathered import GatheredWeight


def is_sharded(model: nn.Module) -> bool:
    """Whether torch's fully_shard was applied to the model or to a part of it."""
    return bool(_sharded_modules(model))


def gathers_codes(model: nn.Module) -> bool:
    """Whether some weights of a sharded model are gathered as FP8 codes alone."""
    return any(isinstance(module, Linear) and isinstance(module.source, GatheredWeight) for module in model.modules())


@contextlib.contextmanager
def gathered(model: nn.Module) -> Iterator[None]:
    """Within, every parameter is whole on every rank, as FP8 codes where these are gathered (gathers_codes): its own
    linears compute from them, and nothing can read the weight itself. The model's memory is that of one GPU at most.

    Entering is a collective: all ranks must come here. What they do inside may differ from rank to rank, since no
    forward gathers or frees anything. For a model that is not sharded, or gathered already, nothing happens.
    """
    modules = [module for module in _sharded_modules(model) if not is_unsharded(module)]
    if not modules:
        yield
        return
    sources = [source for m in model.modules() if isinstance(source := vars(m).get("source"), GatheredWeight)]
    with _unfreed(modules):
        with torch.inference_mode(False), torch.no_grad():  # parameters made inside of it could not be trained
            for source in sources:
                source.stages = False  # what is gathered here is of no training forward
            for module in modules:
                module.unshard()
        try:
            for source in sources:
                source.is_lent = True
            yield
        finally:
            for source in sources:
                source.is_lent = False


@contextlib.contextmanager
def kept(model: nn.Module) -> Iterator[None]:
    """Within, what a forward of a sharded model gathers stays whole, for its backward and for other micro-batches.

    After new weights call octavo.models.export.reshard, which frees it: the next forward gathers again. Nothing is
    gathered here. For a model that is not sharded nothing happens.
    """
    with _unfreed(_sharded_modules(model), after_backward=True):
        yield


def set_last_backward(model: nn.Module, is_last: bool) -> None:
    """Say whether the next backward of a sharded model is the last one before its gradients are read.

    After the others nothing waits until the ranks' gradients are added up: the next forward runs meanwhile, and they
    may not be read. For a model that is not sharded nothing happens.
    """
    if is_sharded(model):
        model.set_is_last_backward(is_last)  # type: ignore[operator]


@contextlib.contextmanager
def _unfreed(modules: list[Any], after_backward: bool = False) -> Iterator[None]:
    """Within, no forward frees what modules have whole, and if asked for no backward; at the end it is freed."""
    rules = [keep_reshard_rule(module) for module in modules]
    for module in modules:
        module.set_reshard_after_forward(False, recurse=False)
        if after_backward:
            module.set_reshard_after_backward(False, recurse=False)
    try:
        yield
    finally:
        for module, restore in zip(modules, rules, strict=True):
            # FSDP2 would keep a module whose forward has raised, if that is its rule
            module.set_reshard_after_forward(True, recurse=False)
            module.reshard()
            restore()


def _sharded_modules(model: nn.Module) -> list[Any]:
    if not has_fsdp():
        return []
    from torch.distributed.fsdp import FSDPModule

    return [module for module in model.modules() if isinstance(module, FSDPModule)]
