"""A text of n tokens never has more characters than n times the bound, or there is no bound."""

import json
import random
import unicodedata

import pytest
import tokenizers
from tokenizers import models, normalizers, pre_tokenizers

from octavo.models import Tokenizer, train_bpe
from octavo.models.token_length import longest_token_chars
from octavo.models.tokenizer import char_tokenizer


def byte_level() -> Tokenizer:
    return train_bpe(["hello world, tell me of the sea      and the sky"] * 3, 300)


@pytest.mark.parametrize("normalizer", [None, normalizers.NFC(), normalizers.NFKC(), normalizers.NFD()])
def test_the_bound_holds(normalizer: object) -> None:
    tokenizer = byte_level()
    tokenizer.backend.normalizer = normalizer
    bound = longest_token_chars(tokenizer)
    assert bound is not None
    rng = random.Random(0)
    pieces = ["hello", " sea", "      ", "<|endoftext|>", "\u1f82", unicodedata.normalize("NFD", "\u1f82"), "é", "😀"]
    for _ in range(300):
        text = "".join(rng.choices(pieces, k=rng.randrange(1, 12)))
        assert len(text) <= bound * len(tokenizer.encode(text))
    assert bound * len(tokenizer.encode("hello" * 100)) < 100 * len("hello" * 100)


def with_fields(**changes: object) -> Tokenizer:
    fields = json.loads(byte_level().backend.to_str())
    return Tokenizer(tokenizers.Tokenizer.from_str(json.dumps(fields | changes)))


def test_tokenizers_that_may_drop_text_have_none() -> None:
    assert longest_token_chars(with_fields()) is not None
    strip = {"type": "Strip", "strip_left": True, "strip_right": True}
    removed = {"type": "Split", "pattern": {"String": "a"}, "behavior": "Removed", "invert": False}
    truncation = {"direction": "Right", "max_length": 5, "strategy": "LongestFirst", "stride": 0}
    for changes in ({"normalizer": strip}, {"pre_tokenizer": removed}, {"truncation": truncation}):
        assert longest_token_chars(with_fields(**changes)) is None, changes
    added = json.loads(byte_level().backend.to_str())["added_tokens"]
    assert longest_token_chars(with_fields(added_tokens=[token | {"lstrip": True} for token in added])) is None
    assert longest_token_chars(char_tokenizer("abc")) is None
    unknown = tokenizers.Tokenizer(models.BPE({"a": 0, "b": 1}, []))
    unknown.pre_tokenizer = pre_tokenizers.ByteLevel()
    assert longest_token_chars(Tokenizer(unknown)) is None
