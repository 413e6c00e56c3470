"""Text files as token sequences of one length: what calibration and perplexity read."""

import json
from collections.abc import Iterator
from pathlib import Path

from octavo.errors import DataError
from octavo.models.tokenizer import Tokenizer

_CHUNK_CHARS = 1 << 16


def read_windows(path: str | Path, tokenizer: Tokenizer, seq_len: int, num_windows: int) -> list[list[int]]:
    """The first sequences of a text file; it is read no further.

    Args:
        path: a .txt file, which is one document, or a .jsonl file of documents: objects with "text", or with
            "messages" for the tokenizer's chat template. The end-of-sequence token stands behind each of the latter.
        seq_len: tokens of a sequence; its first one is the BOS token where the tokenizer adds one.
        num_windows: how many, at most.
    Returns:
        Up to num_windows lists of seq_len token ids each; what is left over at the end is dropped.
    Raises:
        DataError: a file that cannot be read, a row without text, characters outside the vocabulary.
    """
    start = _bos(tokenizer)
    num_fresh = seq_len - len(start)
    if num_fresh < 1 or seq_len < 2:
        raise DataError(f"seq_len must be at least 2, so that there is a token to predict, got {seq_len}")
    windows: list[list[int]] = []
    pending: list[int] = []
    for tokens in _token_pieces(Path(path), tokenizer):
        pending += tokens
        while len(pending) >= num_fresh and len(windows) < num_windows:
            windows.append([*start, *pending[:num_fresh]])
            pending = pending[num_fresh:]
        if len(windows) == num_windows:
            break
    return windows


def _token_pieces(path: Path, tokenizer: Tokenizer) -> Iterator[list[int]]:
    end = [] if tokenizer.eos_id is None else [tokenizer.eos_id]
    if path.suffix == ".jsonl":
        yield from ([*tokenizer.encode(text), *end] for text in _json_documents(path, tokenizer))
    elif path.suffix == ".txt":
        yield from (tokenizer.encode(text) for text in _text_chunks(path))
    else:
        raise DataError(f"{path}: text is read from .txt and .jsonl files, got {path.suffix or 'no suffix'}")


def _text_chunks(path: Path) -> Iterator[str]:
    """A text in pieces that end with a line."""
    chunk: list[str] = []
    num_chars = 0
    for line in _lines(path):
        chunk.append(line)
        num_chars += len(line)
        if num_chars >= _CHUNK_CHARS:
            yield "".join(chunk)
            chunk, num_chars = [], 0
    yield "".join(chunk)


def _json_documents(path: Path, tokenizer: Tokenizer) -> Iterator[str]:
    for number, line in enumerate(_lines(path), 1):
        if not line.strip():
            continue
        try:
            row = json.loads(line)
        except ValueError as error:
            raise DataError(f"{path}:{number}: not valid JSON: {error}") from None
        if isinstance(row, dict) and isinstance(row.get("text"), str):
            yield row["text"]
        elif isinstance(row, dict) and isinstance(row.get("messages"), list):
            yield tokenizer.render_chat(row["messages"])
        else:
            raise DataError(f'{path}:{number}: a row must be an object with "text" or "messages", got {line[:60]!r}')


def _lines(path: Path) -> Iterator[str]:
    try:
        with path.open(encoding="utf-8", newline="") as file:
            yield from file
    except (OSError, UnicodeDecodeError) as error:
        raise DataError(f"{path}: cannot be read as UTF-8 text: {error}") from None


def _bos(tokenizer: Tokenizer) -> list[int]:
    """What the tokenizer puts before every text of its own accord: the BOS token, or nothing."""
    if tokenizer.bos_token is None:
        return []
    bos_id = tokenizer.backend.token_to_id(tokenizer.bos_token)
    if bos_id is None or tokenizer.encode("", add_special_tokens=True)[:1] != [bos_id]:
        return []
    return [bos_id]
