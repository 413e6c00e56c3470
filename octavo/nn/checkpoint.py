"""Activation checkpointing that replays a forward under the recipe, and with the codes, of the first time."""

from collections.abc import Callable
from typing import Any, TypeVar

from torch.utils import checkpoint as torch_checkpoint

from octavo.nn.autocast_context import active_context
from octavo.nn.autocast_scope import restore_context

T = TypeVar("T")


def checkpoint(function: Callable[..., T], *args: Any, preserve_rng_state: bool = True) -> T:
    """function(*args), whose activations are made again in the backward instead of saved.

    The replay runs under the octavo.autocast of the first run, wherever the backward is called and on whichever of
    autograd's threads; delayed scaling neither rolls its history nor changes a scale for it, so the codes are the same,
    as long as no other training forward of the same module under delayed scaling lies between the two.

    Args:
        function: a module or any callable without side effects.
        preserve_rng_state: replay with the random state of the first run (dropout).
    Returns:
        What function returns.
    """
    context = active_context()

    def run(*inputs: Any) -> T:
        with restore_context(context):
            return function(*inputs)

    return torch_checkpoint.checkpoint(run, *args, use_reentrant=False, preserve_rng_state=preserve_rng_state)


def recompute_all() -> tuple[Any, Any]:
    """For torch.utils.checkpoint.checkpoint(..., use_reentrant=False, context_fn=recompute_all) inside torch.compile.

    It asks for what is the default, that all in the checkpoint is computed again. Without it, torch.compile of
    torch < 2.13 keeps the outputs of the autograd Functions in a checkpoint, and so those of every FP8 linear.

    Returns:
        The contexts of the forward and of the replay.
    """
    return torch_checkpoint.create_selective_checkpoint_contexts(_prefer_recompute)


def _prefer_recompute(*_: Any, **__: Any) -> torch_checkpoint.CheckpointPolicy:
    return torch_checkpoint.CheckpointPolicy.PREFER_RECOMPUTE
