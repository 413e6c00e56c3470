"""The kernels that a start asked for, kept beside Triton's cache: where all are there, the next start asks for none."""

import contextlib
import hashlib
import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo import env
from octavo.models.checkpoint.dialects import read_config
from octavo.ops._runtime.kernel_requests.triton import CacheEntry, compiler_version
from octavo.run.atomic import write_atomic
from octavo.serve.engine import EngineConfig
from octavo.serve.model_choice import numerics_asked

_FOLDER = "octavo-lists"
_SOURCES = ("models", "nn", "numerics", "ops", "serve")  # what decides which kernels a step launches
_LIMITS = (  # so do these of EngineConfig
    "max_num_seqs",
    "max_num_batched_tokens",
    "max_model_len",
    "enforce_eager",
    "enable_return_routed_experts",
    "warm_up",
)


class KernelList:
    """The list of a checkpoint's shapes under one choice of numerics and limits, on one kind of GPU.

    Args:
        path: of the checkpoint, of which the config files alone are read.
        asked: load_for_inference's arguments.
        config: the engine's.
        device: a GPU.

    Raises:
        CheckpointError: no config.json that octavo reads.
        RecipeError: see octavo.Numerics.
    """

    def __init__(self, path: Path, asked: dict[str, Any], config: EngineConfig, device: torch.device) -> None:
        numerics = numerics_asked(path, asked)
        what = {
            "model": read_config(path),
            "numerics": (repr(numerics), str(asked["dtype"])),
            "limits": {name: getattr(config, name) for name in _LIMITS},
            "gpu": (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)),
            "versions": (_sources(), torch.__version__, compiler_version()),
        }
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        self.file = Path(env.triton_cache_dir(), _FOLDER, f"{name}.json")

    def is_complete(self) -> bool:
        """Whether there is such a list, and each kernel of it can be read."""
        try:
            entries = [CacheEntry(*entry) for entry in json.loads(self.file.read_text())]
            return bool(entries) and all(entry.is_there() for entry in entries)
        except (OSError, ValueError, TypeError):
            return False

    def write(self, entries: Iterable[CacheEntry]) -> None:
        """Keep a list, whole or not at all; a disk that takes nothing is no error."""
        with contextlib.suppress(OSError):
            self.file.parent.mkdir(parents=True, exist_ok=True)
            write_atomic(self.file, json.dumps(sorted(entries)))


def _sources() -> str:
    """A hash of octavo's own, so that a changed kernel or step asks again."""
    found = hashlib.sha256()
    for folder in _SOURCES:
        for file in sorted(Path(octavo.__file__).parent.joinpath(folder).rglob("*.py")):
            found.update(file.read_bytes())
    return found.hexdigest()
