"""metrics.jsonl and TensorBoard: what is written, and what a resume keeps."""

import os
from pathlib import Path

import pytest

from octavo.run.metrics import METRICS_FILE, MetricsWriter, Row, read_metrics


def row(step: int, **fields: float) -> Row:
    return Row(step=step, loss=2.0 / step, lr=0.1, grad_norm=1.0, tokens_per_s=10.0, seconds=step * 0.5, **fields)


def write(directory: Path, steps: range, done: int = 0, tensorboard: bool = False) -> None:
    with MetricsWriter(directory, done, tensorboard) as writer:
        for step in steps:
            writer.write(row(step))


def test_rows_come_back(tmp_path: Path) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(row(1))
        writer.write(row(2, val_loss=1.5, val_ppl=4.48))
        writer.sync()
    assert read_metrics(tmp_path / METRICS_FILE) == [row(1), row(2, val_loss=1.5, val_ppl=4.48)]
    assert "val_loss" not in (tmp_path / METRICS_FILE).read_text().splitlines()[0]


def test_sync_puts_the_rows_on_the_disk(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    synced: list[tuple[Path, list[Row]]] = []

    def fsync(descriptor: int) -> None:
        path = Path(os.readlink(f"/proc/self/fd/{descriptor}"))
        synced.append((path, read_metrics(path)))  # what was handed over by then

    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        monkeypatch.setattr(os, "fsync", fsync)
        writer.write(row(1))
        assert synced == []
        writer.sync()
    assert synced == [(tmp_path / METRICS_FILE, [row(1)])]


def test_resume_drops_later_rows(tmp_path: Path) -> None:
    write(tmp_path, range(1, 8))
    with MetricsWriter(tmp_path, 4, tensorboard=False) as writer:
        assert writer.seconds == 2.0
        writer.write(row(5))
    assert [r.step for r in read_metrics(tmp_path / METRICS_FILE)] == [1, 2, 3, 4, 5]


@pytest.mark.parametrize("num_bytes", [1, 20, 60])
def test_resume_after_a_line_cut_short(tmp_path: Path, num_bytes: int) -> None:
    write(tmp_path, range(1, 5))
    path = tmp_path / METRICS_FILE
    path.write_bytes(path.read_bytes()[:-num_bytes])
    write(tmp_path, range(4, 6), done=3)
    assert [r.step for r in read_metrics(path)] == [1, 2, 3, 4, 5]


def test_new_run_starts_empty(tmp_path: Path) -> None:
    write(tmp_path, range(1, 5))
    write(tmp_path, range(1, 2))
    assert [r.step for r in read_metrics(tmp_path / METRICS_FILE)] == [1]
    assert read_metrics(tmp_path / "gone.jsonl") == []


def test_tensorboard_shows_the_resumed_run(tmp_path: Path) -> None:
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    write(tmp_path, range(1, 8), tensorboard=True)
    write(tmp_path, range(5, 7), done=4, tensorboard=True)
    events = EventAccumulator(str(tmp_path / "tensorboard"))
    events.Reload()
    assert [event.step for event in events.Scalars("loss")] == [1, 2, 3, 4, 5, 6]
    assert set(events.Tags()["scalars"]) == {"loss", "lr", "grad_norm", "tokens_per_s"}
