"""Documents: text files, directories, JSON lines or this Python's own sources, read one at a time, and their split."""

import hashlib
import json
import os
import sysconfig
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TypeVar

from octavo.errors import DataError
from octavo.run.folder_lock import LOCK_FILE
from octavo.run.metrics import METRICS_FILE
from octavo.train.config import DataSection

T = TypeVar("T")
STDLIB = "stdlib"
# Tests and installed packages vary from machine to machine; what is left is 11 to 12 MB on every Python.
_STDLIB_SKIPPED = {"test", "tests", "idle_test", "site-packages", "dist-packages", "__pycache__"}
_PIECE_CHARS = 8192  # a single text file is cut at blank lines into documents of about this size


def read_documents(path: str, data: DataSection) -> Iterator[str]:
    """Every document that is not blank, in a fixed order.

    Args:
        path: data.path or data.validation_path: a text file (cut at blank lines), a .jsonl file (a document a
            line), a directory (a document a file), or "stdlib".
        data: suffixes, text_field and max_bytes.
    Raises:
        DataError: nothing there, no readable file, a file that is no UTF-8, a line that is no JSON object or lacks
            the text field.
    """
    num_bytes = 0
    for document in _read_all(path, data):
        if not document.strip():
            continue
        yield document
        num_bytes += len(document.encode())
        if data.max_bytes and num_bytes >= data.max_bytes:
            return
    if num_bytes == 0:
        raise DataError(f"{path} holds no text: every file in it is empty or blank")


def is_validation(document: str, fraction: float) -> bool:
    """Whether a document is kept for validation: its own hash decides, so copies never land on both sides."""
    digest = hashlib.sha256(document.encode()).digest()
    return int.from_bytes(digest[:8], "big") < fraction * 2**64


def read_split(
    data: DataSection, split: str, read: Callable[[str, DataSection], Iterator[T]], key: Callable[[T], str] = str
) -> Iterator[T]:
    """The records of one side, "train" or "validation".

    Args:
        read: gives those of a path.
        key: the text whose hash decides on which side a record is.
    """
    if data.validation_path:
        yield from read(data.path if split == "train" else data.validation_path, data)
        return
    for record in read(data.path, data):
        if is_validation(key(record), data.validation_fraction) == (split == "validation"):
            yield record


def _read_all(path: str, data: DataSection) -> Iterator[str]:
    if path == STDLIB:
        root = Path(sysconfig.get_path("stdlib"))
        for file in walk(root, (".py",), _STDLIB_SKIPPED):
            yield _read_text(file)
        return
    place = Path(path)
    if place.is_dir():
        files = walk(place, data.suffixes, {"__pycache__"})
        if not files:
            raise DataError(f"{path} has no file that ends in {', '.join(data.suffixes)}; set data.suffixes")
        for file in files:
            yield from _read_jsonl(file, data.text_field) if file.suffix == ".jsonl" else (_read_text(file),)
    elif place.is_file():
        yield from _read_jsonl(place, data.text_field) if place.suffix == ".jsonl" else _read_pieces(place)
    else:
        raise DataError(f"{path}: no such file or directory; data.path takes a file, a directory or {STDLIB!r}")


def walk(root: Path, suffixes: tuple[str, ...], skipped: set[str]) -> list[Path]:
    """The files under a directory that end so, in a fixed order; hidden folders, runs' and those named are left out."""
    files: list[Path] = []
    for folder, subfolders, names in os.walk(root):
        kept = (name for name in subfolders if name not in skipped and not name.startswith("."))
        subfolders[:] = sorted(name for name in kept if not _is_run(Path(folder, name)))
        files += [Path(folder, name) for name in sorted(names) if name.endswith(suffixes)]
    return files


def _is_run(folder: Path) -> bool:
    """Whether a run writes there: text that grew with it could not be gone on with."""
    return (folder / LOCK_FILE).is_file() and (folder / METRICS_FILE).is_file()


def _read_text(path: Path) -> str:
    try:
        return path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise DataError(f"{path} is not UTF-8 text (byte {error.start}); convert it or leave it out") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def read_lines(path: Path) -> Iterator[str]:
    """The lines of a text file; DataError where it is no UTF-8 or cannot be read."""
    try:
        with path.open(encoding="utf-8") as file:
            yield from file
    except UnicodeDecodeError:
        raise DataError(f"{path} is not UTF-8 text; convert it or leave it out") from None
    except OSError as error:
        raise DataError(f"{path} cannot be read: {error.strerror}") from None


def _read_pieces(path: Path) -> Iterator[str]:
    """Cut at the first blank line after _PIECE_CHARS, and at any line end after four times that."""
    lines: list[str] = []
    num_chars = 0
    for line in read_lines(path):
        lines.append(line)
        num_chars += len(line)
        if num_chars >= (_PIECE_CHARS if not line.strip() else 4 * _PIECE_CHARS):
            yield "".join(lines)
            lines, num_chars = [], 0
    yield "".join(lines)


def _read_jsonl(path: Path, text_field: str) -> Iterator[str]:
    for number, line in enumerate(read_lines(path), start=1):
        if not line.strip():
            continue
        try:
            record = json.loads(line)
        except json.JSONDecodeError as error:
            raise DataError(f"{path}, line {number}: not JSON: {error.msg}") from None
        text = record.get(text_field) if isinstance(record, dict) else None
        if not isinstance(text, str):
            found = sorted(record) if isinstance(record, dict) else type(record).__name__
            raise DataError(f"{path}, line {number}: no text under {text_field!r}; found {found}; set data.text_field")
        yield text
