"""A bound of a token's characters: what refuses a text by its length before it is tokenized."""

import json
from typing import Any

from octavo.models.tokenizer import Tokenizer

# code points that canonical composition can make one of (Unicode FAQ, normalization: the largest expansion of NFD)
_MOST_COMPOSED = 4
_BYTES = 256


def longest_token_chars(tokenizer: Tokenizer) -> int | None:
    """Characters of a text that one token stands for at most; a text of n tokens has no more than n times that.

    None where the tokenizer may drop characters or put any number of them into one token: for whitespace beside a
    special token, unknown words, normalizers that remove or join, cuts that are dropped, truncation.
    """
    fields = json.loads(tokenizer.backend.to_str())
    model, added = fields["model"], fields["added_tokens"]
    factor = _shrinkage(fields["normalizer"])
    if (
        factor is None
        or fields["truncation"] is not None
        or model["type"] != "BPE"
        or any(token["lstrip"] or token["rstrip"] for token in added)
        or not _keeps_all(fields["pre_tokenizer"])
        or not _knows_every_byte(model, fields["pre_tokenizer"])
    ):
        return None
    longest = max(map(len, [*model["vocab"], *(token["content"] for token in added)]))
    return factor * longest


def _shrinkage(normalizer: dict[str, Any] | None) -> int | None:
    """How many characters may become one; None for any number."""
    if normalizer is None:
        return 1
    match normalizer["type"]:
        case "Prepend" | "NFD" | "NFKD":
            return 1
        case "NFC" | "NFKC":
            return _MOST_COMPOSED
        case "Replace":
            text = normalizer["pattern"].get("String")
            return 1 if text is not None and len(text) <= len(normalizer["content"]) else None
        case "Sequence":
            factor = 1
            for part in map(_shrinkage, normalizer["normalizers"]):
                if part is None:
                    return None
                factor *= part
            return factor
    return None


def _keeps_all(pre_tokenizer: dict[str, Any] | None) -> bool:
    """Cutting drops no character."""
    if pre_tokenizer is None:
        return True
    match pre_tokenizer["type"]:
        case "ByteLevel" | "Metaspace" | "Digits":
            return True
        case "Split" | "Punctuation":
            return bool(pre_tokenizer["behavior"] != "Removed")
        case "Sequence":
            return all(map(_keeps_all, pre_tokenizer["pretokenizers"]))
    return False


def _knows_every_byte(model: dict[str, Any], pre_tokenizer: dict[str, Any] | None) -> bool:
    """No character is unknown: there is a token for each byte."""
    vocab = model["vocab"]
    if model.get("byte_fallback") and all(f"<0x{byte:02X}>" in vocab for byte in range(_BYTES)):
        return True
    parts = [pre_tokenizer or {}, *(pre_tokenizer or {}).get("pretokenizers", [])]
    is_byte_level = any(part.get("type") == "ByteLevel" for part in parts)
    # byte-level tokens are written in an alphabet of one character a byte
    return is_byte_level and sum(len(token) == 1 for token in vocab) >= _BYTES
