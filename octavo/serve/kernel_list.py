"""The kernels that a start asked for, by name, beside Triton's cache: where all are there, the next start asks for none."""

import contextlib
import hashlib
import json
import os
import tempfile
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

import octavo
from octavo import env
from octavo.models.checkpoint.dialects import read_config
from octavo.ops._runtime.kernel_requests.triton import TRITON_VERSION, CacheEntry
from octavo.serve.engine import EngineConfig

_FOLDER = "octavo-lists"
_LIMITS = (  # of EngineConfig, those that kernels depend on
    "max_num_seqs", "max_num_batched_tokens", "max_model_len", "enforce_eager", "enable_return_routed_experts", "warm_up"
)


class KernelList:
    """The list of a checkpoint's shapes under one choice of numerics and limits, on one kind of GPU.

    Args:
        path: of the checkpoint, of which config.json is read.
        asked: load_for_inference's arguments.
        config: the engine's.
        device: a GPU.
    Raises:
        CheckpointError: no config.json that octavo reads.
    """

    def __init__(self, path: Path, asked: dict[str, Any], config: EngineConfig, device: torch.device) -> None:
        what = {
            "model": read_config(path),
            "asked": {name: str(value) for name, value in asked.items() if name != "device"},
            "limits": {name: getattr(config, name) for name in _LIMITS},
            "gpu": (torch.cuda.get_device_name(device), torch.cuda.get_device_capability(device)),
            "versions": (octavo.__version__, torch.__version__, TRITON_VERSION, _sources()),
        }
        name = hashlib.sha256(json.dumps(what, sort_keys=True).encode()).hexdigest()
        self._file = Path(env.triton_cache_dir(), _FOLDER, f"{name}.json")

    def is_complete(self) -> bool:
        """Whether there is such a list, and each kernel of it can be read."""
        try:
            return all(CacheEntry(*entry).is_there() for entry in json.loads(self._file.read_text()))
        except (OSError, ValueError, TypeError):
            return False

    def write(self, entries: Iterable[CacheEntry]) -> None:
        """Keep a list; a disk that takes nothing is no error."""
        with contextlib.suppress(OSError):
            self._file.parent.mkdir(parents=True, exist_ok=True)
            descriptor, name = tempfile.mkstemp(dir=self._file.parent)
            with os.fdopen(descriptor, "w") as file:
                json.dump(sorted(entries), file)
            os.replace(name, self._file)


def _sources() -> list[tuple[str, int, int]]:
    """Of the files that kernels are made of: what changes with them."""
    folder = Path(octavo.__file__).parent
    files = [*sorted(Path(folder, "ops").rglob("*.py")), *sorted(Path(folder, "serve", "engine").rglob("*.py"))]
    return [(str(file.relative_to(folder)), file.stat().st_size, file.stat().st_mtime_ns) for file in files]
