"""A job of two ranks under torchrun, one of which fails once: `-m tests.faulty_ranks CONFIG FAULT RANK PLACE MARKER`.

The fault comes the first time that the rank comes to a place whose name holds PLACE, or, after "gather in ", to the
first gather of weights from there on; MARKER is a file that says it came.
"""

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

from octavo.config import load_config, sections_of
from octavo.distributed.mesh import Mesh, end_job
from octavo.errors import OctavoError
from tests import forks
from tests.quiet import cores_alone, cores_shared

_GATHER = "gather in "


def start(
    config: Path, fault: str, place: str, *, restarts: int = 0, rank: int = 1
) -> "subprocess.CompletedProcess[str]":
    """The job, from a config of octavo train or octavo rl."""
    marker = config.with_suffix(f".{fault}")
    command = ["--nproc-per-node", "2", "--max-restarts", str(restarts), "-m", "tests.faulty_ranks", str(config)]
    env = os.environ | {"OMP_NUM_THREADS": "1"}
    with cores_alone() if fault in ("stop", "slow") else cores_shared():
        ended = forks.torchrun(config.parent, env, *command, fault, str(rank), place, str(marker))
    assert marker.exists(), f"the fault never came:\n{ended.stderr[-4000:]}"
    return ended


# ends a stopped process as soon as torchrun has asked it to end; torchrun itself does so after 30 s
_END = """
import os, pathlib, re, signal, sys, time
status = pathlib.Path("/proc", sys.argv[1], "status")
while not int(re.search(r"ShdPnd:\\s*(\\w+)", status.read_text())[1], 16) & 1 << signal.SIGTERM - 1:
    time.sleep(0.1)
os.kill(int(sys.argv[1]), signal.SIGKILL)
"""


def _stop() -> None:
    subprocess.Popen([sys.executable, "-c", _END, str(os.getpid())], start_new_session=True)  # torchrun ends groups
    os.kill(os.getpid(), signal.SIGSTOP)


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": _stop,
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "slow": lambda: time.sleep(6.0),
}


def fail_once(fault: Callable[[], None], rank: int, place: str, marker: Path) -> None:
    """Let this process fail, if it is that rank."""
    at, is_there = Mesh.at, False

    def fail() -> None:
        if not marker.exists():
            marker.touch()
            fault()

    def failing_at(mesh: Mesh, where: str) -> None:
        nonlocal is_there
        at(mesh, where)
        is_there = int(os.environ["RANK"]) == rank and place.removeprefix(_GATHER) in where
        if is_there and not place.startswith(_GATHER):
            fail()

    Mesh.at = failing_at  # type: ignore[method-assign]
    if place.startswith(_GATHER):
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        unshard = groups.FSDPParamGroup.unshard

        def failing_unshard(self: groups.FSDPParamGroup, *args: bool, **keywords: bool) -> None:
            if is_there:
                fail()
            unshard(self, *args, **keywords)

        groups.FSDPParamGroup.unshard = failing_unshard  # type: ignore[method-assign]


def main(file: str, fault: str, rank: str, place: str, marker: str) -> None:
    fail_once(FAULTS[fault], int(rank), place, Path(marker))
    try:
        stopped_by = reinforce(file) if "rollout" in sections_of(file) else train(file)
    except OctavoError as error:
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(3) from None
    end_job()
    if stopped_by:
        raise SystemExit(143)


def train(file: str) -> str | None:
    from octavo.train import TrainConfig, train

    return train(load_config(TrainConfig, file), progress=False).stopped_by


def reinforce(file: str) -> str | None:
    from octavo.rl.config import RLConfig
    from octavo.rl.loop import run
    from tests.rl.test_loop import EASY

    return run(load_config(RLConfig, file), progress=False, task=EASY).stopped_by


if __name__ == "__main__":
    main(*sys.argv[1:])
