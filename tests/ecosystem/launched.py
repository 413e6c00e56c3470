"""Examples under a framework's launcher: started, watched by their losses.txt, killed; and a row's versions."""

import contextlib
import importlib.util
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

from octavo.integrations import tested
from tests.ranks import free_port

ROOT = Path(__file__).parents[2]


def launch(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
    """Start a Python program: its file, or -m and its module, and what it is given."""
    place = {
        "OMP_NUM_THREADS": "1",
        "PYTHONWARNINGS": "ignore",
        "PYTHONPATH": str(ROOT),
        "MASTER_PORT": str(free_port()),
    }
    return subprocess.Popen(
        [sys.executable, *map(str, command)],
        env=os.environ | place | environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def torchrun(*command: str | Path, **environment: str) -> subprocess.Popen[str]:
    """The same on two ranks of torchrun's."""
    launcher = ("-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", str(free_port()))
    return launch(*launcher, *command, **environment)


def finish(run: subprocess.Popen[str], code: int = 0) -> str:
    """What a program printed, when it has ended well."""
    out, _ = run.communicate(timeout=200)
    assert run.returncode == code, out[-4000:]
    return out


def losses(folder: Path) -> dict[int, str]:
    """By step; of a step that was made twice the last. A line that is cut off waits."""
    path = folder / "losses.txt"
    lines = path.read_text().split("\n")[:-1] if path.exists() else []
    return {int(step): rest for step, rest in (line.split(maxsplit=1) for line in lines)}


def kill_a_rank(run: subprocess.Popen[str], is_time: Callable[[], bool], depth: int = 1) -> None:
    """SIGKILL to the last child of a launcher, when it is time; then the launcher ends by itself, and not well.

    depth: 2 for ranks that are children of the launcher's child. A rank with a process group of its own dies with
    the processes that it has, and so do the others at the end: Megatron's for checkpoints would live on.
    """
    deadline = time.monotonic() + 150
    while not is_time():
        assert time.monotonic() < deadline
        assert run.poll() is None, run.communicate()[0][-4000:]
        time.sleep(0.05)
    ranks = [run.pid]
    for _ in range(depth):
        ranks = [int(pid) for pid in Path(f"/proc/{ranks[-1]}/task/{ranks[-1]}/children").read_text().split()]
    kill = os.killpg if os.getpgid(ranks[-1]) == ranks[-1] else os.kill
    kill(ranks[-1], signal.SIGKILL)
    run.communicate(timeout=100)
    assert run.returncode != 0
    for rank in ranks[:-1]:
        with contextlib.suppress(ProcessLookupError):
            os.killpg(rank, signal.SIGKILL)


def goes_on_after_a_kill(
    start: Callable[[Path, int], subprocess.Popen[str]], folder: Path, saved: Callable[[Path], int], depth: int = 1
) -> dict[int, str]:
    """Assert that a run whose rank was killed goes on, started again, with the losses of one that was not.

    start: (folder, steps) -> the run; saved: folder -> the step of its last checkpoint. Returns all losses.
    """
    killed, whole = folder / "killed", folder / "whole"
    kill_a_rank(start(killed, 100_000), lambda: len(losses(killed)) >= 3, depth)
    last, before = saved(killed), losses(killed)
    assert last >= 2
    (killed / "losses.txt").unlink()
    for each in (killed, whole):
        finish(start(each, last + 4))
    assert list(losses(killed)) == list(range(last + 1, last + 5))
    undisturbed = losses(whole)
    assert {step: before[step] for step in range(1, last + 1)} | losses(killed) == undisturbed
    return undisturbed


def import_again(row: str, first: str, version: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """Import a row's module with another version of its framework, beside the one that is there.

    first: the module of the framework that it imports first; None for a version that is not installed.
    """
    monkeypatch.setattr(tested, "installed_version", lambda _: version)
    if version is None:
        monkeypatch.setitem(sys.modules, first, None)
    spec = importlib.util.find_spec(f"octavo.integrations.{row}")
    assert spec is not None and spec.loader is not None
    spec.loader.exec_module(ModuleType(spec.name))
