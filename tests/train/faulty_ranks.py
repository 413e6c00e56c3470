"""A rank of a training run that fails once: `torchrun -m tests.train.faulty_ranks CONFIG FAULT RANK PLACE MARKER`.

The fault comes the first time that a rank comes to a place whose name holds PLACE; MARKER is a file that says it came.
"""

import errno
import os
import signal
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.config import load_config
from octavo.distributed.mesh import Mesh
from octavo.errors import OctavoError
from octavo.train import TrainConfig, train


def _out_of_memory() -> None:
    raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB (injected)")


def _full_disk() -> None:
    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


FAULTS: dict[str, Callable[[], None]] = {
    "kill": lambda: os.kill(os.getpid(), signal.SIGKILL),
    "stop": lambda: os.kill(os.getpid(), signal.SIGSTOP),
    "terminate": lambda: os.kill(os.getpid(), signal.SIGTERM),
    "memory": _out_of_memory,
    "disk": _full_disk,
    "slow": lambda: time.sleep(6.0),
}


def main(file: str, fault: str, rank: str, place: str, marker: str) -> None:
    def fail_once() -> None:
        if not Path(marker).exists():
            Path(marker).touch()
            FAULTS[fault]()

    at = Mesh.at

    def failing(self: Mesh, where: str) -> None:
        at(self, where)
        if self.rank == int(rank) and place in where:
            fail_once()

    Mesh.at = failing  # type: ignore[method-assign]
    if place == "gather":
        from torch.distributed.fsdp._fully_shard import _fsdp_param_group as groups

        unshard = groups.FSDPParamGroup.unshard

        def failing_unshard(self: groups.FSDPParamGroup, *args: bool) -> None:
            if (
                os.environ["RANK"] == rank
                and Path(load_config(TrainConfig, file).run.dir, "metrics.jsonl").stat().st_size
            ):
                fail_once()
            unshard(self, *args)

        groups.FSDPParamGroup.unshard = failing_unshard  # type: ignore[method-assign]
    try:
        result = train(load_config(TrainConfig, file), progress=False)
    except OctavoError as error:
        print(f"rank {os.environ['RANK']}: {type(error).__name__}: {error}", file=sys.stderr, flush=True)
        raise SystemExit(3) from None
    if result.stopped_by:
        raise SystemExit(143)


if __name__ == "__main__":
    main(*sys.argv[1:])
