"""How tokens are shown to clients: by themselves (as text, as bytes, or as "token_id:N"), and as parts of a text."""

import dataclasses
import math
from collections.abc import Sequence

from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer
from octavo.serve.engine.request import RequestInput

# what OpenAI's API writes for a token of no probability
LOWEST_LOGPROB = -9999.0


def json_number(logprob: float) -> float | None:
    """A logprob: minus infinity as -9999, NaN (a broken model) as null; any other keeps all its bits."""
    return None if math.isnan(logprob) else max(logprob, LOWEST_LOGPROB)


@dataclasses.dataclass(frozen=True)
class TokenTexts:
    """Texts of token ids.

    Args:
        tokenizer: None where there is none.
        as_ids: show every token as "token_id:N", which is never ambiguous.
    """

    tokenizer: Tokenizer | None
    as_ids: bool = False

    def text(self, token_id: int) -> str:
        """A token by itself; "token_id:N" where it has no text, or is a part of a character."""
        piece = self.utf8(token_id)
        if self.as_ids or piece is None or self.tokenizer is None:
            return f"token_id:{token_id}"
        try:
            bytes(piece).decode()
        except UnicodeDecodeError:
            return f"token_id:{token_id}"
        return self.tokenizer.text_of(token_id)

    def utf8(self, token_id: int, shown: str = "") -> list[int] | None:
        """A token's bytes, of which several tokens' may make a character; None for a token without text.

        Args:
            shown: its part of a text, which may begin with a space that a decoder strips off the token by itself.
        """
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return None
        own = self.tokenizer.token_bytes(token_id)
        return list(b" " + own if shown.encode() == b" " + own else own)

    def join(self, token_ids: list[int]) -> str:
        """The text of many tokens, special ones included; ids without text are passed over."""
        if self.tokenizer is None:
            return ""
        known = [t for t in token_ids if t < self.tokenizer.vocab_size]
        return self.tokenizer.decode(known, skip_special_tokens=False)

    def has_text(self, token_id: int, *, skip_special_tokens: bool) -> bool:
        """Whether a token adds to a text."""
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return False
        return not (skip_special_tokens and token_id in self.tokenizer.special_ids)


class GrowingText:
    """The text of one choice, token by token: what each adds, and where.

    The texts of its tokens, joined, are its text. A character that several tokens make up is the last one's; the others
    have "". A token that adds nothing to the text (an end of sequence, an id that only the model knows) is shown by
    itself all the same, and takes no room.

    Args:
        prompt_ids: what it follows.
    """

    def __init__(self, texts: TokenTexts, prompt_ids: Sequence[int] = ()) -> None:
        self._texts = texts
        self._num_chars = 0
        self._decoder = self._make_decoder(skip_special_tokens=True, context=prompt_ids)

    def echo(self, token_ids: list[int], text: str) -> tuple[list[str], list[int]]:
        """Texts and offsets of a prompt's tokens; text is what the choice begins with, as it was sent."""
        skip = self._texts.join(token_ids) != text  # special tokens that are no part of it: a BOS token
        decoder = self._make_decoder(skip_special_tokens=skip)
        shown, offsets, at = [], [], 0
        for position, token_id in enumerate(token_ids):
            fresh = self._push(decoder, token_id)
            if decoder is not None and position == len(token_ids) - 1:
                fresh += decoder.flush()
            is_part = self._texts.has_text(token_id, skip_special_tokens=skip)
            label = "" if is_part else self._texts.text(token_id)
            offsets.append(min(at, len(text)))
            at += len(fresh) + (len(label) if label and text.startswith(label, at + len(fresh)) else 0)
            shown.append(self._shown(token_id, fresh + label))
        self._num_chars = len(text)
        return shown, offsets

    def add(self, token_ids: list[int], *, is_end: bool, ends_by_token: bool) -> tuple[list[str], list[int]]:
        """Texts and offsets of what the model said.

        Args:
            is_end: no token follows.
            ends_by_token: the last one, an end of sequence or a stop token, has no text.
        """
        shown, offsets = [], []
        for position, token_id in enumerate(token_ids):
            is_last = is_end and position == len(token_ids) - 1
            is_stop = is_last and ends_by_token
            fresh = "" if is_stop else self._push(self._decoder, token_id)
            if is_last and self._decoder is not None:
                fresh += self._decoder.flush()
            is_part = not is_stop and self._texts.has_text(token_id, skip_special_tokens=True)
            offsets.append(self._num_chars)
            self._num_chars += len(fresh)
            shown.append(self._shown(token_id, fresh if is_part else fresh + self._texts.text(token_id)))
        return shown, offsets

    def _make_decoder(self, *, skip_special_tokens: bool, context: Sequence[int] = ()) -> StreamDecoder | None:
        if self._texts.tokenizer is None:
            return None
        return StreamDecoder(self._texts.tokenizer, skip_special_tokens=skip_special_tokens, context=context)

    def _push(self, decoder: StreamDecoder | None, token_id: int) -> str:
        is_known = self._texts.has_text(token_id, skip_special_tokens=False)
        return decoder.push(token_id) if decoder is not None and is_known else ""

    def _shown(self, token_id: int, text: str) -> str:
        return f"token_id:{token_id}" if self._texts.as_ids else text


class GrowingTexts(dict[int, GrowingText]):
    """Those of an answer's choices, by index; each is made when it is first wanted.

    Args:
        inputs: the answer's, each with as many samples.
    """

    def __init__(self, texts: TokenTexts, inputs: Sequence[RequestInput]) -> None:
        super().__init__()
        self._texts, self._inputs = texts, inputs

    def __missing__(self, index: int) -> GrowingText:
        given = self._inputs[index // self._inputs[0].params.n]
        self[index] = made = GrowingText(self._texts, given.prompt_ids)
        return made
