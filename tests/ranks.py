"""Starts the ranks of a test: processes with torchrun's environment, whose results come back."""

import contextlib
import os
import random
import socket
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing

from tests import forks
from tests.quiet import cores_alone, cores_shared

Job = Callable[..., Any]  # (rank, *arguments) -> what pickle takes; a function of a module's top level
_TIMEOUT = timedelta(seconds=60)


def on_two_gpus(test: Callable[[], None]) -> Callable[[], None]:
    """Mark a test of two GPUs of this machine."""
    skipped = pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two GPUs")
    return pytest.mark.gpu(skipped(test))  # type: ignore[no-any-return]


def run_ranks(job: Job, world_size: int, *arguments: Any, alone: bool = False) -> list[Any]:
    """What a job returns on each rank; it starts and ends its process group. Alone where seconds matter."""
    forks.context()  # the ranks of all tests come from the server that has the imports
    place = {"WORLD_SIZE": str(world_size), "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port())}
    with cores_alone() if alone else cores_shared(), tempfile.TemporaryDirectory() as folder:
        torch.multiprocessing.start_processes(
            _run, args=(job, folder, os.environ | place, *arguments), nprocs=world_size, start_method="forkserver"
        )
        return [torch.load(Path(folder, f"{rank}.pt"), weights_only=False) for rank in range(world_size)]


def free_port() -> int:
    """At random, and below those that the system gives to the connections of a test beside this one."""
    while True:
        port = random.SystemRandom().randrange(20_000, 32_000)
        with contextlib.suppress(OSError), socket.socket() as free:
            free.bind(("127.0.0.1", port))
            return port


def run_group(job: Job, world_size: int, backend: str = "gloo") -> list[Any]:
    """What job(rank, world_size) returns on each rank, under a process group; with NCCL each rank has a GPU."""
    return run_ranks(_in_group, world_size, job, world_size, backend)


def _run(rank: int, job: Job, folder: str, environment: dict[str, str], *arguments: Any) -> None:
    forks.take_environment(environment | {"RANK": str(rank), "LOCAL_RANK": str(rank)})
    os.fsync = os.fstat  # type: ignore[assignment]  # as in conftest
    torch.set_num_threads(1)
    torch.save(job(rank, *arguments), Path(folder, f"{rank}.pt"))


def _in_group(rank: int, job: Job, world_size: int, backend: str) -> Any:
    if backend == "nccl":
        torch.cuda.set_device(rank)
    dist.init_process_group(backend, timeout=_TIMEOUT)
    result = job(rank, world_size)
    dist.barrier()  # who leaves first would take the others' connections down
    dist.destroy_process_group()
    return result
