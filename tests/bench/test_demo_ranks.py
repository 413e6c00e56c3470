"""`octavo demo --ranks`: all equal to one process, and what is not equal is found."""

import json
import os
import shutil
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest
import torch

from bench.demo import ranks
from bench.demo.ranks import _compare_rl, _compare_samples, _compare_training, run_ranks_demo
from octavo.cli import main
from octavo.errors import ConfigError
from octavo.run.metrics import METRICS_FILE, read_metrics
from tests.forks import popen_or_fork, start_octavo
from tests.ranks import run_ranks

Sampled = tuple[list[int], list[float]]


def octavo(rank: int, *arguments: str) -> int:
    sys.argv = ["octavo", *arguments]
    with pytest.raises(SystemExit) as ended:
        main()
    return int(ended.value.code or 0)


def octavo_until_killed(rank: int, metrics: str, num_steps: int, *arguments: str) -> int:
    """The last rank dies once so many steps are written."""

    def kill() -> None:
        while len(read_metrics(Path(metrics))) < num_steps:
            time.sleep(0.02)
        os.kill(os.getpid(), signal.SIGKILL)

    if rank == 1:
        threading.Thread(target=kill, daemon=True).start()
    return octavo(rank, *arguments)


def run_in_forks(num_ranks: int, command: str, config: Path, folder: Path) -> None:
    """Instead of the demo's processes, which spend seconds on imports."""
    arguments = (command, str(config), "--set", f"run.dir={folder}", "--set", "run.device=cpu")
    if num_ranks == 1:
        process = start_octavo(folder.with_suffix(".log"), *arguments)
        assert process.wait() == 0, folder.with_suffix(".log").read_text()
    else:
        assert run_ranks(octavo, num_ranks, *arguments) == [0] * num_ranks


def kill_in_forks(num_ranks: int, out: Path) -> int:
    arguments = ("train", str(out / "train.toml"), "--set", f"run.dir={out / 'ranks'}", "--set", "run.device=cpu")
    metrics = out / "ranks" / METRICS_FILE
    with pytest.raises(torch.multiprocessing.ProcessExitedException, match="SIGKILL"):
        run_ranks(octavo_until_killed, num_ranks, str(metrics), ranks._KILL_AFTER, *arguments)
    return len(read_metrics(metrics))


@pytest.mark.largest
@pytest.mark.parametrize("are_forks", [True, False])
def test_two_ranks_are_equal_to_one_process_and_a_difference_is_seen(
    are_forks: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """With a third of the demo's steps: a checkpoint, some steps, the kill, and some more."""
    from bench.demo.display import Display

    monkeypatch.setattr(ranks, "_STEPS", 8)
    monkeypatch.setattr(ranks, "_KILL_AFTER", 5)
    if are_forks:
        monkeypatch.setattr(ranks, "_octavo", run_in_forks)
        monkeypatch.setattr(ranks, "_train_and_kill", kill_in_forks)
        monkeypatch.setattr(ranks, "TRAIN", ranks.TRAIN.replace("max_bytes = 2_000_000", "max_bytes = 600_000"))
        monkeypatch.setattr(subprocess, "Popen", popen_or_fork)
    assert run_ranks_demo(2, tmp_path, 0, Display())
    compared = json.loads((tmp_path / "ranks.json").read_text())["compared"]
    assert len(compared) == 6 and all(row["is_equal"] for row in compared)
    metrics = tmp_path / "ranks" / "metrics.jsonl"
    metrics.write_text(metrics.read_text().replace('"loss": ', '"loss": 1', 1))
    (weights,) = (tmp_path / "rl-ranks" / "final").glob("*.safetensors")
    weights.write_bytes(weights.read_bytes()[:-1] + b"\x55")
    assert [each.is_equal for each in (*_compare_training(tmp_path, 2, 5), *_compare_rl(tmp_path))] == [
        False,
        True,
        True,
        True,
        False,
    ]
    shutil.rmtree(tmp_path / "ranks" / "checkpoints")
    assert not list(_compare_training(tmp_path, 2, 5))[1].is_equal


@pytest.mark.parametrize(
    "cut", [[([3, 4], [-1.0, -2.0])], [([3, 5], [-1.0, -2.5])], [([3, 4], [-1.0, -2.0]), ([3], [-1.0])], []]
)
def test_samples_that_differ_are_seen(cut: list[Sampled], monkeypatch: pytest.MonkeyPatch) -> None:
    one: list[Sampled] = [([3, 4], [-1.0, -2.5])]
    monkeypatch.setattr("bench.demo.ranks._sample", lambda model, num_ranks, seed: one if num_ranks == 1 else cut)
    assert not _compare_samples(Path("model"), 2, 0).is_equal
    cut[:] = one
    assert _compare_samples(Path("model"), 2, 0).is_equal
    one.clear()
    cut.clear()
    assert not _compare_samples(Path("model"), 2, 0).is_equal  # nothing was sampled


@pytest.mark.parametrize("num_ranks", ["1", "3"])
def test_ranks_that_do_not_fit_are_refused(run_octavo, num_ranks: str, tmp_path: Path) -> None:  # type: ignore[no-untyped-def]
    ended = run_octavo("demo", "--ranks", num_ranks, "--out", str(tmp_path))
    assert ended.code == 2 and f"--ranks must be 2, 4 or 8, got {num_ranks}" in ended.err
    assert ConfigError.__name__ not in ended.err
