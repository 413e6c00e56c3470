"""A disk or service that refuses what is written for people: the run goes on, says so once and counts."""

import errno
import io
import os
from pathlib import Path
from typing import Any

import pytest

from octavo.run import metrics as metrics_module
from octavo.run.metrics import METRICS_FILE, MetricsWriter, read_metrics
from octavo.run.write_failures import WriteFailures
from octavo.train import train
from octavo.train.statistics import STATISTICS_FILE
from tests.run.test_metrics import row


class Disk:
    """A disk that can be full; `room` is how many bytes of a line still fit then."""

    def __init__(self) -> None:
        self.is_full, self.room = False, 0

    def check(self) -> None:
        if self.is_full:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


@pytest.fixture
def disk(monkeypatch: pytest.MonkeyPatch) -> Disk:
    """The disk under metrics.jsonl."""
    disk, write_atomic = Disk(), metrics_module.write_atomic

    class File(io.FileIO):
        def write(self, data: Any) -> int:
            if disk.is_full and disk.room:
                return super().write(data[: disk.room])
            disk.check()
            return super().write(data)

    def write_whole(path: Path, text: str) -> None:
        disk.check()
        write_atomic(path, text)

    monkeypatch.setattr("octavo.run.metrics.io.FileIO", File)
    monkeypatch.setattr(metrics_module, "write_atomic", write_whole)
    return disk


@pytest.mark.parametrize("room", [0, 1, 40])
@pytest.mark.parametrize("healed_by", ["write", "sync", "exit"])
def test_metrics_are_whole_after_the_next_success(tmp_path, disk, caplog, room, healed_by):
    disk.room = room
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(row(1))
        disk.is_full = True
        writer.write(row(2))
        writer.write(row(3))
        assert read_metrics(tmp_path / METRICS_FILE) == [row(1)]
        disk.is_full = False
        if healed_by == "write":
            writer.write(row(4))
        elif healed_by == "sync":
            writer.sync()
        if healed_by != "exit":
            assert read_metrics(tmp_path / METRICS_FILE) == writer.rows
    assert read_metrics(tmp_path / METRICS_FILE) == writer.rows
    assert writer.failures.counts == {METRICS_FILE: 2}
    assert caplog.text.count("metrics.jsonl was not written, the run goes on: OSError: ") == 1
    assert "writes that failed in this run: metrics.jsonl 2" in caplog.text


def test_a_disk_that_stays_full_loses_the_later_rows_only(tmp_path: Path, disk: Disk) -> None:
    with MetricsWriter(tmp_path, 0, tensorboard=False) as writer:
        writer.write(row(1))
        disk.is_full, disk.room = True, 30
        writer.write(row(2))
        writer.sync()
    assert read_metrics(tmp_path / METRICS_FILE) == [row(1)]
    disk.is_full = False
    with MetricsWriter(tmp_path, 1, tensorboard=False) as writer:  # the run goes on from a checkpoint of step 1
        writer.write(row(2))
    assert read_metrics(tmp_path / METRICS_FILE) == [row(1), row(2)]


@pytest.mark.parametrize("error", [OSError(errno.EIO, "bad disk"), ValueError("I/O operation on closed file")])
def test_tensorboard_that_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, error: Exception) -> None:
    def fail(*args: Any, **kwargs: Any) -> None:
        raise error

    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.add_scalar", fail)
    monkeypatch.setattr("torch.utils.tensorboard.SummaryWriter.close", fail)
    with MetricsWriter(tmp_path, 0, tensorboard=True) as writer:
        writer.write(row(1))
    assert writer.failures.counts == {"TensorBoard's events": 2}
    assert read_metrics(tmp_path / METRICS_FILE) == [row(1)]


def test_tensorboard_that_cannot_begin(tmp_path: Path) -> None:
    (tmp_path / "tensorboard").touch()
    with MetricsWriter(tmp_path, 0, tensorboard=True) as writer:
        writer.write(row(1))
    assert writer.failures.counts == {"TensorBoard's events": 1}


def test_a_run_goes_on_without_its_writers(make_config, monkeypatch, caplog):
    """Metrics, TensorBoard, statistics and the progress line each fail at every step."""

    def fail(*args: Any, **kwargs: Any) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    sections = {"metrics": {"tensorboard": True, "eval_every": 2}, "statistics": {"every": 1}, "run": {"steps": 3}}
    whole = train(make_config("whole", **sections), progress=False)
    monkeypatch.setattr("octavo.run.metrics.io.FileIO", type("FullFile", (io.FileIO,), {"write": fail}))
    for method in (
        "torch.utils.tensorboard.SummaryWriter.add_scalar",
        "octavo.train.statistics.StatisticsWriter.write",
        "octavo.train.progress.TrainProgress.update",
    ):
        monkeypatch.setattr(method, fail)
    result = train(make_config("broken", **sections), progress=False)
    assert [r.loss for r in result.rows] == [r.loss for r in whole.rows]
    assert (result.checkpoint / "trainer.safetensors").read_bytes() == (
        whole.checkpoint / "trainer.safetensors"
    ).read_bytes()
    for what in (METRICS_FILE, "TensorBoard's events", STATISTICS_FILE, "progress"):
        assert caplog.text.count(f"{what} was not written, the run goes on: OSError: ") == 1, what
        assert f"{what} " in caplog.text.split("writes that failed in this run: ")[1]


def test_errors_that_end_a_run_are_not_caught() -> None:
    failures = WriteFailures()
    for ends in (KeyboardInterrupt, SystemExit):
        with pytest.raises(ends), failures.caught("a file"):
            raise ends
    assert failures.total == 0
