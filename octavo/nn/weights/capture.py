"""Whether a graph is being recorded, by torch.compile or in a CUDA stream: codes made there belong to its replays."""

import contextlib
import contextvars
from collections.abc import Iterator

import torch

# torch.cuda.is_current_stream_capturing without the Python around it
is_capturing = getattr(torch._C, "_cuda_isCurrentStreamCapturing", torch.cuda.is_current_stream_capturing)
_keeps_codes = contextvars.ContextVar("octavo_keeps_codes", default=False)


@contextlib.contextmanager
def captured_with_codes() -> Iterator[None]:
    """Within, a CUDA graph that is captured reads the codes that were made before it, as inference wants it.

    The caller who replays it makes sure that they are still those of the weight, at the same addresses.
    """
    token = _keeps_codes.set(True)
    try:
        yield
    finally:
        _keeps_codes.reset(token)


def may_not_hold(weight: torch.Tensor) -> bool:
    """Whether codes of a weight may not be kept: a graph is recorded, or is_partitioned."""
    if torch.compiler.is_compiling():
        return True
    return (weight.is_cuda and is_capturing() and not _keeps_codes.get()) or hasattr(weight, "ds_id")


def is_partitioned(parameter: torch.Tensor) -> bool:
    """Whether DeepSpeed's ZeRO-3 has the parameter, and takes its values away after each forward and backward."""
    return hasattr(parameter, "ds_id")


def is_captured(weight: torch.Tensor | None = None) -> bool:
    """Whether a graph is being recorded, whose replays must make the codes again: nothing of it may be kept.

    Args:
        weight: where it is known; one on a GPU says that CUDA is in use.
    """
    if torch.compiler.is_compiling():
        return True
    # Before CUDA is used nothing captures it, and is_available would ask the driver each time.
    is_used = torch.cuda.is_initialized() if weight is None else weight.is_cuda
    return is_used and is_capturing() and not _keeps_codes.get()
