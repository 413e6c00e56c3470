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

    for module, name in ((os, "fsync"), (os, "rename"), (os, "replace"), (shutil, "rmtree")):
        record(module, name)
    return seen


def target_of(path: Path) -> Path:
    return path.with_name("folder")


def write_folder(target: Path, text: str) -> None:
    with atomic_directory(target, may_replace=lambda _: True) as staging:
        (staging / "inner").mkdir()
        (staging / "inner" / "b").write_text(text)
        (staging / "a").write_text(text)


def test_a_folder_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, calls: Calls) -> None:
    target = tmp_path / "folder"
    write_folder(target, "old")
    calls.clear()
    write_folder(target, "new")
    (aside, taken) = [i for i, (name, _) in enumerate(calls) if name == "rename"]
    staging = calls[taken][1]
    assert calls[aside][1] == target
    synced = {path for name, path in calls[:aside] if name == "fsync"}
    assert synced == {staging, staging / "a", staging / "inner", staging / "inner" / "b"}
    rest = [(name, path) for name, path in calls[taken + 1 :]]
    assert ("fsync", tmp_path) in rest, "the new name"
    assert [name for name, _ in rest].count("rmtree") == 1 and (target / "a").read_text() == "new"


def test_a_file_is_on_the_disk_before_it_takes_its_name(tmp_path: Path, calls: Calls) -> None:
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
