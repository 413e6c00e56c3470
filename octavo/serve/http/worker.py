"""What worker processes do with text: they read large bodies, render chat templates and tokenize long texts."""

import contextlib
import importlib
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.models.chat import render
from octavo.models.tokenizer import Tokenizer
from octavo.serve.http.errors import ApiError
from octavo.serve.worker_process import address_space

# memory that a job may take beside what the worker has at its start
JOB_BYTES = 1 << 30

# set before the first fork
_tokenizer: Tokenizer | None = None


def setup_of(tokenizer: Tokenizer | None) -> tuple[Any, ...] | None:
    """What prepare() makes the tokenizer of."""
    if tokenizer is None:
        return None
    named = {"bos_token": tokenizer.bos_token, "chat_template": tokenizer.chat_template}
    return (tokenizer.backend, tokenizer.eos_id), named


def prepare(setup: tuple[Any, ...] | None) -> int:
    """Load everything that a job may name, before the first fork; the address space that a worker may have."""
    global _tokenizer
    importlib.import_module("octavo.serve.http.app")  # no import statement: the app imports this module
    if setup is not None:
        _tokenizer = Tokenizer(*setup[0], **setup[1])
        with contextlib.suppress(Exception):  # the job that needs it says what is missing
            _tokenizer.prepare_chat()
    return address_space() + JOB_BYTES


def render_chat(messages: Sequence[Mapping[str, Any]], add_generation_prompt: bool, kwargs: Mapping[str, Any]) -> str:
    """A conversation as text; see octavo.models.chat.render."""
    return render(_own(), messages, add_generation_prompt=add_generation_prompt, template_kwargs=kwargs)


def encode(text: str, add_special_tokens: bool, most: int | None) -> list[int] | int:
    """A text's token ids, or their number if it is more than `most`."""
    ids = _own().encode(text, add_special_tokens=add_special_tokens)
    return len(ids) if most is not None and len(ids) > most else ids


def decode(token_ids: Sequence[int], vocab_size: int, tokenizer: Tokenizer | None = None) -> str:
    """The text of token ids, special tokens included, by the worker's tokenizer or another.

    Raises:
        ApiError: 400 for an id that is none of the vocabulary's.
    """
    if bad := [token_id for token_id in token_ids if not 0 <= token_id < vocab_size]:
        raise ApiError(400, f"tokens must be ids from 0 to {vocab_size - 1}, got {bad[0]}", "tokens", "invalid_value")
    return (tokenizer or _own()).decode(token_ids, skip_special_tokens=False)


def _own() -> Tokenizer:
    assert _tokenizer is not None, "text is for servers with a tokenizer"
    return _tokenizer
