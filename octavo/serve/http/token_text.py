"""How single tokens are shown to clients: as text, as bytes, or as "token_id:N"."""

import dataclasses

from octavo.models.tokenizer import Tokenizer

_REPLACEMENT = "\ufffd"


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
        """A token as text; "token_id:N" where it has none."""
        if self.as_ids or self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return f"token_id:{token_id}"
        return self.tokenizer.decode([token_id], skip_special_tokens=False)

    def utf8(self, token_id: int) -> list[int] | None:
        """A token's bytes; None for a token without text, or of bytes that are no character by themselves."""
        if self.tokenizer is None or token_id >= self.tokenizer.vocab_size:
            return None
        text = self.tokenizer.decode([token_id], skip_special_tokens=False)
        return None if _REPLACEMENT in text else list(text.encode())

    def join(self, token_ids: list[int]) -> str:
        """The text of many tokens, special ones included; ids without text are passed over."""
        if self.tokenizer is None:
            return ""
        known = [t for t in token_ids if t < self.tokenizer.vocab_size]
        return self.tokenizer.decode(known, skip_special_tokens=False)
