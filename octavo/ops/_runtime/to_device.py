"""Copies from the host that the CPU does not wait for."""

from collections.abc import Sequence

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor without making the CPU wait for what the GPU has to do: from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)


def send(values: Sequence[object], dtype: torch.dtype, device: torch.device) -> torch.Tensor:
    """Numbers, in lists as torch.tensor takes them, as a tensor on a device, in the same way."""
    return to_device(torch.tensor(values, dtype=dtype), device)
