"""torchtitan 0.3's Trainer on a CPU and torch 2.13. To be imported before the rest of torchtitan.

It asks an accelerator's module for its name and memory, and sets timeouts by a function that torch has later than 2.13.
"""

from types import SimpleNamespace

import torch
from torchtitan.tools import utils

if not hasattr(torch.distributed, "set_timeout"):
    torch.distributed.set_timeout = lambda timeout, group: None
utils.device_type = "cpu"
utils.device_module = SimpleNamespace(
    set_device=lambda device: None,
    current_device=lambda: 0,
    device_count=lambda: 1,
    get_device_name=lambda device: "cpu",
    get_device_properties=lambda device: SimpleNamespace(total_memory=1 << 30),
    reset_peak_memory_stats=lambda: None,
    empty_cache=lambda: None,
    memory_stats=lambda device: {},
    synchronize=lambda: None,
    Stream=torch.cpu.Stream,
)
