"""Step checkpoints: whole or not there, found again after any crash, and servable as they are.

A checkpoint directory `step-00000010` holds model/ (a Hugging Face checkpoint in high precision with its tokenizer),
trainer.safetensors (masters, moments, delayed-scaling buffers, random-number state), trainer.json (step, config,
architecture, numerics) and manifest.json (every file's size and SHA-256). LATEST beside them names the newest.
"""

import dataclasses
import hashlib
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file

from octavo import __version__
from octavo.errors import CheckpointError, StorageError
from octavo.models import Decoder
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.tokenizer import Tokenizer, tokenizer_fingerprint
from octavo.run.atomic import remove_directory, remove_leftovers, write_atomic

LATEST = "LATEST"
MODEL_DIR = "model"
_STATE, _DESCRIPTION, _MANIFEST = "trainer.safetensors", "trainer.json", "manifest.json"
_PREFIX = "step-"


@dataclasses.dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that was found whole.

    Attributes:
        path: its directory.
        description: trainer.json.
    """

    path: Path
    description: dict[str, Any]

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return int(self.description["step"])

    def load_state(self) -> dict[str, torch.Tensor]:
        """trainer.safetensors, on the CPU."""
        try:
            return load_file(self.path / _STATE)
        except (OSError, SafetensorError) as error:
            raise CheckpointError(f"{self.path / _STATE} cannot be read: {error}") from None


class CheckpointStore:
    """The checkpoints of one run.

    Args:
        root: their directory; made at the first save.
        keep: how many of the newest stay.
    """

    def __init__(self, root: Path, keep: int = 2) -> None:
        self.root = root
        self.keep = keep

    def save(
        self, description: Mapping[str, Any], state: Mapping[str, torch.Tensor], write_model: Callable[[Path], None]
    ) -> Path:
        """Write a checkpoint; a kill at any moment leaves the older ones and LATEST as they were.

        Args:
            description: plain JSON values; "step" names the directory.
            state: name -> tensor.
            write_model: writes the servable checkpoint into the (new) directory that it is given.
        Returns:
            The checkpoint's directory.
        Raises:
            StorageError: the disk refuses it; the message names the last good checkpoint, which stays.
        """
        path = self.path_of(description["step"])
        try:
            return self._save(path, description, state, write_model)
        except StorageError as error:
            last = self.newest()
            left = "there is no earlier one" if last is None else f"the last good one is {last}"
            raise StorageError(error.errno, f"checkpoint of step {description['step']}: {error}; {left}") from error

    def _save(
        self,
        path: Path,
        description: Mapping[str, Any],
        state: Mapping[str, torch.Tensor],
        write_model: Callable[[Path], None],
    ) -> Path:
        with atomic_directory(path, may_replace=lambda _: True) as directory:
            write_model(directory / MODEL_DIR)
            save_file({name: tensor.detach().cpu().contiguous() for name, tensor in state.items()}, directory / _STATE)
            _write_json(directory / _DESCRIPTION, description)
            _write_json(directory / _MANIFEST, _make_manifest(directory))
        write_atomic(self.root / LATEST, path.name + "\n")
        self._prune(path)
        return path

    def path_of(self, step: int) -> Path:
        """The directory of a step's checkpoint."""
        return self.root / f"{_PREFIX}{step:08d}"

    def newest(self) -> Path | None:
        """The checkpoint that LATEST names, unread; None where there is none."""
        pointer = self.root / LATEST
        path = self.root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        return path if path is not None and path.is_dir() else None

    def find_latest(self) -> Checkpoint | None:
        """The checkpoint that LATEST names, or else the newest whole one.

        Returns:
            None where the run has no checkpoint at all.
        Raises:
            CheckpointError: there are checkpoints and every one of them is damaged.
        """
        remove_leftovers(self.root)
        candidates = self._candidates()
        for path in candidates:
            damage = find_damage(path)
            if damage is None:
                return Checkpoint(path, json.loads((path / _DESCRIPTION).read_text(encoding="utf-8")))
            warnings.warn(f"checkpoint {path} is skipped: {damage}; trying an older one", stacklevel=2)
        if candidates:
            raise CheckpointError(
                f"no checkpoint under {self.root} is whole ({len(candidates)} tried); start over with --no-resume"
            )
        return None

    def _prune(self, newest: Path) -> None:
        """Remove what is too old, and what a run that was set back to an older step left ahead of it."""
        ahead = [path for path in self._directories() if path.name > newest.name]
        for path in (*ahead, *self._directories()[len(ahead) + self.keep :]):
            remove_directory(path)

    def _candidates(self) -> list[Path]:
        """LATEST's first, then the others from new to old."""
        directories = self._directories()
        pointer = self.root / LATEST
        named = self.root / pointer.read_text(encoding="utf-8").strip() if pointer.is_file() else None
        if named in directories:
            directories.remove(named)
            directories.insert(0, named)
        elif named is not None:
            warnings.warn(f"{pointer} names {named.name}, which is not there; trying the newest one", stacklevel=3)
        return directories

    def _directories(self) -> list[Path]:
        """All step directories, from new to old."""
        return sorted((path for path in self.root.glob(f"{_PREFIX}*") if path.is_dir()), reverse=True)


def describe_model(model: Decoder, tokenizer: Tokenizer) -> dict[str, Any]:
    """Versions, architecture and tokenizer."""
    architecture = dataclasses.asdict(model.config)
    return {
        "octavo": __version__,
        "torch": torch.__version__,
        "architecture": {key: list(x) if isinstance(x, tuple) else x for key, x in architecture.items()},
        "tokenizer_fingerprint": tokenizer_fingerprint(tokenizer),
    }


def changes(before: Mapping[str, Any], after: Mapping[str, Any]) -> dict[str, str]:
    """The keys of `after`, a nested mapping, whose values are others in `before`.

    Returns:
        dotted key -> "key was ..., is ...", for a person.
    """
    theirs, ours = dict(flatten(before)), dict(flatten(after))
    return {key: f"{key} was {theirs.get(key)!r}, is {new!r}" for key, new in ours.items() if theirs.get(key) != new}


def flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    """(dotted key, value) of a nested mapping."""
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value


def find_damage(path: Path) -> str | None:
    """Why a checkpoint directory is not whole, or None if every byte is as it was written."""
    try:
        manifest = json.loads((path / _MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            file = path / name
            size = file.stat().st_size
            if size != entry["num_bytes"]:
                return f"{name} has {size} bytes instead of {entry['num_bytes']}"
            if _digest(file) != entry["sha256"]:
                return f"the content of {name} is not what was written (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{_MANIFEST} cannot be used ({type(error).__name__}: {error})"
    return None


def _make_manifest(directory: Path) -> dict[str, Any]:
    files = sorted(path for path in directory.rglob("*") if path.is_file())
    return {
        str(path.relative_to(directory)): {"num_bytes": path.stat().st_size, "sha256": _digest(path)} for path in files
    }


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def _write_json(path: Path, values: Mapping[str, Any]) -> None:
    path.write_text(json.dumps(values, indent=2) + "\n", encoding="utf-8")
