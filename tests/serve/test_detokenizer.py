"""Detokenizer: stop strings across tokens, what is held back while they may still come, broken characters."""

import pytest

from octavo.models.stream_decoder import StreamDecoder
from octavo.models.tokenizer import Tokenizer, char_tokenizer, train_bpe
from octavo.serve.engine.detokenizer import Detokenizer


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(["the cat sat on the mat, naïve café ☕ " * 20], 300)


def run(tokenizer: Tokenizer, ids: list[int], stops: tuple[str, ...]) -> tuple[str, str | None, int]:
    """(text, the stop string met, tokens used)."""
    detokenizer = Detokenizer(StreamDecoder(tokenizer), stops, tokenizer.vocab_size)
    for count, token_id in enumerate(ids, 1):
        if (stop := detokenizer.push(token_id)) is not None:
            return detokenizer.text, stop, count
    return detokenizer.text, detokenizer.flush(), len(ids)


@pytest.mark.parametrize(
    ("text", "stops", "expected", "met"),
    [
        ("hello world", (), "hello world", None),
        ("hello world", ("o w",), "hell", "o w"),
        ("hello world", ("world", "lo"), "hel", "lo"),
        ("hello world", ("xyz",), "hello world", None),
        ("aaab", ("aab",), "a", "aab"),
        ("hello", ("h",), "", "h"),
        ("abc", ("abcd", "bc"), "a", "bc"),
    ],
)
def test_stop_strings_over_single_characters(text: str, stops: tuple[str, ...], expected: str, met: str | None) -> None:
    tokenizer = char_tokenizer("abcdehlorwxyz ")
    got, stop, used = run(tokenizer, tokenizer.encode(text), stops)
    assert (got, stop) == (expected, met)
    if met is not None:
        assert used == text.find(met) + len(met)


@pytest.mark.parametrize("stop", ["sat", "at on t", "fé ☕", "☕", "t, na"])
def test_a_stop_string_ends_the_text_wherever_token_boundaries_lie(bpe: Tokenizer, stop: str) -> None:
    text = "the cat sat on the mat, naïve café ☕ the end"
    got, met, _ = run(bpe, bpe.encode(text), (stop,))
    assert met == stop
    assert got == text[: text.find(stop)]


def test_settled_text_never_shows_the_beginning_of_a_stop_string() -> None:
    tokenizer = char_tokenizer("abcENDx")
    detokenizer = Detokenizer(StreamDecoder(tokenizer), ("END",), tokenizer.vocab_size)
    shown = []
    for token_id in tokenizer.encode("abENcEND"):
        detokenizer.push(token_id)
        shown.append(detokenizer.settled_text)
    assert all("abENc".startswith(text) for text in shown)
    assert detokenizer.text == "abENc"


def test_an_unfinished_character_is_shown_at_the_end_only(bpe: Tokenizer) -> None:
    ids = bpe.encode("☕☃")  # the second one is three bytes of the base alphabet
    detokenizer = Detokenizer(StreamDecoder(bpe), (), bpe.vocab_size)
    for token_id in ids[:-1]:
        detokenizer.push(token_id)
    assert detokenizer.text == "☕"
    detokenizer.flush()
    assert detokenizer.text == "☕\ufffd"


def test_ids_that_only_the_model_knows_have_no_text(bpe: Tokenizer) -> None:
    ids = bpe.encode("the")
    assert run(bpe, [bpe.vocab_size, *ids, bpe.vocab_size + 5], ())[0] == "the"
