"""A word of warning to those who train on a CPU that is busy already."""

import torch
from rich.console import Console

from octavo.doctor.machine import threads_advice


def warn_of_busy_cpu(device: str) -> None:
    """Say on standard error how many threads to use, where torch's would wait for each other.

    Args:
        device: of the run, as its config has it; empty takes a GPU where there is one.
    """
    is_cpu = device == "cpu" or not (device or torch.cuda.is_available())
    if is_cpu and (advice := threads_advice()):
        text = f"torch uses {torch.get_num_threads()} threads, {advice}, or this can be 15 times as slow"
        Console(stderr=True).print(text, markup=False, highlight=False, soft_wrap=True)
