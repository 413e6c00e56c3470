"""Compiled kernels on disk."""

import torch


def use_checked_cache(device: torch.device) -> None:
    """Check compiled kernels from now on as they are read from disk, where there are any for this device."""
    if device.type == "cuda":
        from octavo.ops._runtime.kernel_cache import triton  # a machine without a GPU may have none

        triton.use_checked_cache()
