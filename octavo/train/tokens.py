"""Documents to token streams on disk: tokenized once, memory-mapped ever after, cached by what they were made from."""

import dataclasses
import hashlib
import itertools
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CheckpointError, DataError
from octavo.models.checkpoint.dialects import newest_model
from octavo.models.tokenizer import Tokenizer, load_tokenizer, train_bpe
from octavo.train.cache import open_entry
from octavo.train.config import DataSection
from octavo.train.corpus import read_documents, read_split

_LAYOUT = 2  # grows when the files of a cache entry change their meaning
_CHUNK_DOCUMENTS = 256  # tokenized at once
SPLITS = ("train", "validation")


@dataclasses.dataclass(frozen=True)
class TokenizedText:
    """A corpus as two token streams; every document is followed by the tokenizer's end-of-sequence token.

    Attributes:
        train: [num_tokens] uint16 or uint32, memory-mapped.
        validation: as train.
        tokenizer: what made them.
        fingerprint: 16 hex digits of the text, the split and the tokenizer.
    """

    train: np.ndarray
    validation: np.ndarray
    tokenizer: Tokenizer
    fingerprint: str


def load_text(data: DataSection, tokenizer_path: str = "") -> TokenizedText:
    """Tokenize what a [data] section describes, or find it in the cache.

    Args:
        tokenizer_path: the tokenizer to use where data.tokenizer is empty (a base model's); empty trains one.
    Raises:
        DataError: see read_documents; or a side of the split that is too short for one sequence.
        CheckpointError: a tokenizer file that cannot be read.
    """
    tokenizer = find_tokenizer(data, tokenizer_path)
    in_words = f"{tokenizer.eos_id} {tokenizer.backend.to_str()}" if tokenizer else ""
    fingerprint = fingerprint_of(str(_LAYOUT), in_words, data, lambda path: read_documents(path, data))
    entry, meta = open_entry(data.cache_dir, fingerprint, lambda directory: _write_entry(directory, data, tokenizer))
    streams = {split: np.memmap(entry / f"{split}.bin", dtype=meta["dtype"], mode="r") for split in SPLITS}
    for split in SPLITS:
        _check_long_enough(len(streams[split]), split, data)
    return TokenizedText(streams["train"], streams["validation"], load_tokenizer(entry), fingerprint)


def find_tokenizer(data: DataSection, tokenizer_path: str) -> Tokenizer | None:
    """The tokenizer that a [data] section or a base model names; None where one is to be trained.

    Raises:
        CheckpointError: it cannot be read, or there is no such model.
        DataError: it has no end-of-sequence token.
    """
    if tokenizer_path and not Path(tokenizer_path).exists():
        raise CheckpointError(
            f"model.path = {tokenizer_path!r}: no such directory; train that model first, or name another"
        )
    path = data.tokenizer or (newest_model(Path(tokenizer_path)) if tokenizer_path else "")
    tokenizer = load_tokenizer(path) if path else None
    if tokenizer is not None and tokenizer.eos_id is None:
        raise DataError(f"the tokenizer {path} has no end-of-sequence token; name one in tokenizer_config.json")
    return tokenizer


def fingerprint_of(layout: str, tokenizer: str, data: DataSection, read: Callable[[str], Iterable[str]]) -> str:
    """16 hex digits of everything that decides an entry of the cache.

    Args:
        tokenizer: in words; empty for one that is to be trained.
        read: the records of data.path or data.validation_path, as text.
    """
    digest = hashlib.sha256(layout.encode())
    digest.update((tokenizer or f"bpe {data.vocab_size} {data.tokenizer_bytes}").encode())
    digest.update(f"split {'separate' if data.validation_path else data.validation_fraction}".encode())
    for path in (data.path, data.validation_path) if data.validation_path else (data.path,):
        digest.update(b"source")
        for text in read(path):
            digest.update(hashlib.sha256(text.encode()).digest())
    return digest.hexdigest()[:16]


def _write_entry(directory: Path, data: DataSection, tokenizer: Tokenizer | None) -> dict[str, Any]:
    if tokenizer is None:
        tokenizer = train_bpe(
            first_bytes(read_split(data, "train", read_documents), data.tokenizer_bytes), data.vocab_size
        )
    dtype = token_dtype(tokenizer)
    num_tokens = {}
    for split in SPLITS:
        documents = read_split(data, split, read_documents)
        num_tokens[split] = _write_tokens(directory / f"{split}.bin", documents, tokenizer, dtype)
        _check_long_enough(num_tokens[split], split, data)
    tokenizer.save(directory)
    return {"dtype": dtype.name, "num_tokens": num_tokens, "vocab_size": tokenizer.vocab_size}


def _write_tokens(path: Path, documents: Iterable[str], tokenizer: Tokenizer, dtype: np.dtype) -> int:
    # A document that spells out a special token must not end there.
    tokenizer.backend.encode_special_tokens = True
    documents = iter(documents)
    num_tokens = 0
    with path.open("wb") as file:
        while chunk := list(itertools.islice(documents, _CHUNK_DOCUMENTS)):
            for ids in tokenizer.encode_batch(chunk):
                file.write(np.array([*ids, tokenizer.eos_id], dtype=dtype).tobytes())
                num_tokens += len(ids) + 1
    tokenizer.backend.encode_special_tokens = False
    return num_tokens


def _check_long_enough(num_tokens: int, split: str, data: DataSection) -> None:
    needed = data.seq_len + 1 if split == "train" else 2
    if num_tokens >= needed:
        return
    source = data.validation_path if data.validation_path and split == "validation" else data.path
    remedy = (
        "give more text or lower data.seq_len"
        if split == "train"
        else "raise data.validation_fraction, give more documents, or set data.validation_path"
    )
    raise DataError(f"{source} gives {num_tokens} {split} tokens, at least {needed} are needed; {remedy}")


def token_dtype(tokenizer: Tokenizer) -> np.dtype:
    """The smallest unsigned type that holds every id."""
    return np.dtype(np.uint16 if tokenizer.vocab_size <= 2**16 else np.uint32)


def first_bytes(documents: Iterable[str], num_bytes: int) -> Iterator[str]:
    """The first documents, until they hold so many bytes."""
    for document in documents:
        yield document
        num_bytes -= len(document.encode())
        if num_bytes <= 0:
            return
