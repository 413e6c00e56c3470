"""A tokenizer as those of Llama 2 and Mistral: bytes spell what has no token, and a text's first space is dropped."""

import tokenizers
from tokenizers import decoders, models, normalizers

from octavo.models import Tokenizer


def fallback_tokenizer() -> Tokenizer:
    """Of the bytes, of "a", "b", "c" and a space, and of " a"."""
    tokens = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), *"\u2581abc", "\u2581a"]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = tokenizers.Tokenizer(models.BPE(vocab, [("\u2581", "a")], unk_token="<unk>", byte_fallback=True))
    backend.normalizer = normalizers.Replace(" ", "\u2581")
    steps = [decoders.Replace("\u2581", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    backend.decoder = decoders.Sequence(steps)
    return Tokenizer(backend)
