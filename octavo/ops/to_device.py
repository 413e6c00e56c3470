"""Copies from the host that nobody waits for."""

import torch


def to_device(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """Copy a CPU tensor without making the CPU wait for what the GPU has to do: from pinned memory."""
    return x.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else x.to(device)
