"""Whether all ranks of a job run the same: config, versions, data and numerics, compared once before the first step.

Processes that a server starts are compared with it before they are told what to load.
"""

import platform
from collections.abc import Mapping
from importlib import metadata
from typing import Any

import torch
import torch.distributed as dist

from octavo import __version__
from octavo.errors import ConfigError

_MISSING = "(not set)"
_SAME_FILES = "start every rank from the same files, with the same versions"


def versions() -> dict[str, str]:
    """The versions that decide this process's bits; plain strings, which any version of octavo can read."""
    triton = next((d.version for d in metadata.distributions(name="triton")), "none")
    own = {"octavo": __version__, "python": platform.python_version(), "torch": str(torch.__version__)}
    return {**own, "triton": triton}


def describe_process() -> dict[str, str]:
    """The versions and the kind of device that decide this process's bits."""
    device = torch.cuda.get_device_name() if torch.cuda.is_available() else platform.machine()
    return {**versions(), "device": device}


def check_versions(starter: str, theirs: Mapping[str, str], own: str) -> None:
    """Refuse to work for a process that runs other versions than this one.

    Args:
        starter: that process in a word, such as "rank 0".
        theirs: its versions().
        own: this process in a word.
    Raises:
        ConfigError: names what differs, both processes and both values.
    """
    advice = f"octavo or torch was installed again while {starter} ran: restart the server"
    _refuse_difference({starter: theirs, own: versions()}, advice)


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
    _refuse_difference({f"rank {rank}": theirs for rank, theirs in enumerate(everyone)}, _SAME_FILES)


def _refuse_difference(everyone: Mapping[str, Mapping[str, str]], advice: str) -> None:
    """Raise where facts of one process are not those of the first one."""
    (first, firsts), *others = everyone.items()
    for key in dict.fromkeys(key for theirs in everyone.values() for key in theirs):
        for name, theirs in others:
            if (value := theirs.get(key, _MISSING)) != (wanted := firsts.get(key, _MISSING)):
                raise ConfigError(
                    f"all ranks must run the same; {key} is {wanted} on {first} and {value} on {name}; {advice}"
                )
