"""Directories that appear whole or not at all."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.errors import CheckpointError
from octavo.models.checkpoint.storage import writing


@contextlib.contextmanager
def atomic_directory(path: str | Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    """A temporary directory beside `path` that takes its name when the block ends without an error.

    A process killed at any moment leaves either nothing at `path`, the old directory, or the whole new one; at worst
    a hidden directory `.NAME.tmp-*` or `.NAME.old-*` stays beside it.

    Args:
        path: must not exist, be an empty directory, or be one that may_replace accepts, which is replaced as a whole.
        may_replace: whether an existing directory is one of ours.
    Yields:
        The directory to write into.
    Raises:
        CheckpointError: path is taken.
        StorageError: the disk refuses it; path is as it was.
    """
    target = Path(path).absolute()
    with writing(target):
        yield from _written_whole(target, may_replace)


def _written_whole(target: Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or may_replace(target))):
        raise CheckpointError(
            f"{target} exists and octavo did not write it, so it is not replaced; choose another path"
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(target, "tmp")
    staging.mkdir()
    try:
        yield staging
        for file in (*staging.rglob("*"), staging):
            sync_to_disk(file)
        _replace_directory(staging, target)
        sync_to_disk(target.parent)
    except BaseException:
        shutil.rmtree(staging, ignore_errors=True)
        raise


def _replace_directory(staging: Path, target: Path) -> None:
    if not target.exists():
        staging.rename(target)
        return
    old = _sibling(target, "old")
    target.rename(old)
    try:
        staging.rename(target)
    except OSError:
        old.rename(target)
        raise
    sync_to_disk(target.parent)  # else a power cut could keep the deletion and lose the new name
    shutil.rmtree(old, ignore_errors=True)


def _sibling(target: Path, kind: str) -> Path:
    return target.parent / f".{target.name}.{kind}-{uuid.uuid4().hex[:8]}"


def sync_to_disk(path: Path) -> None:
    """Flush a file or directory to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)
