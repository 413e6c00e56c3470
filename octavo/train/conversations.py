"""Conversations for supervised fine-tuning: JSON lines, read one at a time and refused by file and line where bad."""

import dataclasses
import json
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import DataError
from octavo.models.chat import ROLES, Message, Segment, chat_examples
from octavo.models.tokenizer import Tokenizer
from octavo.train.config import DataSection
from octavo.train.corpus import read_lines, walk
from octavo.train.tasks import TASKS, make_tasks

_SHAPES = '{"messages": [{"role": ..., "content": ...}, ...]} or {"prompt": ..., "completion": ...}'


@dataclasses.dataclass(frozen=True)
class Conversation:
    """One JSON line.

    Attributes:
        where: its file and line, for messages.
        messages: role and content each; empty for a prompt with its completion.
        counted: which messages' answers are targets: the assistant's, but for those with "weight": 0.
        prompt: raw text.
        completion: raw text.
    """

    where: str
    messages: tuple[Message, ...] = ()
    counted: tuple[bool, ...] = ()
    prompt: str = ""
    completion: str = ""

    @property
    def key(self) -> str:
        """The content as one text: it decides on which side of the split the conversation is."""
        return json.dumps([list(self.messages), list(self.counted), self.prompt, self.completion], sort_keys=True)

    @property
    def texts(self) -> Iterator[str]:
        """What people wrote, for training a tokenizer."""
        if self.messages:
            yield (
                "\n".join(f"{message['role'].capitalize()}:\n{message['content']}" for message in self.messages) + "\n"
            )
        else:
            yield self.prompt + self.completion

    @property
    def has_answer(self) -> bool:
        """Whether there is anything to learn: an answer that counts and is not blank."""
        if not self.messages:
            return bool(self.completion.strip())
        return any(
            counts and message["content"].strip() for message, counts in zip(self.messages, self.counted, strict=True)
        )

    def examples(self, tokenizer: Tokenizer) -> list[list[Segment]]:
        """The text with its answers marked; see octavo.models.chat.chat_examples. A completion ends with the
        end-of-sequence token, which is a target too.

        Raises:
            DataError: naming file and line.
        """
        try:
            if self.messages:
                return chat_examples(tokenizer, self.messages, self.counted)
        except DataError as error:
            raise DataError(f"{self.where}: {error}") from error
        end = tokenizer.eos_token or ""
        answer = self.completion if end and self.completion.endswith(end) else self.completion + end
        return [[Segment(text, is_answer) for text, is_answer in ((self.prompt, False), (answer, True)) if text]]


def read_conversations(path: str, data: DataSection) -> Iterator[Conversation]:
    """Every conversation, in a fixed order.

    Args:
        path: data.path or data.validation_path: a .jsonl file, a directory of them, or "tasks".
        data: max_bytes and num_tasks.
    Raises:
        DataError: nothing there, a file that is no UTF-8, a line that is no JSON or no conversation (named by number).
    """
    num_bytes = 0
    for where, line in _read_all(path, data):
        if not line.strip():
            continue
        yield parse(line, where)
        num_bytes += len(line.encode())
        if data.max_bytes and num_bytes >= data.max_bytes:
            return
    if num_bytes == 0:
        raise DataError(f"{path} holds no conversation: every line of it is blank")


def parse(line: str, where: str) -> Conversation:
    """One JSON line; DataError where it is no conversation."""
    try:
        record = json.loads(line)
    except json.JSONDecodeError as error:
        raise DataError(f"{where}: not JSON: {error.msg}") from None
    if not isinstance(record, dict):
        raise DataError(f"{where}: must be {_SHAPES}, got a {type(record).__name__}")
    if record.get("tools"):
        raise DataError(f"{where}: has 'tools', which octavo does not show to the model; write them into a message")
    has_messages, has_prompt = "messages" in record, "prompt" in record or "completion" in record
    if has_messages == has_prompt:
        raise DataError(f"{where}: must be either {_SHAPES}, got the keys {sorted(record)}")
    if has_messages:
        return _parse_messages(record["messages"], where)
    for key in ("prompt", "completion"):
        _check_text(record, key, where)
    return Conversation(where, prompt=record["prompt"], completion=record["completion"])


def _parse_messages(messages: Any, where: str) -> Conversation:
    if not isinstance(messages, list) or not messages:
        raise DataError(f"{where}: messages must be a list of at least one message, got {_short(messages)}")
    counted = []
    for i, message in enumerate(messages):
        if not isinstance(message, dict):
            raise DataError(f"{where}: messages[{i}] must have role and content, got {_short(message)}")
        for key in ("role", "content"):
            _check_text(message, key, where, f"messages[{i}]")
        if message["role"] not in ROLES:
            raise DataError(f"{where}: messages[{i}].role must be one of {', '.join(ROLES)}, got {message['role']!r}")
        weight = message.get("weight", 1)
        if weight not in (0, 1):
            raise DataError(f"{where}: messages[{i}].weight must be 0 (no target) or 1, got {weight!r}")
        counted.append(message["role"] == "assistant" and weight == 1)
    bare = tuple({key: value for key, value in message.items() if key != "weight"} for message in messages)
    return Conversation(where, messages=bare, counted=tuple(counted))


def _check_text(values: dict[str, Any], key: str, where: str, owner: str = "") -> None:
    """Refuse a key that is not there, a misspelt one say, and one that holds no text."""
    if key not in values:
        raise DataError(f"{where}: {owner or 'the line'} has no key {key!r}; its keys are {sorted(values)}")
    if not isinstance(values[key], str):
        raise DataError(f"{where}: {f'{owner}.' if owner else ''}{key} must be text, got {_short(values[key])}")


def _read_all(path: str, data: DataSection) -> Iterator[tuple[str, str]]:
    """(file and line, text) of every line."""
    if path == TASKS:
        yield from ((f"task {i}", line) for i, line in enumerate(make_tasks(data.num_tasks)))
        return
    place = Path(path)
    if not place.exists():
        raise DataError(f"{path}: no such file or directory; data.path takes a .jsonl file, a directory or {TASKS!r}")
    files: Sequence[Path] = walk(place, (".jsonl",), set()) if place.is_dir() else [place]
    if not files or any(file.suffix != ".jsonl" for file in files):
        raise DataError(f"{path}: conversations are read from .jsonl files; data.format = 'text' reads others")
    for file in files:
        for number, line in enumerate(read_lines(file), start=1):
            yield f"{file}, line {number}", line


def _short(value: Any) -> str:
    return repr(value)[:80]
