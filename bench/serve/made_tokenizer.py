"""A byte-level BPE tokenizer of any size, made without text: what a server's detokenizer works on in a benchmark."""

import itertools
import string

import tokenizers
from tokenizers import decoders, models, pre_tokenizers

from octavo.errors import ConfigError
from octavo.models.tokenizer import Tokenizer

_SPACE = "\u0120"  # how a byte-level vocabulary writes a space


def make_tokenizer(vocab_size: int) -> Tokenizer:
    """All bytes, then pieces of two, three and four letters, with and without a space before them.

    Args:
        vocab_size: at least 256 and at most about 490,000; each id has a text of its own.
    Raises:
        ConfigError: another size.
    """
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = list(itertools.islice(_merges(), max(0, vocab_size - len(alphabet))))
    vocab = {piece: i for i, piece in enumerate([*alphabet, *(a + b for a, b in merges)])}
    if len(vocab) != vocab_size:
        raise ConfigError(f"a made tokenizer has from {len(alphabet)} pieces to {len(vocab)}, got {vocab_size}")
    backend = tokenizers.Tokenizer(models.BPE(vocab=vocab, merges=merges))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    return Tokenizer(backend)


def _merges() -> "itertools.chain[tuple[str, str]]":
    letters = string.ascii_lowercase
    pairs = [a + b for a, b in itertools.product(letters, repeat=2)]
    return itertools.chain(
        itertools.product(letters, letters),
        itertools.product(pairs, letters),
        itertools.product([_SPACE], pairs),
        itertools.product(pairs, pairs),
    )
