"""Moving an earlier run aside: nothing is lost, and no number is taken twice."""

from pathlib import Path

from octavo.run.atomic import move_aside


def test_moving_aside_numbers_on_from_the_highest(tmp_path: Path) -> None:
    (tmp_path / "previous-2").mkdir()  # previous-1 was deleted by hand
    (tmp_path / "metrics.jsonl").write_text("a")
    move_aside(tmp_path, ("metrics.jsonl", "tensorboard"))
    assert (tmp_path / "previous-3" / "metrics.jsonl").read_text() == "a"
    assert not (tmp_path / "metrics.jsonl").exists()
    move_aside(tmp_path, ("metrics.jsonl", "tensorboard"))  # nothing is there
    assert not (tmp_path / "previous-4").exists()
