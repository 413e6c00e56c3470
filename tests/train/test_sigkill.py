"""SIGKILL at random moments, in the middle of saves too: the run ends with the bits of one that was never killed."""

import multiprocessing
import os
import random
import signal
import subprocess
import sys
import time
from multiprocessing.context import ForkServerProcess
from pathlib import Path

import pytest

from octavo import cli
from octavo.run.metrics import METRICS_FILE, read_metrics

from .conftest import write_corpus, written

NUM_KILLS = 10
NUM_MID_SAVE_KILLS = 4
STEPS = 120
TIMEOUT_S = 240.0
COMMAND = [sys.executable, "-c", "from octavo.cli import main; main()"]


def write_config(path: Path, corpus: Path) -> Path:
    """The tests' tiny model, delayed scaling (the recipe with state), a checkpoint every second step."""
    sections = {
        "precision": {"recipe": "delayed", "amax_history_len": 16},
        "metrics": {"eval_every": 10, "eval_tokens": 128, "tensorboard": True},
        "run": {"steps": STEPS, "device": "cpu"},
    }
    return written(path, corpus, **sections)


def arguments(config: Path, directory: Path) -> list[str]:
    return ["train", str(config), "--set", f"run.dir={directory}"]


def run_to_end(config: Path, directory: Path) -> int:
    """The command in a new interpreter; its exit code."""
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with (directory.parent / f"{directory.name}.log").open("ab") as log:
        command = [*COMMAND, *arguments(config, directory)]
        return subprocess.run(command, stdout=log, stderr=log, env=env, timeout=TIMEOUT_S, check=False).returncode


def _command(log: Path, arguments: list[str]) -> None:
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["octavo", *arguments]
    cli.main()


def start(config: Path, directory: Path) -> ForkServerProcess:
    """The command in a process that has its imports from a fork: a new interpreter spends seconds on them."""
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload(["octavo.cli.train", "torch.utils.tensorboard"])
    log = directory.parent / f"{directory.name}.log"
    process = context.Process(target=_command, args=(log, arguments(config, directory)), daemon=True)
    process.start()
    return process


def num_rows(directory: Path) -> int:
    return len(read_metrics(directory / METRICS_FILE))


def kill(process: ForkServerProcess) -> None:
    process.kill()
    process.join()
    assert process.exitcode == -signal.SIGKILL


def kill_at_random(process: ForkServerProcess, directory: Path, rng: random.Random) -> None:
    """Some way into one of the next steps; the first one comes seconds after the start."""
    target = num_rows(directory) + rng.randint(1, 4)
    deadline = time.monotonic() + TIMEOUT_S
    while num_rows(directory) < target and process.is_alive() and time.monotonic() < deadline:
        time.sleep(0.002)
    time.sleep(rng.uniform(0.0, 0.03))
    kill(process)


def kill_in_mid_save(process: ForkServerProcess, directory: Path, rng: random.Random) -> bool:
    """As soon as an unfinished checkpoint is seen; whether it was still unfinished when the process had died."""
    checkpoints = directory / "checkpoints"
    before = set(checkpoints.glob(".*"))  # an earlier kill's, which the resume removes
    deadline = time.monotonic() + TIMEOUT_S
    while process.is_alive() and time.monotonic() < deadline:
        if set(checkpoints.glob(".step-*.tmp-*")) - before:
            time.sleep(rng.uniform(0.0, 0.004))
            kill(process)
            return bool(set(checkpoints.glob(".*")) - before)
        time.sleep(0.0005)  # leaves the core to the run
    raise AssertionError(f"no save was seen; exit code {process.exitcode}")


@pytest.mark.slow(first=True)
@pytest.mark.timeout(1500)
def test_killed_run_ends_with_the_same_bits(tmp_path: Path) -> None:
    rng = random.Random(0)
    config = write_config(tmp_path / "config.toml", write_corpus(tmp_path / "corpus.jsonl"))
    whole, broken = tmp_path / "whole", tmp_path / "broken"
    assert run_to_end(config, whole) == 0, (tmp_path / "whole.log").read_text()[-2000:]

    num_mid_save = num_kills = 0
    while num_mid_save < NUM_MID_SAVE_KILLS:
        num_mid_save += kill_in_mid_save(start(config, broken), broken, rng)
        num_kills += 1
        assert num_kills < 3 * NUM_MID_SAVE_KILLS, "saves are too quick to be hit"
    for _ in range(NUM_KILLS - num_mid_save):
        kill_at_random(start(config, broken), broken, rng)
    killed_at = num_rows(broken)
    assert 0 < killed_at < STEPS, "the run must not end before its last kill"
    assert run_to_end(config, broken) == 0, (tmp_path / "broken.log").read_text()[-2000:]

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
