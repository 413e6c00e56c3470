"""The token cache on disk: directories named by what they were made from, written whole, made again where damaged."""

import json
import warnings
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from octavo.models.checkpoint.atomic import atomic_directory

META_FILE = "meta.json"


def open_entry(root: Path, fingerprint: str, write: Callable[[Path], Mapping[str, Any]]) -> tuple[Path, dict[str, Any]]:
    """Find an entry of the cache, or make it.

    Args:
        root: the cache.
        fingerprint: of everything that decides the entry's content.
        write: fills a new directory with files and returns what to remember about them, as plain JSON values.
    Returns:
        (the entry's directory, what write returned). A failure or a kill while writing leaves nothing.
    """
    entry = root / fingerprint
    if not _is_whole(entry):
        with atomic_directory(entry, may_replace=lambda _: True) as directory:
            meta = dict(write(directory))
            meta["num_bytes"] = {file.name: file.stat().st_size for file in sorted(directory.iterdir())}
            (directory / META_FILE).write_text(json.dumps(meta, indent=2) + "\n", encoding="utf-8")
    return entry, json.loads((entry / META_FILE).read_text(encoding="utf-8"))


def _is_whole(entry: Path) -> bool:
    """Whether an entry is there with all its bytes."""
    if not entry.is_dir():
        return False
    try:
        sizes = json.loads((entry / META_FILE).read_text(encoding="utf-8"))["num_bytes"]
        if all((entry / name).stat().st_size == size for name, size in sizes.items()):
            return True
        reason = "its files have another size than they should"
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        reason = f"{type(error).__name__}: {error}"
    warnings.warn(f"the token cache {entry} is damaged and is made again ({reason})", stacklevel=3)
    return False
