"""A CPU whose cores are busy with other processes."""

import os

import torch


def threads_advice(device: torch.device) -> str:
    """What to set where torch has more threads than cores are free, which wait for each other; else nothing."""
    load = os.getloadavg()[0]
    num_free = max(1, (os.cpu_count() or 1) - round(load))
    if device.type != "cpu" or torch.get_num_threads() <= num_free:
        return ""
    return f"load {load:.1f}: on cores that others use set OMP_NUM_THREADS={num_free}"
