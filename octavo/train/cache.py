"""The token cache on disk: directories named by what they were made from, written whole, made again where damaged."""

import contextlib
import fcntl
import json
import warnings
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.storage import writing

META_FILE = "meta.json"


def open_entry(root: Path, fingerprint: str, write: Callable[[Path], Mapping[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Find an entry of the cache, or make it.

    Args:
        root: the cache.
        fingerprint: of everything that decides the entry's content.
        write: fills a new directory with files and returns what to remember about them, as plain JSON values.
    Returns:
        (the entry's directory, what write returned). A failure or a kill while writing leaves nothing. Of jobs that
        want an entry at the same time one makes it, and the others wait.
    """
    entry = root / fingerprint
    if _damage(entry) is not None:
        with _alone(entry):
            if (damage := _damage(entry)) is not None:
                _make(entry, damage, write)
    return entry, json.loads((entry / META_FILE).read_text(encoding="utf-8"))


def _make(entry: Path, damage: str, write: Callable[[Path], Mapping[str, Any]]) -> None:
    if damage:
        warnings.warn(f"the token cache {entry} is damaged and is made again ({damage})", stacklevel=4)
    with atomic_directory(entry, may_replace=lambda _: True) as directory:
        meta = dict(write(directory))
        meta["num_bytes"] = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
        (directory / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")


@contextlib.contextmanager
def _alone(entry: Path) -> Iterator[None]:
    """Hold an entry's lock, which the system takes back when the process dies; on a file system without locks, none."""
    with writing(entry):
        entry.parent.mkdir(parents=True, exist_ok=True)
        file = (entry.parent / f".{entry.name}.lock").open("a")
    with file:
        with contextlib.suppress(OSError):
            fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _damage(entry: Path) -> str | None:
    """Why an entry has not all its bytes; empty where there is none, None where it has."""
    if not entry.is_dir():
        return ""
    try:
        sizes = json.loads((entry / META_FILE).read_text(encoding="utf-8"))["num_bytes"]
        is_whole = all((entry / name).stat().st_size == size for name, size in sizes.items())
        return None if is_whole else "its files have another size than they should"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        return f"{type(error).__name__}: {error}"
