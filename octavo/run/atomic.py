"""Small files and directories that are there whole or not at all; models/checkpoint/atomic.py makes the directories."""

import os
import shutil
import uuid
from collections.abc import Iterable
from pathlib import Path

from octavo.models.checkpoint.atomic import sync_to_disk
from octavo.models.checkpoint.storage import writing

_TEMPORARY = (".*.tmp-*", ".*.old-*")  # atomic_directory's names, and ours


def write_atomic(path: Path, text: str) -> None:
    """Write a small file: readers see the old one or the new one, never a part.

    Raises:
        StorageError: the disk refuses it; the old one stays.
    """
    staging = path.with_name(f".{path.name}.tmp-{uuid.uuid4().hex[:8]}")
    with writing(path):
        try:
            with staging.open("w", encoding="utf-8") as file:
                file.write(text)
                file.flush()
                os.fsync(file.fileno())
            os.replace(staging, path)
        except OSError:
            staging.unlink(missing_ok=True)
            raise
        sync_to_disk(path.parent)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no half of it is ever seen under its name."""
    removed = path.with_name(f".{path.name}.old-{uuid.uuid4().hex[:8]}")
    os.replace(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def move_aside(directory: Path, names: Iterable[str]) -> Path | None:
    """Keep an earlier run's files in directory/previous-N, which is returned; None where there were none."""
    present = [name for name in names if (directory / name).exists()]
    if not present:
        return None
    found = [path.name.removeprefix("previous-") for path in directory.glob("previous-*")]
    numbers = [int(number) for number in found if number.isdecimal()]  # others have a person's name
    aside = directory / f"previous-{max(numbers, default=0) + 1}"
    aside.mkdir()
    for name in present:
        (directory / name).rename(aside / name)
    return aside


def remove_leftovers(parent: Path) -> None:
    """Remove what writers that were killed left behind in a directory."""
    for leftover in (path for pattern in _TEMPORARY for path in parent.glob(pattern)):
        if leftover.is_dir():
            shutil.rmtree(leftover, ignore_errors=True)
        else:
            leftover.unlink(missing_ok=True)
