"""Starts the ranks of a test: processes with torchrun's environment, whose results come back as JSON."""

import json
import os
import socket
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from tests.quiet import cores_alone

Job = Callable[..., Any]  # (rank, *arguments) -> what JSON can hold


def run_ranks(job: Job, world_size: int, folder: Path, *arguments: Any) -> list[Any]:
    """What a job, a function of a module's top level, returns on each rank; it starts and ends its process group.

    Args:
        folder: for the results, of this call alone.
    """
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with cores_alone():
        torch.multiprocessing.spawn(_run, args=(job, world_size, port, str(folder), *arguments), nprocs=world_size)
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(world_size)]


def _run(rank: int, job: Job, world_size: int, port: int, folder: str, *arguments: Any) -> None:
    torch.set_num_threads(1)
    place = {"RANK": rank, "LOCAL_RANK": rank, "WORLD_SIZE": world_size, "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in place.items()}, MASTER_ADDR="127.0.0.1")
    Path(folder, f"{rank}.json").write_text(json.dumps(job(rank, *arguments)))
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)  # torch's threads of gloo abort a process now and then whose interpreter ends under load
