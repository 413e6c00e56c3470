"""The GPU's own energy counter, through NVML: joules since the driver was loaded."""

from collections.abc import Callable
from importlib import import_module

import torch


def energy_counter(device: torch.device | str) -> tuple[Callable[[], float] | None, str]:
    """A function that reads the counter, and where the number is from.

    Args:
        device: whose; a CPU has none.
    Returns:
        (function giving joules, or None where nothing can be read; how, or why not, in words).
    """
    if torch.device(device).type != "cuda":
        return None, "not measured: no GPU"
    try:
        nvml = import_module("pynvml")
    except ImportError:
        return None, "not measured: no pynvml"
    try:
        nvml.nvmlInit()
        handle = nvml.nvmlDeviceGetHandleByUUID(gpu_uuid(device))
        nvml.nvmlDeviceGetTotalEnergyConsumption(handle)
    except nvml.NVMLError as error:
        return None, f"not measured: {error}"
    return lambda: nvml.nvmlDeviceGetTotalEnergyConsumption(handle) / 1e3, "NVML energy counter"  # from millijoules


def gpu_uuid(device: torch.device | str) -> str:
    """The name under which NVML and nvidia-smi know a CUDA device, whatever CUDA_VISIBLE_DEVICES renumbers."""
    index = torch.device(device).index
    return f"GPU-{torch.cuda.get_device_properties(torch.cuda.current_device() if index is None else index).uuid}"
