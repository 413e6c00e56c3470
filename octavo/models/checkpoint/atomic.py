"""Directories that appear whole or not at all."""

import contextlib
import os
import shutil
import uuid
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

from octavo.distributed.outcome import is_first, together
from octavo.errors import CheckpointError, StorageError
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
        CheckpointError: path is taken, at entry or by another process meanwhile.
        StorageError: the disk refuses it; path is as it was.
    """
    target = Path(path).absolute()
    with writing(target):
        yield from _written_whole(target, may_replace)


@contextlib.contextmanager
def shared_directory(path: str | Path, may_replace: Callable[[Path], bool], group: Any) -> Iterator[Path]:
    """atomic_directory that all ranks of a group write into: the first one makes it and gives it its name.

    A collective, at entry and at the end; what its block raises it must raise on every rank, as `together` does.

    Args:
        path: the same on all ranks, on a file system that they share.
        may_replace: as atomic_directory's.
        group: a process group; None for one process.
    Yields:
        The directory to write into.
    Raises:
        CheckpointError: path is taken; the ranks do not see the same files.
        StorageError: a disk refuses it; path is as it was.
    """
    agreed: StorageError | None = None
    try:
        with contextlib.ExitStack() as stack:
            entered = together(
                group, lambda: stack.enter_context(atomic_directory(path, may_replace)) if is_first(group) else None
            )
            staging = entered[0]
            assert staging is not None, "the first rank has made it"
            together(group, lambda: _check_shared(staging))
            try:
                yield staging
            except StorageError as error:
                agreed = error
                raise
            together(group, stack.close)
    except StorageError as error:
        if group is None or agreed is None:
            raise
        # on the way out the first rank has named the directory for itself alone
        text = str(agreed).replace(str(staging), str(Path(path).absolute()))
        raise StorageError(agreed.errno, text) from error


def _check_shared(staging: Path) -> None:
    if not staging.is_dir():
        raise CheckpointError(
            f"{staging.parent} must be on a file system that all ranks share: what rank 0 made in it is not there; "
            "choose another path"
        )


def _check_free(target: Path, may_replace: Callable[[Path], bool]) -> None:
    if target.exists() and not (target.is_dir() and (not any(target.iterdir()) or may_replace(target))):
        raise CheckpointError(f"{target} exists already and is not replaced; choose another path or remove it")


def _written_whole(target: Path, may_replace: Callable[[Path], bool]) -> Iterator[Path]:
    _check_free(target, may_replace)
    target.parent.mkdir(parents=True, exist_ok=True)
    staging = _sibling(target, "tmp")
    staging.mkdir()
    try:
        yield staging
        for file in (*staging.rglob("*"), staging):
            sync_to_disk(file)
        _check_free(target, may_replace)  # another process may have been faster
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
