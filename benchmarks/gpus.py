"""The GPUs that a command may spread its processes over."""

import torch

from octavo.env import child_environment


def visible_gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    names = [name for name in child_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[:count] if names else [str(index) for index in range(count)]
