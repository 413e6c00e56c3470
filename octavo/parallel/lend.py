"""The whole weights of a sharded model for a second decoder with numerics of its own: lent for a time, or copied."""

import contextlib
import copy
from collections.abc import Iterator, Mapping
from typing import TypeVar

import torch
from torch import nn

from octavo.errors import ConfigError
from octavo.parallel.gather import gathered, gathers_codes

M = TypeVar("M", bound=nn.Module)


def make_shell(model: M) -> M:
    """A copy of a model that is not sharded yet: buffers are shared, and parameters have no values."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def lent(model: nn.Module, view: nn.Module) -> Iterator[None]:
    """Within, a view has the whole parameters of a sharded model, on every rank; see gathered.

    Args:
        view: a shell of the model, from before it was sharded, or a copy of one. What it made of the weights is for its
            next use to make again.
    Raises:
        ConfigError: weights of the model are gathered as FP8 codes, from which no other numerics can compute.
    """
    if gathers_codes(model):
        raise ConfigError(
            "a second decoder computes from the whole weights, and this model gathers FP8 codes of them; shard it "
            "without all_gather_dtype='fp8'"
        )
    with gathered(model):
        own = dict(view.named_parameters(remove_duplicate=False))
        _put(view, dict(model.named_parameters(remove_duplicate=False)))
        try:
            yield
        finally:
            _put(view, own)


def give_memory(view: nn.Module, device: torch.device) -> None:
    """Let a view of a shell keep parameters of its own; copy_weights gives them values."""
    empty = {name: torch.empty_like(param, device=device) for name, param in view.named_parameters()}
    _put(view, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in empty.items()})


@torch.no_grad()
def copy_weights(model: nn.Module, view: nn.Module) -> None:
    """Write the whole parameters of a sharded model into a view's own, where they lie; a collective, as gathered."""
    with gathered(model):
        theirs = dict(model.named_parameters())
        for name, param in view.named_parameters():
            param.copy_(theirs[name])


def _put(module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    for name, param in params.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, param)
