"""Text of a growing output, and where a stop string ends it. Pure Python over a StreamDecoder."""

from typing import Protocol


class TokenDecoder(Protocol):
    """What models.stream_decoder.StreamDecoder offers."""

    def push(self, token_id: int) -> str: ...

    def flush(self) -> str: ...


class Detokenizer:
    """Collects text token by token; a stop string may span any number of tokens.

    Args:
        decoder: turns tokens into the characters that they complete.
        stop_strings: what ends the text; the text is cut before it.
        vocab_size: ids from here on have no text: a model's vocabulary is often padded beyond its tokenizer's.
    """

    def __init__(self, decoder: TokenDecoder, stop_strings: tuple[str, ...], vocab_size: int) -> None:
        self._decoder = decoder
        self._vocab_size = vocab_size
        self._stop_strings = stop_strings
        self._num_held = max(map(len, stop_strings), default=1) - 1
        self._num_taken = 0
        self.text = ""

    @property
    def settled_text(self) -> str:
        """The text without the characters at its end that may yet turn out to begin a stop string."""
        return self.text[: len(self.text) - self._num_held] if self._num_held < len(self.text) else ""

    def take(self, is_final: bool) -> str:
        """What settled since the last call; all that is left where no token follows."""
        end = len(self.text) if is_final else max(self._num_taken, len(self.text) - self._num_held)
        fresh, self._num_taken = self.text[self._num_taken : end], end
        return fresh

    def push(self, token_id: int) -> str | None:
        """Add a token; returns the stop string that it completed."""
        return self._extend(self._decoder.push(token_id) if token_id < self._vocab_size else "")

    def flush(self) -> str | None:
        """Add what the decoder still held back; no token follows."""
        return self._extend(self._decoder.flush())

    def _extend(self, fresh: str) -> str | None:
        if not self._stop_strings:
            self.text += fresh
            return None
        start = max(0, len(self.text) - self._num_held)
        self.text += fresh
        found = [(at, stop) for stop in self._stop_strings if (at := self.text.find(stop, start)) >= 0]
        if not found:
            return None
        at, stop = min(found)
        self.text = self.text[:at]
        return stop
