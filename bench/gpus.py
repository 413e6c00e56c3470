"""The GPUs that a command may spread its processes over, and the CPU's cores that go with each."""

import os
from collections.abc import Iterable

import torch

from octavo.env import child_environment


def visible_gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    names = [name for name in child_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[:count] if names else [str(index) for index in range(count)]


def share_of_cores(cores: Iterable[int], index: int, count: int) -> set[int]:
    """Neighbouring cores for the index-th of `count` processes, as many for each; all of them where they are fewer.

    A step that the CPU issues hands over from thread to thread; between sockets that takes longer than its kernels.
    """
    ordered = sorted(cores)
    size = len(ordered) // count
    return set(ordered[index * size : (index + 1) * size] or ordered)


def usable_cores() -> set[int]:
    """Those that the calling thread may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def bind_to(cores: set[int]) -> None:
    """Keep the calling thread, and the processes that it starts, on these cores, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)
