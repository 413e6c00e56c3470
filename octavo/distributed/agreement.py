"""Whether all ranks of a job run the same: config, versions, data and numerics, compared once before the first step."""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from octavo import __version__
from octavo.errors import ConfigError

_MISSING = "(not set)"


def describe_process() -> dict[str, str]:
    """The versions and the kind of device that decide this process's bits."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    triton = next((d.version for d in metadata.distributions(name="triton")), "none")
    versions = {"octavo": __version__, "python": platform.python_version(), "torch": torch.__version__}
    return {**versions, "triton": triton, "device": device}


def check_agreement(facts: Mapping[str, Any], group: Any = None) -> None:
    """Compare facts of all ranks; every rank must call this, and every rank raises where they differ.

    Args:
        facts: dotted key -> value with a repr, equal on all ranks if all is well.
        group: a process group; None for all ranks. Without several ranks nothing is compared.
    Raises:
        ConfigError: names the first key that differs, the ranks and their values.
    """
    if not dist.is_initialized() or dist.get_world_size(group) == 1:
        return
    mine = {key: repr(value) for key, value in facts.items()}
    everyone: list[dict[str, str]] = [{} for _ in range(dist.get_world_size(group))]
    dist.all_gather_object(everyone, mine, group=group)
    for key in dict.fromkeys(key for theirs in everyone for key in theirs):
        values = [theirs.get(key, _MISSING) for theirs in everyone]
        for rank, value in enumerate(values):
            if value != values[0]:
                raise ConfigError(
                    f"all ranks must run the same; {key} is {values[0]} on rank 0 and {value} on rank {rank}; start "
                    "every rank from the same files, with the same versions"
                )
