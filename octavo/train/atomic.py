"""Files and directories that are there whole or not at all, also after a kill or a power cut."""

import os
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

_UNFINISHED = ".unfinished-"
_REPLACED = ".replaced-"


def write_atomic(path: Path, text: str) -> None:
    """Write a small file: readers see the old one or the new one, never a part."""
    temporary = path.with_name(f"{_UNFINISHED}{path.name}-{os.getpid()}")
    temporary.write_text(text, encoding="utf-8")
    fsync(temporary)
    os.replace(temporary, path)
    fsync(path.parent)


@contextmanager
def directory_written_whole(path: Path) -> Iterator[Path]:
    """A directory under construction, which takes its name only once all its bytes are on disk.

    Args:
        path: its final place; an older directory there is replaced.
    Yields:
        A temporary directory beside it, to be filled. If filling raises, nothing is left at `path`.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{_UNFINISHED}{path.name}-{os.getpid()}")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir()
    try:
        yield temporary
        _fsync_tree(temporary)
        if path.exists():
            # No call swaps two directories everywhere; a kill between these two lines leaves neither at `path`.
            replaced = path.with_name(f"{_REPLACED}{path.name}-{os.getpid()}")
            os.replace(path, replaced)
        os.replace(temporary, path)
        fsync(path.parent)
    except BaseException:
        shutil.rmtree(temporary, ignore_errors=True)
        raise
    remove_leftovers(path.parent, path.name)


def remove_leftovers(parent: Path, name: str = "") -> None:
    """Remove what interrupted writers left behind: everything, or only what was to become `name`."""
    for prefix in (_UNFINISHED, _REPLACED):
        for leftover in parent.glob(f"{prefix}{name}*"):
            if leftover.is_dir():
                shutil.rmtree(leftover, ignore_errors=True)
            else:
                leftover.unlink(missing_ok=True)


def remove_directory(path: Path) -> None:
    """Remove a directory so that no half of it is ever seen under its name."""
    removed = path.with_name(f"{_REPLACED}{path.name}-{os.getpid()}")
    os.replace(path, removed)
    shutil.rmtree(removed, ignore_errors=True)


def fsync(path: Path) -> None:
    """Push a file's bytes, or a directory's entries, to the disk."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def _fsync_tree(root: Path) -> None:
    for path in root.rglob("*"):
        fsync(path)
    fsync(root)
