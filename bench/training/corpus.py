"""Text that every machine has: sources and documents of the Python installation and its packages, as BPE tokens.

Files are known by the SHA-256 of their bytes: copies count once, the order is that of the hashes, and a file's hash
decides whether it is kept for validation. The tokens lie in a folder of the cache and are made once a machine.
"""

import argparse
import dataclasses
import hashlib
import itertools
import json
import os
import sysconfig
import tempfile
import time
from collections.abc import Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import numpy as np

from bench.record import Record
from octavo.errors import DataError
from octavo.models.tokenizer import Tokenizer, load_tokenizer, train_bpe

CACHE = Path(tempfile.gettempdir()) / "octavo-convergence"
DOCUMENTS = (".py", ".pyi", ".md", ".rst", ".txt")
HEADERS = (".h", ".hpp", ".cuh", ".cpp", ".cu", ".js")  # only where the documents are too few
_SKIPPED = {"__pycache__", ".git"}
_MIN_FILE_BYTES, _MAX_FILE_BYTES = 64, 400_000  # longer files are mostly tables that programs wrote
_CHUNK_BYTES = 8 << 20  # tokenized at once
_LAYOUT = 1  # grows when the files of the cache change their meaning


@dataclasses.dataclass(frozen=True)
class CorpusSettings:
    """What the corpus is made of.

    Args:
        roots: folders that are searched; none for this Python's own.
        vocab_size: of the byte-level BPE, at most 65,536.
        max_bytes: the files with the smallest hashes are taken until they hold so much.
        enough_bytes: headers are added where the documents hold less.
        bpe_bytes: the BPE is trained on the first training files that hold so much.
        validation_fraction: the share of files, by hash, that training never sees.
    """

    roots: tuple[str, ...] = ()
    vocab_size: int = 16384
    max_bytes: int = 260_000_000
    enough_bytes: int = 240_000_000
    bpe_bytes: int = 16_000_000
    validation_fraction: float = 0.04

    @property
    def key(self) -> str:
        """Name of the cache's folder: what is asked for, not what the machine has."""
        text = f"{_LAYOUT} {dataclasses.astuple(self)}"
        return hashlib.sha256(text.encode()).hexdigest()[:12]


@dataclasses.dataclass(frozen=True)
class Corpus:
    """The tokens and what is known of them.

    Attributes:
        folder: of the cache.
        meta: sha256 (of the files' hashes in order), num_files, num_bytes, suffixes, num_tokens (of each side),
            vocab_size, bytes_per_token, seconds.
        train: [num_tokens] uint16, memory-mapped; every file ends with the tokenizer's eos_id.
        validation: the same.
        starts: [validation files + 1] int64: where each begins in validation.
        is_python: [validation files] bool.
    """

    folder: Path
    meta: dict[str, Any]
    train: np.ndarray
    validation: np.ndarray
    starts: np.ndarray
    is_python: np.ndarray

    @property
    def tokenizer(self) -> Tokenizer:
        """What made the tokens."""
        return load_tokenizer(self.folder)

    def describe(self) -> str:
        """One sentence for people and records."""
        m = self.meta
        return (
            f"{m['num_files']:,} files ({', '.join(m['suffixes'])}) of {m['num_bytes'] / 1e6:,.0f} MB, "
            f"{m['num_tokens']['train'] / 1e6:.1f}M training and {m['num_tokens']['validation'] / 1e6:.2f}M validation "
            f"tokens of a byte-level BPE of {m['vocab_size']:,} ({m['bytes_per_token']:.2f} bytes a token), sha256 "
            f"{m['sha256'][:16]}"
        )


def open_corpus(settings: CorpusSettings | None = None, cache: Path = CACHE) -> Corpus:
    """Find the corpus in the cache, or make it (a minute or so)."""
    settings = settings or CorpusSettings()
    folder = cache / f"corpus-{settings.key}"
    if not (folder / "meta.json").is_file():
        _make(folder, settings)
    return load_corpus(folder)


def load_corpus(folder: Path) -> Corpus:
    """Open what open_corpus made."""
    meta = json.loads((folder / "meta.json").read_text())
    sides = {side: np.memmap(folder / f"{side}.bin", dtype=np.uint16, mode="r") for side in ("train", "validation")}
    starts = np.fromfile(folder / "starts.bin", dtype=np.int64)
    return Corpus(folder, meta, **sides, starts=starts, is_python=np.fromfile(folder / "is_python.bin", dtype=bool))


def _make(folder: Path, settings: CorpusSettings) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    began = time.monotonic()
    files = collect(settings)
    texts = [(text, suffix) for _, text, suffix in files]
    # not the leading digits: those sort the files, and the sample of a max_bytes is a stretch of them
    is_validation = [int(digest[-8:], 16) < settings.validation_fraction * 2**32 for digest, _, _ in files]
    sides = {
        "train": [pair for pair, held in zip(texts, is_validation, strict=True) if not held],
        "validation": [pair for pair, held in zip(texts, is_validation, strict=True) if held],
    }
    if not sides["train"] or not sides["validation"]:
        raise DataError(f"{len(files)} files leave a side of the split empty; raise validation_fraction or add files")
    print(f"corpus: {len(files):,} files read in {time.monotonic() - began:.0f} s", flush=True)
    tokenizer = train_bpe(_first_bytes((text for text, _ in sides["train"]), settings.bpe_bytes), settings.vocab_size)
    tokenizer.save(folder)
    print(f"corpus: BPE trained after {time.monotonic() - began:.0f} s", flush=True)
    lengths = {side: _write_tokens(folder / f"{side}.bin", pairs, tokenizer) for side, pairs in sides.items()}
    np.cumsum([0, *lengths["validation"]], dtype=np.int64).tofile(folder / "starts.bin")
    np.array([suffix == ".py" for _, suffix in sides["validation"]]).tofile(folder / "is_python.bin")
    num_bytes = sum(len(text) for text, _ in texts)
    num_tokens = {side: sum(of_side) for side, of_side in lengths.items()}
    meta = {
        "sha256": hashlib.sha256("".join(digest for digest, _, _ in files).encode()).hexdigest(),
        "num_files": len(files),
        "num_bytes": num_bytes,
        "suffixes": sorted({suffix for _, suffix in texts}),
        "num_tokens": num_tokens,
        "vocab_size": tokenizer.vocab_size,
        "bytes_per_token": num_bytes / sum(num_tokens.values()),
        "seconds": round(time.monotonic() - began, 1),
    }
    (folder / "meta.json").write_text(json.dumps(meta, indent=1) + "\n")  # last: with it the entry is whole


def collect(settings: CorpusSettings) -> list[tuple[str, bytes, str]]:
    """(sha256, bytes, suffix) of every file that is taken, in the order of their hashes."""
    roots = settings.roots or tuple(sorted({sysconfig.get_path(k) for k in ("stdlib", "purelib", "platlib")}))
    files = _read_all(roots, DOCUMENTS)
    if sum(len(text) for text, _ in files.values()) < settings.enough_bytes:
        files = _read_all(roots, HEADERS) | files
    ordered = [(digest, *files[digest]) for digest in sorted(files)]
    sizes = itertools.accumulate(len(text) for _, text, _ in ordered)
    return [file for file, size in zip(ordered, sizes, strict=True) if size <= settings.max_bytes]


def _read_all(roots: Iterable[str], suffixes: tuple[str, ...]) -> dict[str, tuple[bytes, str]]:
    paths = sorted({path for root in roots for path in _walk(Path(root), suffixes)})
    with ThreadPoolExecutor(16) as pool:
        read = pool.map(_read_file, paths, chunksize=64)
        return {
            hashlib.sha256(text).hexdigest(): (text, path.suffix)
            for path, text in zip(paths, read, strict=True)
            if text
        }


def _walk(root: Path, suffixes: tuple[str, ...]) -> Iterator[Path]:
    for directory, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED]
        yield from (Path(directory, name) for name in names if name.endswith(suffixes))


def _read_file(path: Path) -> bytes:
    """The file's bytes; nothing for one that is too short, too long, no UTF-8 or gone."""
    try:
        size = path.stat().st_size
        text = path.read_bytes() if _MIN_FILE_BYTES <= size <= _MAX_FILE_BYTES else b""
        text.decode()
    except (OSError, UnicodeDecodeError):
        return b""
    return text


def _first_bytes(texts: Iterable[bytes], num_bytes: int) -> Iterator[str]:
    for text in texts:
        yield text.decode()
        num_bytes -= len(text)
        if num_bytes <= 0:
            return


def _write_tokens(path: Path, pairs: list[tuple[bytes, str]], tokenizer: Tokenizer) -> list[int]:
    """Write a side's tokens; the number of each file's. The library itself tokenizes a chunk on all cores."""
    tokenizer.backend.encode_special_tokens = True  # a file that spells out a special token does not end there
    lengths: list[int] = []

    def encode(chunk: list[bytes]) -> list[np.ndarray]:
        ids = tokenizer.encode_batch([text.decode() for text in chunk])
        return [np.array([*of_file, tokenizer.eos_id], dtype=np.uint16) for of_file in ids]

    # two at once: while one waits for Python's lists, the other keeps the cores busy
    with ThreadPoolExecutor(2) as pool, path.open("wb") as file:
        for arrays in pool.map(encode, _chunks(text for text, _ in pairs)):
            np.concatenate(arrays).tofile(file)
            lengths += [len(array) for array in arrays]
    tokenizer.backend.encode_special_tokens = False
    return lengths


def _chunks(texts: Iterable[bytes]) -> Iterator[list[bytes]]:
    chunk, size = [], 0
    for text in texts:
        chunk.append(text)
        size += len(text)
        if size >= _CHUNK_BYTES:
            yield chunk
            chunk, size = [], 0
    if chunk:
        yield chunk


def make_record(corpus: Corpus) -> Record:
    """The corpus as a record: its sizes and its hash."""
    record = Record("corpus", f"Text of the convergence runs: {corpus.describe()}.", device="cpu")
    record.add("corpus", "files", "files", corpus.meta["num_files"])
    record.add("corpus", "text", "MB", corpus.meta["num_bytes"] / 1e6)
    for side, num_tokens in corpus.meta["num_tokens"].items():
        record.add("corpus", f"{side} tokens", "tokens", num_tokens)
    return record


def main() -> None:
    """Make the corpus and say what it is."""
    parser = argparse.ArgumentParser(prog="python -m bench.training.corpus", description=__doc__)
    parser.add_argument("--max-mb", type=int, default=260, help="megabytes of text at most")
    parser.add_argument("--cache", type=Path, default=CACHE, help="folder of the tokens")
    options = parser.parse_args()
    corpus = open_corpus(CorpusSettings(max_bytes=options.max_mb * 1_000_000), options.cache)
    print(f"{corpus.describe()}; made in {corpus.meta['seconds']} s, in {corpus.folder}")


if __name__ == "__main__":
    main()
