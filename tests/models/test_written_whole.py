"""The order of calls by which folders and files are replaced: nothing is renamed before it is on the disk."""

import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import StorageError
from octavo.models.checkpoint.atomic import atomic_directory
from octavo.models.checkpoint.storage import check_writable
from octavo.run.atomic import write_atomic

Calls = list[tuple[str, Path]]


@pytest.fixture
def calls(monkeypatch: pytest.MonkeyPatch) -> Calls:
    """fsync, rename and removal as they come, by the path that each is of."""
    seen: Calls = []

    def record(module: Any, name: str) -> None:
        real = getattr(module, name)

        def call(first: Any, *rest: Any, **options: Any) -> Any:
            path = Path(os.readlink(f"/proc/self/fd/{first}")) if isinstance(first, int) else Path(first)
            seen.append((name, path))
            assert name != "rmtree" or (target_of(path) / "a").exists(), "the old folder went before the new one came"
            return real(first, *rest, **options)

        monkeypatch.setattr(module, name, call)

    for name in ("fsync", "rename", "replace"):
        record(os, name)
    record(shutil, "rmtree")
    record(Path, "unlink")
    return seen


def target_of(path: Path) -> Path:
    return path.with_name("folder")


def write_folder(target: Path, text: str) -> None:
    with atomic_directory(target, may_replace=lambda _: True) as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "b").write_text(text)
        (staging / "a").write_text(text)


def test_a_folder_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, calls: Calls) -> None:
    """Its files, itself, and afterwards its name, which is an entry of the folder above."""
    write_folder(tmp_path / "folder", "new")
    (taken,) = [i for i, (name, _) in enumerate(calls) if name == "rename"]
    staging = calls[taken][1]
    synced = {path for name, path in calls[:taken] if name == "fsync"}
    assert synced == {staging, staging / "a", staging / "inner", staging / "inner" / "b"}
    assert calls[taken + 1 :] == [("fsync", tmp_path)]


def test_an_old_folder_is_deleted_last(tmp_path: Path, calls: Calls) -> None:
    target = tmp_path / "folder"
    write_folder(target, "old")
    calls.clear()
    write_folder(target, "new")
    moves = [name if path != target else f"{name} target" for name, path in calls if name != "fsync"]
    assert moves == ["rename target", "rename", "rmtree"]
    assert [name for name, _ in calls].index("rename") == 4, "all four of the new one are on the disk before"
    assert [name for name, _ in calls[-3:]] == ["fsync", "rmtree", "fsync"], "its name, then what it replaced"
    assert calls[-3] == calls[-1] == ("fsync", tmp_path)
    assert (target / "a").read_text() == "new" and [path.name for path in tmp_path.iterdir()] == ["folder"]


def test_a_file_is_on_the_disk_before_it_is_renamed(tmp_path: Path, calls: Calls) -> None:
    (tmp_path / "file").write_text("old")
    write_atomic(tmp_path / "file", "text")
    assert [name for name, _ in calls] == ["fsync", "replace", "fsync"]
    assert calls[0][1] == calls[1][1] and calls[2][1] == tmp_path


def test_a_path_below_a_file_is_refused_before_any_work(tmp_path: Path) -> None:
    (tmp_path / "file").touch()
    for path in (tmp_path / "file", tmp_path / "file" / "below"):
        with pytest.raises(StorageError, match=r"run\.dir = .* cannot be written: Not a directory"):
            check_writable(path, "run.dir")
    with pytest.raises(StorageError, match="a checkpoint takes at least"):
        check_writable(tmp_path / "new", "run.dir", num_bytes=2**70)
    assert [path.name for path in tmp_path.iterdir()] == ["file"]
