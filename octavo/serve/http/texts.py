"""Texts: what a server does with text, beside its event loop: large bodies, chat templates, tokens."""

import functools
import threading
from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypeVar

from octavo.models.chat import DEFAULT_CHAT_TEMPLATE, render
from octavo.models.token_length import longest_token_chars
from octavo.models.tokenizer import Tokenizer
from octavo.serve.http import worker
from octavo.serve.http.errors import ApiError
from octavo.serve.http.lanes import Lane, TooExpensiveError, WorkerLane
from octavo.serve.nursery import Nursery

T = TypeVar("T")

# bytes, characters or tokens up to which a call takes some milliseconds at most
SHORT = 32 << 10
# tokens that are checked faster than a thread is woken
FEW = 1 << 10
# computing time of what can loop, first where all chats go and then among those that were slower, and of what is linear
# in a body of 8 MiB
QUICK_CHAT_S, CHAT_S, LONG_S = 0.1, 2.0, 30.0


class Texts:
    """Reads and writes text; short texts never wait behind long ones.

    Args:
        tokenizer: returns the server's, or None where it has none.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._tokenizer = tokenizer
        self._nursery = Nursery(worker.__name__, lambda: worker.setup_of(self._tokenizer()))
        self._short = Lane("short texts", 2, 256)
        self._long = WorkerLane("long texts", 2, 16, nursery=self._nursery, limit_s=LONG_S, niceness=10)
        chat = functools.partial(WorkerLane, "the chat template", 2, nursery=self._nursery)
        self._quick_chat = chat(64, limit_s=QUICK_CHAT_S, niceness=0)
        self._slow_chat = chat(8, limit_s=CHAT_S, niceness=10)
        self._longest_token = functools.cache(longest_token_chars)

    def prepare(self, tokenizer: Tokenizer | None) -> None:
        """Start the process that renders conversations, where it will: else the first one waits some seconds for it.

        Args:
            tokenizer: the server's, before its engine is there.
        """
        if _has_template(tokenizer):
            self._tokenizer = lambda: tokenizer
            threading.Thread(target=self._nursery.start, name="octavo-nursery", daemon=True).start()

    async def run(self, size: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call where a body or text of this size is read. Errors as Lane.run."""
        return function(*arguments) if size <= SHORT else await self._long.run(function, *arguments)

    async def check(self, num_tokens: int, function: Callable[..., T], *arguments: Any) -> T:
        """Call where so many token ids are looked at. Errors as Lane.run."""
        return function(*arguments) if num_tokens <= FEW else await self._short.run(function, *arguments)

    async def render(
        self, tokenizer: Tokenizer, messages: Sequence[Mapping[str, Any]], add_prompt: bool, kwargs: Mapping[str, Any]
    ) -> str:
        """A conversation as text; a checkpoint's own template runs in a worker, for it may loop.

        One that takes long begins again beside others of its kind, so that quick ones never wait behind it.
        """
        if not _has_template(tokenizer):
            return render(tokenizer, messages, add_generation_prompt=add_prompt, template_kwargs=kwargs)
        try:
            return await self._quick_chat.run(worker.render_chat, messages, add_prompt, kwargs)
        except TooExpensiveError:
            return await self._slow_chat.run(worker.render_chat, messages, add_prompt, kwargs)

    async def encode(
        self, tokenizer: Tokenizer, text: str, *, add_special_tokens: bool, most: int, field: str
    ) -> list[int]:
        """Token ids of a text.

        Args:
            most: tokens that it may have.
            field: that holds it.
        Raises:
            ApiError: 400 for more tokens, by the text's length alone where that is enough; 503, too many texts wait.
        """
        per_token = self._longest_token(tokenizer)
        if per_token is not None and len(text) > per_token * most:
            text = f"{len(text)} characters have more than {most} tokens, for a token has {per_token} at most"
            raise _too_long(text, field)
        if len(text) <= SHORT:
            ids: list[int] | int = await self._short.run(
                functools.partial(tokenizer.encode, text, add_special_tokens=add_special_tokens)
            )
        else:
            ids = await self._long.run(worker.encode, text, add_special_tokens, most)
        if isinstance(ids, int) or len(ids) > most:
            num_tokens = ids if isinstance(ids, int) else len(ids)
            raise _too_long(f"the text has {num_tokens} tokens, and {most} are the most here", field)
        return ids

    async def decode(self, tokenizer: Tokenizer, token_ids: list[int], vocab_size: int) -> str:
        """The text of token ids, special tokens included.

        Raises:
            ApiError: 400 for an id that is none of the vocabulary's; 503, too many texts wait.
        """
        if len(token_ids) <= SHORT:
            return await self._short.run(worker.decode, token_ids, vocab_size, tokenizer)
        return await self._long.run(worker.decode, token_ids, vocab_size)

    def close(self) -> None:
        """End the workers."""
        for lane in (self._short, self._long, self._quick_chat, self._slow_chat):
            lane.close()
        self._nursery.close()


def _has_template(tokenizer: Tokenizer | None) -> bool:
    """Whether it has one of its own."""
    return tokenizer is not None and tokenizer.chat_template not in (None, DEFAULT_CHAT_TEMPLATE)


def _too_long(text: str, field: str) -> ApiError:
    return ApiError(400, f"{text}; shorten it", field, "context_length_exceeded")
