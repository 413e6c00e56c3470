"""Triton's cache of compiled kernels on disk, checked as it is read, and without which a process goes on.

Triton makes a key of the kernel's source, its own version, the GPU's architecture and the options; what is another's is
under another key. It trusts what it finds there: a file that was cut short ends the process, and so does a disk that
takes no more.
"""

import atexit
import contextlib
import functools
import hashlib
import json
import logging
import os
import shutil
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from triton import knobs
from triton.runtime.cache import FileCacheManager

logger = logging.getLogger(__name__)


class CheckedCache(FileCacheManager):
    """Triton's files, with a checksum of each; arguments are FileCacheManager's.

    An entry that is not whole counts as missing, and is written again. A folder may be moved: files are looked for
    beside each other. Where the disk takes nothing, new kernels go to a folder that ends with the process.
    """

    def __init__(self, key: str, override: bool = False, dump: bool = False) -> None:
        self._sums: dict[str, str] = {}
        try:
            super().__init__(key, override=override, dump=dump)
        except OSError as error:
            self._leave(error)

    def put(self, data: Any, filename: str, binary: bool = True) -> str:
        """Write a file, whole or not at all.

        Returns:
            Its path.
        """
        content = data if isinstance(data, bytes) else str(data).encode()
        self._sums[filename] = hashlib.sha256(content).hexdigest()
        try:
            return str(super().put(content, filename))
        except OSError as error:
            for half in Path(self.cache_dir).glob(f"tmp.pid_{os.getpid()}_*"):
                shutil.rmtree(half, ignore_errors=True)
            self._leave(error)
            return str(super().put(content, filename))

    def put_group(self, filename: str, group: dict[str, str]) -> str:
        """Note which files belong together, and their checksums."""
        sums = {name: self._sums[name] for name in group if name in self._sums}
        return self.put(json.dumps({"child_paths": group, "sha256": sums}), f"__grp__{filename}", binary=False)

    def get_group(self, filename: str) -> dict[str, str] | None:
        """The files that belong together, by name; None where one is missing or not as it was written."""
        path = self._make_path(f"__grp__{filename}")
        if not os.path.exists(path):
            return None
        try:
            entry = json.loads(Path(path).read_text())
            found = {name: self._make_path(name) for name in entry["child_paths"]}
            sums = entry.get("sha256", {})  # Triton itself notes none
            is_whole = all(_is_whole(Path(place), sums.get(name)) for name, place in found.items())
        except (OSError, ValueError, LookupError, TypeError, AttributeError):
            is_whole = False
        if not is_whole:
            logger.info("an entry of the kernel cache is damaged and is made again: %s", path)
            return None
        return found

    def _leave(self, error: OSError) -> None:
        """Go on in a folder of this process."""
        _warn_of(knobs.cache.dir, error.strerror or str(error))
        self.cache_dir = os.path.join(_own_folder(), self.key)
        self.lock_path = os.path.join(self.cache_dir, "lock")
        os.makedirs(self.cache_dir, exist_ok=True)


def use_checked_cache() -> None:
    """Let Triton keep its kernels in a CheckedCache, unless it was told of a cache manager (TRITON_CACHE_MANAGER)."""
    if knobs.cache.manager_class is None:
        knobs.cache.manager_class = CheckedCache


class Compilations:
    """Kernels that Triton compiled, and that it found on disk, with the seconds that each took."""

    def __init__(self) -> None:
        self.compiled: list[tuple[str, float]] = []
        self.num_found = 0

    def note(self, *, metadata: dict[str, Any], times: Any, cache_hit: bool, **_: Any) -> None:
        """A listener of Triton's."""
        if cache_hit:
            self.num_found += 1
        else:
            self.compiled.append((metadata["name"], times.total / 1e6))


@contextlib.contextmanager
def counting_compilations() -> Iterator[Compilations]:
    """Count what is compiled within, in any thread."""
    found, former = Compilations(), knobs.compilation.listener

    def note(**told: Any) -> None:
        found.note(**told)
        if former is not None:
            former(**told)

    knobs.compilation.listener = note
    try:
        yield found
    finally:
        knobs.compilation.listener = former


def _is_whole(path: Path, checksum: str | None) -> bool:
    content = path.read_bytes()
    if checksum is not None:
        return hashlib.sha256(content).hexdigest() == checksum
    if path.suffix == ".json":
        json.loads(content)
    return bool(content)


@functools.cache  # once a process
def _own_folder() -> str:
    folder = tempfile.mkdtemp(prefix="octavo-kernels-")
    atexit.register(shutil.rmtree, folder, ignore_errors=True)
    return folder


@functools.cache  # once a process
def _warn_of(folder: str, reason: str) -> None:
    text = "kernels cannot be kept in %s (%s) and are compiled again at the next start; set TRITON_CACHE_DIR"
    logger.warning(text, folder, reason)
