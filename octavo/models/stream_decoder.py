"""Text of a growing list of tokens: each character as soon as it is whole."""

from collections.abc import Mapping, Sequence

from octavo.errors import DataError
from octavo.models.tokenizer import REPLACEMENT, Tokenizer


class StreamDecoder:
    """Turns tokens into text one by one and never gives out half a UTF-8 character.

    All texts that push and flush return, joined, are tokenizer.decode of all ids; but a character that was given out
    stays where bytes follow it that are none, which makes byte fallback take it back. Tokens of a byte-level tokenizer
    are decoded one by one, at a tenth of the time; of others a window is.

    Args:
        context: tokens before the first one, whose text is not given out: some decoders drop the space that a text
            begins with, and this one begins behind them.
    """

    _CONTEXT = 8  # tokens kept, because some decoders treat the first token of a text differently
    _WINDOW = 32  # tokens decoded at most, but for bytes that are no character
    _LONGEST = 128  # and with these

    def __init__(self, tokenizer: Tokenizer, *, skip_special_tokens: bool = True, context: Sequence[int] = ()) -> None:
        self._tokenizer = tokenizer
        self._skip = skip_special_tokens
        self._ids: list[int] = []
        self._num_given = 0  # characters of the window's text that were given out
        self._utf8 = tokenizer.utf8_by_token
        self._tail = b""  # that was not given out as text, where tokens are bytes
        if self._utf8 is None and context:
            self._ids = [i for i in context[-2 * self._CONTEXT :] if i < tokenizer.vocab_size]
            self._cut_window()
            if not self._num_given or self._text().endswith(REPLACEMENT):  # what follows may complete a character
                self._ids, self._num_given = [], 0

    def push(self, token_id: int) -> str:
        """The text that this token completes; empty while a character is incomplete."""
        if token_id < 0:
            raise DataError(f"token ids must be at least 0, got {token_id}")
        if self._utf8 is not None:
            return self._push_bytes(self._utf8, token_id)
        if token_id < self._tokenizer.vocab_size:  # others have no text
            self._ids.append(int(token_id))
        text = self._text()
        # An incomplete character at the end decodes to one U+FFFD; everything before it is settled. Of byte fallback
        # each byte since the last other token decodes to one, until the character is complete.
        settled, is_stuck = len(text), len(self._ids) >= self._LONGEST
        if text.endswith(REPLACEMENT):
            if not self._tokenizer.is_byte(token_id):
                settled -= 1
            elif not is_stuck:
                settled = len(text.rstrip(REPLACEMENT))
        fresh = text[self._num_given : settled]
        self._num_given = max(self._num_given, settled)
        if is_stuck:
            self._ids = self._ids[-self._CONTEXT :]
            self._num_given = len(self._text()) - (len(text) - settled)
        elif settled == len(text) and len(self._ids) >= self._WINDOW:
            self._cut_window()
        return fresh

    def push_all(self, token_ids: Sequence[int]) -> str:
        """The text of these tokens, where none were pushed before and none follow: as push and flush, but faster."""
        if self._utf8 is not None:
            return self._tokenizer.decode(token_ids, skip_special_tokens=self._skip)
        self._ids += [i for i in token_ids if i < self._tokenizer.vocab_size]
        return self.flush()

    def flush(self) -> str:
        """What is still held back at the end: U+FFFD for a character that was never completed."""
        if self._utf8 is not None:
            fresh, self._tail = self._tail.decode(errors="replace"), b""
            return fresh
        text = self._text()
        fresh, self._num_given = text[self._num_given :], len(text)
        return fresh

    def _push_bytes(self, utf8: Mapping[int, bytes], token_id: int) -> str:
        if token_id >= self._tokenizer.vocab_size or (self._skip and token_id in self._tokenizer.special_ids):
            return ""
        read = self._tail + utf8[token_id]
        text = read.decode(errors="replace")
        if not text.endswith(REPLACEMENT):
            self._tail = b""
            return text
        settled = text[:-1]  # of one to three bytes becomes one U+FFFD
        self._tail = next(read[-n:] for n in (1, 2, 3) if read[:-n].decode(errors="replace") == settled)
        return settled

    def _cut_window(self) -> None:
        """Keep the context, which must not begin within a character: its bytes would spoil those that follow."""
        whole = self._ids
        for num_kept in range(self._CONTEXT, self._CONTEXT + 4):
            self._ids = whole[-num_kept:]
            text = self._text()
            if not text.startswith(REPLACEMENT):
                self._num_given = len(text)
                return
        self._ids = whole

    def _text(self) -> str:
        return self._tokenizer.backend.decode(self._ids, skip_special_tokens=self._skip)
