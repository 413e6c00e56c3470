"""SIGKILL at random moments, in the middle of saves too: the run ends with the bits of one that was never killed."""

import random
import signal
import time
from pathlib import Path

import pytest

from octavo.run.metrics import METRICS_FILE, read_metrics
from tests.forks import Fork, start_octavo

from .conftest import write_corpus, written

STEPS = 70
TIMEOUT_S = 240.0


def write_config(path: Path, corpus: Path) -> Path:
    """The tests' tiny model, delayed scaling (the recipe with state), a checkpoint every second step."""
    sections = {
        "precision": {"recipe": "delayed", "amax_history_len": 16},
        "metrics": {"eval_every": 10, "eval_tokens": 128, "tensorboard": True},
        "run": {"steps": STEPS, "device": "cpu"},
    }
    return written(path, corpus, **sections)


def start(config: Path, directory: Path) -> Fork:
    """The command in a process that has its imports from a fork: a new interpreter spends seconds on them."""
    return start_octavo(log_of(directory), "train", str(config), "--set", f"run.dir={directory}")


def log_of(directory: Path) -> Path:
    return directory.parent / f"{directory.name}.log"


def run_to_end(config: Path, directory: Path) -> None:
    process = start(config, directory)
    assert process.wait(TIMEOUT_S) == 0, log_of(directory).read_text()[-2000:]


def num_rows(directory: Path) -> int:
    return len(read_metrics(directory / METRICS_FILE))


def kill(process: Fork) -> None:
    process.kill()
    assert process.wait() == -signal.SIGKILL


def kill_at_random(process: Fork, directory: Path, rng: random.Random) -> None:
    """Some way into one of the next steps; the first one comes seconds after the start."""
    target = num_rows(directory) + rng.randint(1, 4)
    deadline = time.monotonic() + TIMEOUT_S
    while num_rows(directory) < target and process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.03))
    kill(process)


def kill_in_mid_save(process: Fork, directory: Path, rng: random.Random) -> bool:
    """As soon as an unfinished checkpoint is seen; whether it was still unfinished when the process had died."""
    checkpoints = directory / "checkpoints"
    before = set(checkpoints.glob(".*"))  # an earlier kill's, which the resume removes
    deadline = time.monotonic() + TIMEOUT_S
    while process.poll() is None and time.monotonic() < deadline:
        if set(checkpoints.glob(".step-*.tmp-*")) - before:
            time.sleep(rng.uniform(0.0, 0.004))
            kill(process)
            return bool(set(checkpoints.glob(".*")) - before)
        time.sleep(0.0005)  # leaves the core to the run
    raise AssertionError(f"no save was seen; exit code {process.exitcode}")


@pytest.mark.timeout(1500)
@pytest.mark.parametrize(
    ("kills", "mid_save_kills"),
    [pytest.param(5, 2, marks=pytest.mark.slow(first=True)), pytest.param(10, 4, marks=pytest.mark.largest)],
)
def test_killed_run_ends_with_the_same_bits(kills: int, mid_save_kills: int, tmp_path: Path) -> None:
    rng = random.Random(0)
    config = write_config(tmp_path / "config.toml", write_corpus(tmp_path / "corpus.jsonl"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    run_to_end(config, whole)

    num_mid_save = num_kills = 0
    while num_mid_save < mid_save_kills:
        num_mid_save += kill_in_mid_save(start(config, broken), broken, rng)
        num_kills += 1
        assert num_kills < 12, "saves are too quick to be hit"
    for _ in range(kills - num_mid_save):
        kill_at_random(start(config, broken), broken, rng)
    killed_at = num_rows(broken)
    assert 0 < killed_at < STEPS, "the run must not end before its last kill"
    run_to_end(config, broken)

    name = f"checkpoints/step-{STEPS:08d}"
    files = sorted(p.relative_to(whole / name) for p in (whole / name).rglob("*") if p.is_file())
    assert len(files) > 6
    for file in files:
        if file.name not in ("trainer.json", "manifest.json"):  # they hold run.dir
            assert (whole / name / file).read_bytes() == (broken / name / file).read_bytes(), file
    rows = [
        [(r.step, r.loss, r.lr, r.grad_norm, r.val_loss, r.val_ppl) for r in read_metrics(directory / METRICS_FILE)]
        for directory in (whole, broken)
    ]
    assert [row[0] for row in rows[0]] == list(range(1, STEPS + 1))
    assert rows[0] == rows[1]
    assert not list((broken / "checkpoints").glob(".*")), "leftovers stay"
