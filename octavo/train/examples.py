"""Conversations as tokens with their answers marked: tokenized once, memory-mapped ever after, cached like text."""

import dataclasses
import itertools
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any

import numpy as np

from octavo.errors import CheckpointError, DataError
from octavo.models.chat import DEFAULT_CHAT_TEMPLATE, Segment
from octavo.models.tokenizer import Tokenizer, load_tokenizer, train_bpe
from octavo.train.cache import open_entry
from octavo.train.config import DataSection
from octavo.train.conversations import Conversation, read_conversations
from octavo.train.corpus import read_split
from octavo.train.tokens import SPLITS, find_tokenizer, fingerprint_of, first_bytes, token_dtype

_LAYOUT = 1  # grows when the files of a cache entry change their meaning
_CHUNK_CONVERSATIONS = 256  # tokenized at once


@dataclasses.dataclass(frozen=True)
class Examples:
    """Token sequences in which some positions are an answer's.

    Attributes:
        tokens: [num_tokens] uint16 or uint32, one example after the other.
        answers: [num_tokens] uint8, 1 where a token is part of an answer.
        starts: [examples + 1] int64, where each example starts in them.
    """

    tokens: np.ndarray
    answers: np.ndarray
    starts: np.ndarray

    def __len__(self) -> int:
        return len(self.starts) - 1

    @property
    def lengths(self) -> np.ndarray:
        """[examples] int64."""
        return np.diff(self.starts)


@dataclasses.dataclass(frozen=True)
class TokenizedChat:
    """A corpus of conversations.

    Attributes:
        train: the examples of this side.
        validation: the examples of this side.
        num_empty: conversations left out because no answer in them counts or has text.
        num_split: conversations cut into one example for each answer, because the chat template changes earlier turns.
        tokenizer: what made the tokens; its chat_template is the one used.
        fingerprint: 16 hex digits of the conversations, the split, the tokenizer and the template.
    """

    train: Examples
    validation: Examples
    num_empty: int
    num_split: int
    tokenizer: Tokenizer
    fingerprint: str


def load_chat(data: DataSection, tokenizer_path: str = "") -> TokenizedChat:
    """Tokenize what a [data] section of format "chat" describes, or find it in the cache.

    Args:
        tokenizer_path: the tokenizer to use where data.tokenizer is empty (a base model's); empty trains one.
    Raises:
        DataError: see read_conversations and Conversation.examples; or a side of the split without an example.
        CheckpointError: a tokenizer or a template file that cannot be read.
    """
    tokenizer = find_tokenizer(data, tokenizer_path)
    template = _find_template(data, tokenizer)
    in_words = f"{tokenizer.eos_id} {tokenizer.bos_token} {tokenizer.backend.to_str()}" if tokenizer else ""
    fingerprint = fingerprint_of(
        f"chat {_LAYOUT} {template}", in_words, data, lambda path: (c.key for c in read_conversations(path, data))
    )
    entry, meta = open_entry(
        data.cache_dir, fingerprint, lambda directory: _write_entry(directory, data, tokenizer, template)
    )
    train, validation = (_open(entry, split, meta["dtype"]) for split in SPLITS)
    return TokenizedChat(train, validation, meta["num_empty"], meta["num_split"], load_tokenizer(entry), fingerprint)


def _find_template(data: DataSection, tokenizer: Tokenizer | None) -> str:
    if data.chat_template:
        try:
            return Path(data.chat_template).read_text(encoding="utf-8")
        except (OSError, UnicodeDecodeError) as error:
            raise CheckpointError(f"data.chat_template {data.chat_template} cannot be read: {error}") from None
    return (tokenizer and tokenizer.chat_template) or DEFAULT_CHAT_TEMPLATE


def _split_conversations(data: DataSection, split: str) -> Iterator[Conversation]:
    return read_split(data, split, read_conversations, key=lambda conversation: conversation.key)


def _write_entry(directory: Path, data: DataSection, tokenizer: Tokenizer | None, template: str) -> dict[str, Any]:
    if tokenizer is None:
        texts = (text for conversation in _split_conversations(data, "train") for text in conversation.texts)
        tokenizer = train_bpe(first_bytes(texts, data.tokenizer_bytes), data.vocab_size)
    tokenizer.chat_template = template
    meta: dict[str, Any] = {"dtype": token_dtype(tokenizer).name, "num_empty": 0, "num_split": 0}
    for split in SPLITS:
        conversations = _with_answers(_split_conversations(data, split), meta)
        num_examples = _write_side(directory, split, conversations, tokenizer, meta)
        if not num_examples:
            source = data.validation_path if data.validation_path and split == "validation" else data.path
            raise DataError(
                f"{source} gives no {split} example with an answer ({meta['num_empty']} without one); give more "
                "conversations" + ("" if split == "train" else ", or raise data.validation_fraction")
            )
    tokenizer.save(directory)
    return meta


def _with_answers(conversations: Iterable[Conversation], meta: dict[str, Any]) -> Iterator[Conversation]:
    """Those in which there is something to learn; the others are counted."""
    for conversation in conversations:
        if conversation.has_answer:
            yield conversation
        else:
            meta["num_empty"] += 1


def _write_side(
    directory: Path, split: str, conversations: Iterator[Conversation], tokenizer: Tokenizer, meta: dict[str, Any]
) -> int:
    lengths: list[int] = []
    with (directory / f"{split}.bin").open("wb") as tokens, (directory / f"{split}.answers.bin").open("wb") as answers:
        while chunk := list(itertools.islice(conversations, _CHUNK_CONVERSATIONS)):
            examples = [conversation.examples(tokenizer) for conversation in chunk]
            meta["num_split"] += sum(len(of_one) > 1 for of_one in examples)
            for ids, marks in encode(tokenizer, [segments for of_one in examples for segments in of_one]):
                tokens.write(np.array(ids, dtype=meta["dtype"]).tobytes())
                answers.write(np.array(marks, dtype=np.uint8).tobytes())
                lengths.append(len(ids))
    starts = np.cumsum([0, *lengths], dtype=np.int64)
    (directory / f"{split}.starts.bin").write_bytes(starts.tobytes())
    return len(lengths)


def encode(tokenizer: Tokenizer, examples: list[list[Segment]]) -> list[tuple[list[int], list[int]]]:
    """(token ids, 1 for each that is part of an answer) of examples; every segment is tokenized alone, and what follows
    the last answer is left out, because nothing would be learned from it.
    """
    examples = [_up_to_last_answer(example) for example in examples]
    segments = [segment for example in examples for segment in example]
    encoded = iter(tokenizer.encode_batch([segment.text for segment in segments]))
    result = []
    for example in examples:
        ids: list[int] = []
        marks: list[int] = []
        for segment in example:
            of_segment = next(encoded)
            ids += of_segment
            marks += [int(segment.is_answer)] * len(of_segment)
        result.append((ids, marks))
    return result


def _up_to_last_answer(segments: list[Segment]) -> list[Segment]:
    last = max((i for i, segment in enumerate(segments) if segment.is_answer), default=-1)
    return segments[: last + 1]


def _open(entry: Path, split: str, dtype: str) -> Examples:
    def read(name: str, kind: str) -> np.ndarray:
        return np.memmap(entry / name, dtype=kind, mode="r")

    return Examples(
        read(f"{split}.bin", dtype), read(f"{split}.answers.bin", "uint8"), read(f"{split}.starts.bin", "int64")
    )
