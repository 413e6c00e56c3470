"""The sources of weights that are no octavo Linear's: torch's own parameters under octavo.autocast."""

import torch
from torch.utils.weak import WeakIdKeyDictionary

from octavo.distributed.amax import has_ranks
from octavo.distributed.torch_private import has_fsdp
from octavo.nn.weights.cached import CachedWeight, TransientWeight

_sources = WeakIdKeyDictionary()  # a source holds its weight weakly and goes with it


def plain_source(weight: torch.Tensor) -> CachedWeight:
    """The source of a parameter [N, K] that belongs to a module of torch's.

    Nothing tells of a parameter that FSDP2 frees and gathers again: in a process that has both, codes are made at every
    call and none is held.
    """
    if torch.compiler.is_compiling() or may_be_gathered():
        return TransientWeight((weight.shape[0],))
    source = _sources.get(weight)
    if source is None:
        source = _sources[weight] = CachedWeight((weight.shape[0],))
    return source


def find_plain_source(weight: torch.Tensor) -> CachedWeight | None:
    """The source that a parameter has by now."""
    return _sources.get(weight)


def drop_plain_sources() -> None:
    """Drop the codes of all such weights."""
    if len(_sources):
        _sources.clear()


def may_be_gathered() -> bool:
    """Whether parameters of torch's own modules may be freed and gathered: FSDP2 is loaded, and there are ranks."""
    return has_fsdp() and has_ranks()
