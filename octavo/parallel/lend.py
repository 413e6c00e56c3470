"""The whole weights of a sharded model for a second decoder with numerics of its own: lent for a time, or copied."""

import contextlib
import copy
import functools
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeVar

import torch
import torch.distributed as dist
from torch import nn

from octavo.distributed.collectives import all_gather_into
from octavo.distributed.shards import is_distributed, local, rows_of, shard_of
from octavo.models.export import reshard
from octavo.nn.live_weights import own_slices, slices_of, stop_watching
from octavo.parallel.equal import sum_of_bits
from octavo.parallel.gather import gathered, gathers_codes
from octavo.parallel.slice_copies import SliceCopies

M = TypeVar("M", bound=nn.Module)


def make_shell(model: M) -> M:
    """A copy of a model that is not sharded yet: buffers are shared, and parameters have no values."""
    memo: dict[int, object] = {id(buffer): buffer for buffer in model.buffers()}
    for param in model.parameters():
        memo[id(param)] = nn.Parameter(torch.empty_like(param, device="meta"), requires_grad=False)
    return copy.deepcopy(model, memo)


@contextlib.contextmanager
def lent(model: nn.Module, view: nn.Module) -> Iterator[None]:
    """Within, a view has the whole parameters of a sharded model, on every rank; see gathered. Where the model gathers
    FP8 codes, the view's parameters are gathered in high precision beside them.

    Args:
        view: a shell of the model, from before it was sharded, or a copy of one. What it made of the weights is for its
            next use to make again.
    """
    own = dict(view.named_parameters(remove_duplicate=False))
    with contextlib.ExitStack() as stack:
        if gathers_codes(model):
            lending = _whole_parameters(model, view)
        else:
            stack.enter_context(gathered(model))
            lending = dict(model.named_parameters(remove_duplicate=False))
        _put(view, lending)
        try:
            yield
        finally:
            _put(view, own)


def give_memory(view: nn.Module, device: torch.device) -> None:
    """Let a view of a shell keep parameters of its own; weight_copies gives them values."""
    empty = {name: torch.empty_like(param, device=device) for name, param in view.named_parameters()}
    _put(view, {name: nn.Parameter(tensor, requires_grad=False) for name, tensor in empty.items()})
    stop_watching(view)  # it is octavo's own


def weight_copies(model: nn.Module, view: nn.Module) -> Callable[[], list[str]]:
    """What writes the whole parameters of a sharded model into a view's own, where they lie; a collective, as gathered.

    Args:
        view: with memory of its own; one that is cut among ranks takes its slices alone.
    Returns:
        A call returns the parameters of which one at least came to this rank with other bits than were sent (sums of
        bits are compared): the view has it so. Other ranks may have got theirs whole.
    """
    if not any(slices_of(view, name) for name, _ in view.named_parameters()):
        return functools.partial(_copy_gathered, model, view)
    groups = [group for param in model.parameters() for group in rows_of(param).groups]
    if len(set(groups)) != 1:  # shards of shards
        return functools.partial(_copy_whole, model, view)
    return SliceCopies(model, view, groups[0])


@torch.no_grad()
def _copy_gathered(model: nn.Module, view: nn.Module) -> list[str]:
    if gathers_codes(model):
        return _copy_whole(model, view)
    came = {}
    with gathered(model):
        theirs = dict(model.named_parameters())
        for name, param in view.named_parameters():
            param.copy_(theirs[name])
            came[name] = theirs[name].dtype, sum_of_bits(theirs[name])
    return _damaged(model, came)


@torch.no_grad()
def _copy_whole(model: nn.Module, view: nn.Module) -> list[str]:
    came = {}
    for name, value in _whole_values(model, view):
        view.get_parameter(name).copy_(own_slices(view, name, value))
        came[name] = value.dtype, sum_of_bits(value)
    return _damaged(model, came)


def _damaged(model: nn.Module, came: Mapping[str, tuple[torch.dtype, torch.Tensor]]) -> list[str]:
    """The names whose sum of bits is not that of all ranks' shards, rounded to the dtype in which they travelled."""
    if not came:
        return []
    theirs = dict(model.named_parameters())
    sent = torch.stack([sum_of_bits(local(theirs[name]).to(dtype)) for name, (dtype, _) in came.items()])
    alike: dict[tuple[Any, ...], list[int]] = {}
    for index, name in enumerate(came):
        alike.setdefault(rows_of(theirs[name]).groups, []).append(index)
    for groups, places in alike.items():
        total = sent[places]
        for group in groups:
            dist.all_reduce(total, group=group)
        sent[places] = total
    is_whole = (sent == torch.stack([found for _, found in came.values()])).tolist()
    return [name for name, is_well in zip(came, is_whole, strict=True) if not is_well]


def _whole_parameters(model: nn.Module, view: nn.Module) -> dict[str, nn.Parameter]:
    """By every name that the view has for it."""
    made = {name: nn.Parameter(value, requires_grad=False) for name, value in _whole_values(model, view)}
    names = {id(param): name for name, param in view.named_parameters()}
    return {name: made[names[id(param)]] for name, param in view.named_parameters(remove_duplicate=False)}


@torch.no_grad()
def _whole_values(model: nn.Module, view: nn.Module) -> Iterator[tuple[str, torch.Tensor]]:
    """Each parameter of a sharded model, its shards rounded to the view's dtype and put together: a collective each."""
    reshard(model)  # what is gathered already may be codes
    theirs = dict(model.named_parameters())
    for name, param in view.named_parameters():
        yield name, _whole(theirs[name], param.dtype)


def _whole(like: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    """A parameter of which each rank has rows, rounded to a dtype first."""
    part, groups = local(like).to(dtype), rows_of(like).groups
    if len(groups) == 1 and len(part) * dist.get_world_size(groups[0]) == len(like):
        made = part.new_empty(like.shape)  # past DTensor, which takes the host longer than most parameters travel
        all_gather_into(made.view(-1), part.reshape(-1), group=groups[0])
        return made
    value = shard_of(part, like, like.shape)
    return value.full_tensor() if is_distributed(value) else value  # type: ignore[attr-defined,no-any-return]


def _put(module: nn.Module, params: Mapping[str, nn.Parameter]) -> None:
    for name, param in params.items():
        owner, _, leaf = name.rpartition(".")
        setattr(module.get_submodule(owner), leaf, param)
