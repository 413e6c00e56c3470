"""Token streams on disk: what is in them, when they are made again, when they are refused."""

import json
import threading
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from octavo.errors import CheckpointError, DataError
from octavo.models.tokenizer import Tokenizer, char_tokenizer, train_bpe
from octavo.train import tokens as tokens_module
from octavo.train.cache import open_entry
from octavo.train.config import DataSection
from octavo.train.corpus import is_validation
from octavo.train.tokens import load_text
from tests.assertions import assert_raises

TEXTS = [f"document {i}: the cat sat on mat number {i * 7} and said <|endoftext|>" for i in range(200)]


@pytest.fixture
def data(tmp_path: Path) -> DataSection:
    path = tmp_path / "corpus.jsonl"
    path.write_text("".join(json.dumps({"text": text}) + "\n" for text in TEXTS))
    return DataSection(
        path=str(path), cache_dir=tmp_path / "cache", vocab_size=300, seq_len=16, validation_fraction=0.1
    )


def decode(stream: np.ndarray, tokenizer: Tokenizer) -> list[str]:
    ends = np.flatnonzero(stream == tokenizer.eos_id)
    starts = [0, *(ends[:-1] + 1)]
    return [tokenizer.decode(stream[a:b].tolist()) for a, b in zip(starts, ends, strict=True)]


def test_streams_hold_every_document_once(data: DataSection) -> None:
    text = load_text(data)
    assert text.train.dtype == np.uint16
    # Documents spell out the end-of-sequence token, which must not end them.
    assert decode(text.train, text.tokenizer) == [t for t in TEXTS if not is_validation(t, 0.1)]
    assert decode(text.validation, text.tokenizer) == [t for t in TEXTS if is_validation(t, 0.1)]


def test_second_load_comes_from_the_cache(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    first = load_text(data)
    monkeypatch.setattr(tokens_module, "_write_entry", lambda *_: pytest.fail("tokenized again"))
    second = load_text(data.model_copy(update={"seq_len": 32}))
    assert second.fingerprint == first.fingerprint
    assert np.array_equal(second.train, first.train)
    assert second.tokenizer.encode("the cat") == first.tokenizer.encode("the cat")


@pytest.mark.parametrize("change", [{"vocab_size": 310}, {"validation_fraction": 0.2}, {"max_bytes": 6000}])
def test_other_settings_make_another_entry(data: DataSection, change: dict[str, object]) -> None:
    assert load_text(data.model_copy(update=change)).fingerprint != load_text(data).fingerprint


def test_other_text_makes_another_entry(data: DataSection) -> None:
    first = load_text(data).fingerprint
    with Path(data.path).open("a") as file:
        file.write(json.dumps({"text": "one more"}) + "\n")
    assert load_text(data).fingerprint != first


@pytest.mark.parametrize("damage", ["cut", "no meta", "bad meta"])
def test_damaged_entry_is_made_again(data: DataSection, damage: str) -> None:
    first = load_text(data)
    kept = np.array(first.train)
    entry = data.cache_dir / first.fingerprint
    if damage == "cut":
        (entry / "train.bin").write_bytes(b"\0\0")
    elif damage == "no meta":
        (entry / "meta.json").unlink()
    else:
        (entry / "meta.json").write_text("{")
    with pytest.warns(UserWarning, match="damaged and is made again"):
        again = load_text(data)
    assert np.array_equal(again.train, kept)


def test_nothing_is_left_where_tokenizing_fails(data: DataSection, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr(tokens_module, "_write_tokens", fail)
    assert_raises(KeyboardInterrupt, None, load_text, data)
    assert [path for path in data.cache_dir.iterdir() if path.suffix != ".lock"] == []


def test_of_jobs_that_start_together_one_makes_an_entry(tmp_path: Path) -> None:
    """What each wrote would go over the other's, while that reads it."""
    made: list[Path] = []

    def write(directory: Path) -> dict[str, int]:
        made.append(directory)
        (directory / "train.bin").write_bytes(b"tokens")
        if len(made) == 1:
            second.start()
            second.join(0.2)  # it looks for the entry, which is not there yet
        return {"num_tokens": 3}

    second = threading.Thread(target=lambda: found.append(open_entry(tmp_path, "entry", write)))
    found: list[tuple[Path, dict[str, Any]]] = []
    first = open_entry(tmp_path, "entry", write)
    second.join()
    assert found == [first]
    assert len(made) == 1


def test_validation_text_of_its_own(data: DataSection, tmp_path: Path) -> None:
    (tmp_path / "held-out.txt").write_text("a held-out text")
    text = load_text(data.model_copy(update={"validation_path": str(tmp_path / "held-out.txt")}))
    assert decode(text.validation, text.tokenizer) == ["a held-out text"]
    assert decode(text.train, text.tokenizer) == TEXTS


def test_local_tokenizer(data: DataSection, tmp_path: Path) -> None:
    train_bpe(["other text"] * 50, 260).save(tmp_path / "tokenizer")
    section = data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")})
    assert load_text(section).tokenizer.vocab_size == 260
    assert load_text(data, str(tmp_path / "tokenizer")).fingerprint == load_text(section).fingerprint
    with pytest.raises(CheckpointError, match=r"no tokenizer\.json there"):
        load_text(data.model_copy(update={"tokenizer": "gone/away"}))


def test_tokenizer_without_an_end_of_sequence(data: DataSection, tmp_path: Path) -> None:
    tokenizer = char_tokenizer("abc")
    tokenizer.eos_id = None
    tokenizer.save(tmp_path / "tokenizer")
    path = tmp_path / "tokenizer" / "tokenizer.json"
    path.write_text(path.read_text().replace("<|endoftext|>", "<|other|>"))
    with pytest.raises(DataError, match="no end-of-sequence token"):
        load_text(data.model_copy(update={"tokenizer": str(tmp_path / "tokenizer")}))


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"seq_len": 100_000}, "train tokens, at least 100001 are needed; give more text or lower data.seq_len"),
        ({"validation_fraction": 1e-9}, "gives 0 validation tokens, at least 2 are needed; raise"),
    ],
)
def test_too_little_text(data: DataSection, change: dict[str, object], message: str) -> None:
    assert_raises(DataError, message, load_text, data.model_copy(update=change))
    assert [path for path in data.cache_dir.iterdir() if path.suffix != ".lock"] == []
