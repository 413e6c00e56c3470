"""The same bits in every run: torch's deterministic algorithms, for as long as a run asks for them."""

import contextlib
from collections.abc import Iterator
from typing import Any

import torch

from octavo.env import set_cublas_workspace


@contextlib.contextmanager
def deterministic(is_wanted: bool) -> Iterator[None]:
    """Let torch's ops add in a fixed order while the block runs; one that cannot raises a RuntimeError that names it.

    On a GPU this is attention's backward and cuBLAS's workspace. On a CPU nothing changes, where sums have an order.
    """
    if not is_wanted:
        yield
        return
    set_cublas_workspace()
    memory: Any = torch.utils.deterministic
    was_filling, was_on = memory.fill_uninitialized_memory, torch.are_deterministic_algorithms_enabled()
    was_warning = torch.is_deterministic_algorithms_warn_only_enabled()
    torch.use_deterministic_algorithms(True)  # with warn_only, attention's backward warns and adds in any order
    memory.fill_uninitialized_memory = False  # it finds bugs, and takes a pass over all memory
    try:
        yield
    finally:
        torch.use_deterministic_algorithms(was_on, warn_only=was_warning)
        memory.fill_uninitialized_memory = was_filling
