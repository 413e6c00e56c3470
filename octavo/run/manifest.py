"""The manifest of a checkpoint directory: every file's size and SHA-256, made by the ranks together, and checked."""

import hashlib
import json
import re
from collections.abc import Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from octavo.models.checkpoint.storage import writing

MANIFEST = "manifest.json"


def find_damage(path: Path) -> str | None:
    """Why a checkpoint directory is not whole, or None if every byte is as it was written."""
    try:
        manifest = json.loads((path / MANIFEST).read_text(encoding="utf-8"))
        for name, entry in manifest.items():
            size = (path / name).stat().st_size
            if size != entry["num_bytes"]:
                return f"{name} has {size} bytes instead of {entry['num_bytes']}"
        for name, digest in _digests(path, manifest).items():
            if digest != manifest[name]["sha256"]:
                return f"the content of {name} is not what was written (SHA-256 differs)"
    except FileNotFoundError as error:
        return f"{Path(error.filename).name} is missing"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{MANIFEST} cannot be used ({type(error).__name__}: {error})"
    return None


def make_manifest(directory: Path, names: list[str], rank: int, num_ranks: int) -> dict[str, Any]:
    """The rows of a rank: its own shards, and a share of the other files."""
    with writing(directory):
        own = [name for index, name in enumerate(names) if _writer_of(name, index) % num_ranks == rank]
        digests = _digests(directory, own)
        return {name: {"num_bytes": (directory / name).stat().st_size, "sha256": digests[name]} for name in own}


def _writer_of(name: str, index: int) -> int:
    """The rank that wrote a shard, by the name that torch gives it; any of other files."""
    found = re.search(r"__(\d+)_\d+\.distcp$", name)
    return int(found[1]) if found else index


def _digests(directory: Path, names: Iterable[str]) -> dict[str, str]:
    """SHA-256 of files, several at a time."""
    listed = list(names)
    with ThreadPoolExecutor() as pool:
        return dict(zip(listed, pool.map(_digest, (directory / name for name in listed)), strict=True))


def _digest(path: Path) -> str:
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()
