"""Processes that begin with what most tests import: each of pytest's workers has a server that forks them."""

import multiprocessing
import os
import sys
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path

# torch's optimizers and fully_shard load torch._dynamo, which takes as long as torch itself
PRELOADED = [
    *("octavo.train", "octavo.rl.loop", "octavo.cli.train", "pytest", "triton"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.tensorboard"),
]


def context() -> ForkServerContext:
    """Of multiprocessing; torch.multiprocessing's start method "forkserver" then has the same server."""
    found = multiprocessing.get_context("forkserver")
    found.set_forkserver_preload(PRELOADED)
    return found


def take_environment(environment: dict[str, str]) -> None:
    """In a fork: the environment of the test, for the server's is of when it began."""
    os.environ.clear()
    os.environ.update(environment)


def start_octavo(log: Path, *arguments: str) -> ForkServerProcess:
    """`octavo ARGUMENT ...`, which writes to the end of `log`."""
    process = context().Process(target=_octavo, args=(log, dict(os.environ), arguments), daemon=True)
    process.start()
    return process


def _octavo(log: Path, environment: dict[str, str], arguments: tuple[str, ...]) -> None:
    from octavo import cli

    take_environment(environment)
    with log.open("ab") as file:
        for stream in (1, 2):
            os.dup2(file.fileno(), stream)
    sys.argv = ["octavo", *arguments]
    cli.main()
