"""Tokenizers: any text survives, streams never show half a character, files are local."""

import json
import random
from pathlib import Path

import pytest
from tokenizers import AddedToken, decoders
from tokenizers import Tokenizer as Backend

from octavo.errors import CheckpointError, ConfigError, DataError
from octavo.models import StreamDecoder, Tokenizer, char_tokenizer, load_tokenizer, train_bpe
from tests.fallback_tokenizer import fallback_tokenizer

TEXTS = ["the cat sat on the mat\n" * 5, "def f(x):\n    return x + 1\n" * 5, "naïve café ☃ 漢字 😀" * 3]
STRANGE = ["", " ", "\n\n  x", "naïve ☃😀", "\x00\x7f\u2028", "a\ufffdb", "e\u0301", "日本語" * 20]
STRANGE.append("👩\u200d👩\u200d👧")


@pytest.fixture(scope="module")
def bpe() -> Tokenizer:
    return train_bpe(TEXTS, 300)


@pytest.mark.parametrize("text", STRANGE + TEXTS)
def test_byte_level_bpe_gives_any_text_back(bpe: Tokenizer, text: str) -> None:
    ids = bpe.encode(text)
    assert bpe.decode(ids) == text
    assert all(0 <= i < bpe.vocab_size for i in ids)


def test_training_is_reproducible_and_compresses(bpe: Tokenizer) -> None:
    again = train_bpe(iter(TEXTS), 300)
    assert again.backend.to_str() == bpe.backend.to_str()
    assert bpe.vocab_size == 300
    assert 257 <= train_bpe(["abc"], 1000).vocab_size < 262  # too little text
    assert (bpe.eos_id, bpe.eos_token_id) == (0, 0)
    assert len(bpe.encode(TEXTS[0])) < len(TEXTS[0]) / 2


def test_the_eos_token_is_one_id_and_no_text(bpe: Tokenizer) -> None:
    assert bpe.encode("a<|endoftext|>b")[1] == bpe.eos_id
    ids = [*bpe.encode("a"), 0, *bpe.encode("b")]
    assert bpe.decode(ids) == "ab"
    assert bpe.decode(ids, skip_special_tokens=False) == "a<|endoftext|>b"


def test_characters() -> None:
    tokenizer = char_tokenizer("0123456789+= \n")
    ids = tokenizer.encode("12 + 3=\n")
    assert ids == [2, 3, 13, 11, 13, 4, 12, 14]
    assert tokenizer.decode(ids) == "12 + 3=\n"
    assert (tokenizer.vocab_size, tokenizer.eos_id) == (15, 0)
    assert tokenizer.encode_batch(["1", "", "23"]) == [[2], [], [3, 4]]
    with pytest.raises(DataError, match="'x'"):
        tokenizer.encode("1x2")


def test_bad_arguments(bpe: Tokenizer, tmp_path: Path) -> None:
    for alphabet in ("", "aa"):
        with pytest.raises(ConfigError, match="alphabet"):
            char_tokenizer(alphabet)
    with pytest.raises(ConfigError, match="257"):
        train_bpe(TEXTS, 256)
    with pytest.raises(DataError, match="-1"):
        bpe.decode([1, -1])
    for name in ("Qwen/Qwen3-8B", "missing/tokenizer.json"):
        with pytest.raises(CheckpointError, match=r"local tokenizer\.json"):
            load_tokenizer(name)
    (tmp_path / "tokenizer.json").write_text("{}")
    with pytest.raises(CheckpointError, match="not a tokenizer file"):
        load_tokenizer(tmp_path)


def test_ids_beyond_the_vocabulary_have_no_text(bpe: Tokenizer) -> None:
    ids = bpe.encode("abc\u00e9")
    padded = [bpe.vocab_size, *ids[:-1], bpe.vocab_size + 19, ids[-1], 2**40]
    assert bpe.decode(padded) == "abc\u00e9"
    decoder = StreamDecoder(bpe)
    assert "".join(map(decoder.push, padded)) + decoder.flush() == "abc\u00e9"


@pytest.mark.parametrize("kind", ["bpe", "char"])
def test_saved_tokenizers_are_read_back(tmp_path: Path, bpe: Tokenizer, kind: str) -> None:
    tokenizer = bpe if kind == "bpe" else char_tokenizer("abc ")
    tokenizer.save(tmp_path / "deep" / "tok")
    for path in (tmp_path / "deep" / "tok", str(tmp_path / "deep" / "tok" / "tokenizer.json")):
        again = load_tokenizer(path)
        assert again.eos_id == tokenizer.eos_id
        assert again.encode("abc ca") == tokenizer.encode("abc ca")
        assert again.decode(again.encode("abc ca")) == "abc ca"


def test_no_text_is_cut_or_padded_as_a_file_says(tmp_path: Path, bpe: Tokenizer) -> None:
    backend = Backend.from_str(bpe.backend.to_str())
    backend.enable_truncation(4)  # as transformers leaves it in what it saves
    backend.enable_padding(length=8)
    Tokenizer(backend).save(tmp_path)
    for text in ("a", "the cat sat on the mat"):
        assert load_tokenizer(tmp_path).encode(text) == bpe.encode(text)


def test_where_the_eos_id_comes_from(tmp_path: Path, bpe: Tokenizer) -> None:
    bpe.save(tmp_path)
    config = tmp_path / "tokenizer_config.json"
    config.write_text(json.dumps({"eos_token": {"content": "a"}}))
    assert load_tokenizer(tmp_path).eos_id == bpe.backend.token_to_id("a")
    config.write_text(json.dumps({"eos_token": "<none of these>"}))
    with pytest.raises(CheckpointError, match="none of these"):
        load_tokenizer(tmp_path)
    config.unlink()
    (tmp_path / "config.json").write_text(json.dumps({"eos_token_id": [5, 6]}))
    assert load_tokenizer(tmp_path).eos_id == 5
    (tmp_path / "config.json").unlink()
    assert load_tokenizer(tmp_path).eos_id == 0


def stream(tokenizer: Tokenizer, ids: list[int]) -> list[str]:
    decoder = StreamDecoder(tokenizer)
    return [*(decoder.push(i) for i in ids), decoder.flush()]


@pytest.mark.parametrize("text", STRANGE + TEXTS)
def test_a_stream_joins_to_the_text_and_shows_no_half_character(bpe: Tokenizer, text: str) -> None:
    pieces = stream(bpe, bpe.encode(text))
    assert "".join(pieces) == text
    shown = "".join(pieces[:-1])
    assert "\ufffd" in text or "\ufffd" not in shown


def test_streams_of_random_tokens_join_to_their_decoding(bpe: Tokenizer) -> None:
    rng = random.Random(0)
    for size in (258, bpe.vocab_size):  # bytes alone make broken characters of every kind
        for _ in range(60):
            ids = [rng.randrange(size) for _ in range(rng.randrange(100))]
            assert "".join(stream(bpe, ids)) == bpe.decode(ids)


def test_a_stream_ends_with_what_was_never_completed(bpe: Tokenizer) -> None:
    ids = [bpe.backend.token_to_id(c) for c in "ðŁĺ"]  # three of the four bytes of an emoji
    assert stream(bpe, ids) == ["", "", "", "\ufffd"]


@pytest.fixture(scope="module")
def fallback() -> Tokenizer:
    return fallback_tokenizer()


@pytest.mark.parametrize(
    "text", ["a\U0001f600b", "\U0001f600" * 2, "\u6f22" * 50, "\u2581abc\xe9\n" * 9 + "\u6f22\U0001f600"]
)
def test_a_stream_gives_characters_of_fallback_bytes_out_whole(fallback: Tokenizer, text: str) -> None:
    ids = fallback.encode(text)
    pieces = stream(fallback, ids)
    assert "".join(pieces) == fallback.decode(ids) == text.replace("\u2581", " ").removeprefix(" ")
    assert pieces[-1] == "" and all(len(piece) <= 2 for piece in pieces)


def test_a_stream_of_fallback_bytes_that_are_no_text(fallback: Tokenizer) -> None:
    grin = fallback.encode("\U0001f600")
    assert stream(fallback, [*grin, *fallback.encode("a"), *grin[:2]]) == [
        *[""] * 3,
        "\U0001f600",
        "a",
        "",
        "",
        "\ufffd" * 2,
    ]
    assert stream(fallback, [*grin[:2], *fallback.encode("a")])[-2:] == ["\ufffd" * 2 + "a", ""]


def test_bytes_that_are_never_a_character_are_given_out_and_forgotten(bpe: Tokenizer, fallback: Tokenizer) -> None:
    backend = Backend.from_str(bpe.backend.to_str())
    backend.decoder = decoders.Sequence([decoders.ByteLevel()])
    for tokenizer, byte in ((Tokenizer(backend), bpe.backend.token_to_id("\u0122")), (fallback, 1 + 0x80)):
        decoder = StreamDecoder(tokenizer)
        text = "".join(decoder.push(byte) for _ in range(1000))
        assert len(decoder._ids) < 200 and len(text) > 800  # the engine decodes them at each token
        assert text + decoder.flush() == "\ufffd" * 1000


@pytest.mark.parametrize("prompt", ["", "a", "\U0001f600a\n", "abc" * 20, "\u6f22" * 20])
def test_a_text_goes_on_behind_its_context(fallback: Tokenizer, prompt: str) -> None:
    context, ids = fallback.encode(prompt), fallback.encode(" a b\u6f22") * 9
    text = " a b\u6f22" * 9
    text = text if context else text[1:]  # only what begins a text loses its space
    decoder = StreamDecoder(fallback, context=context)
    assert "".join(map(decoder.push, ids)) + decoder.flush() == text
    assert StreamDecoder(fallback, context=context).push_all(ids) == text


def test_byte_level_streams_are_cut_as_windows_are(bpe: Tokenizer) -> None:
    """A decoder that has another name is decoded by windows: token for token both give the same text."""
    added = [AddedToken("a \u00e9\u4e2d", normalized=False), AddedToken("<end>", special=True)]
    tokenizers = []
    for decoder in (decoders.ByteLevel(), decoders.Sequence([decoders.ByteLevel()])):
        backend = type(bpe.backend).from_str(bpe.backend.to_str())
        backend.add_tokens(added)
        backend.decoder = decoder
        tokenizers.append(Tokenizer(backend))
    fast, windowed = tokenizers
    assert fast.utf8_by_token is not None and windowed.utf8_by_token is None
    rng = random.Random(1)
    special = range(bpe.vocab_size - 3, bpe.vocab_size + 5)  # what was added, and ids beyond
    for size in (258, bpe.vocab_size):
        for skip in (True, False):
            for _ in range(100):
                ids = [
                    rng.choice(special) if rng.random() < 0.1 else rng.randrange(size) for _ in range(rng.randrange(90))
                ]
                pieces = []
                for tokenizer in (fast, windowed):
                    stream = StreamDecoder(tokenizer, skip_special_tokens=skip)
                    pieces.append([*map(stream.push, ids), stream.flush(), stream.flush()])
                assert pieces[0] == pieces[1]
                assert "".join(pieces[0]) == fast.decode(ids, skip_special_tokens=skip)
