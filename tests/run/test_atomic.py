"""Moving an earlier run aside: nothing is lost, and no number is taken twice; removing what is too old."""

import shutil
from pathlib import Path

import pytest

from octavo.run.atomic import move_aside, remove_directory


def test_moving_aside_numbers_on_from_the_highest(tmp_path: Path) -> None:
    (tmp_path / "previous-2").mkdir()  # previous-1 was deleted by hand
    (tmp_path / "previous-7-good").mkdir()  # renamed by hand
    (tmp_path / "metrics.jsonl").write_text("a")
    move_aside(tmp_path, ("metrics.jsonl", "tensorboard"))
    assert (tmp_path / "previous-3" / "metrics.jsonl").read_text() == "a"
    assert not (tmp_path / "metrics.jsonl").exists()
    move_aside(tmp_path, ("metrics.jsonl", "tensorboard"))  # nothing is there
    assert not (tmp_path / "previous-4").exists()


def test_a_removed_folder_loses_its_name_first(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kill between the removals of its files leaves no half of it where somebody looks."""
    (tmp_path / "folder").mkdir()
    real, seen = shutil.rmtree, []

    def rmtree(path: Path, **options: bool) -> None:
        seen.append((tmp_path / "folder").exists())
        real(path, **options)

    monkeypatch.setattr(shutil, "rmtree", rmtree)
    remove_directory(tmp_path / "folder")
    assert seen == [False] and not list(tmp_path.iterdir())
