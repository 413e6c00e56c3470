"""Documents from every kind of source, and what is said of a source that cannot be used."""

import json
from pathlib import Path

import pytest

from octavo.errors import DataError
from octavo.train.config import DataSection
from octavo.train.corpus import is_validation, read_documents
from tests.assertions import assert_raises


def documents(path: Path | str, **fields: object) -> list[str]:
    return list(read_documents(str(path), DataSection(**fields)))


def test_text_file_is_cut_at_blank_lines_and_loses_nothing(tmp_path: Path) -> None:
    text = "".join(f"line {i} of a paragraph\n" + ("\n" if i % 40 == 0 else "") for i in range(4000))
    (tmp_path / "a.txt").write_text(text)
    pieces = documents(tmp_path / "a.txt")
    assert len(pieces) > 5
    assert "".join(pieces) == text
    assert all(piece.endswith("\n\n") for piece in pieces[:-1])


def test_directory_is_read_by_suffix_in_sorted_order(tmp_path: Path) -> None:
    (tmp_path / "sub").mkdir()
    (tmp_path / ".hidden").mkdir()
    texts = {"b.txt": "second", "a.txt": "first", "c.bin": "no", "sub/d.txt": "third", "e.txt": " \n"}
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
    (tmp_path / ".hidden/f.txt").write_text("no")
    (tmp_path / "g.jsonl").write_text('{"text": "line"}\n')
    assert documents(tmp_path) == ["first", "second", "line", "third"]
    assert documents(tmp_path, suffixes=("txt",)) == ["first", "second", "third"]


def test_jsonl_and_its_text_field(tmp_path: Path) -> None:
    path = tmp_path / "a.jsonl"
    path.write_text("\n".join(json.dumps({"text": t, "body": t.upper()}) for t in ("one", "two ä")) + "\n\n")
    assert documents(path) == ["one", "two ä"]
    assert documents(path, text_field="body") == ["ONE", "TWO Ä"]


def test_stdlib_is_this_pythons_sources() -> None:
    texts = documents("stdlib", max_bytes=200_000)
    assert 200_000 <= sum(len(text.encode()) for text in texts) < 2_000_000
    assert any("import" in text for text in texts)


@pytest.mark.parametrize(
    ("name", "content", "message"),
    [
        ("gone.txt", None, "no such file or directory"),
        ("empty.txt", b"", "holds no text"),
        ("blank.txt", b" \n\n", "holds no text"),
        ("empty.jsonl", b"\n", "holds no text"),
        ("latin.txt", "ä".encode("latin-1"), "not UTF-8"),
        ("bad.jsonl", b'{"text": "a"}\n{"text": \n', "line 2: not JSON"),
        ("field.jsonl", b'{"body": "a"}\n', r"no text under 'text'; found \['body'\]; set data.text_field"),
        ("list.jsonl", b"[1]\n", "found list"),
    ],
)
def test_what_cannot_be_read_is_named(tmp_path: Path, name: str, content: bytes | None, message: str) -> None:
    path = tmp_path / name
    if content is not None:
        path.write_bytes(content)
    with pytest.raises(DataError, match=message) as error:
        documents(path)
    assert name in str(error.value)


def test_directory_without_such_files(tmp_path: Path) -> None:
    (tmp_path / "a.bin").write_bytes(b"x")
    assert_raises(DataError, r"no file that ends in \.txt", documents, tmp_path)


def test_split_depends_on_the_document_alone() -> None:
    texts = [f"document {i}" for i in range(4000)]
    share = sum(is_validation(text, 0.1) for text in texts) / len(texts)
    assert 0.08 < share < 0.12
    assert all(is_validation(text, 0.2) for text in texts if is_validation(text, 0.1))
