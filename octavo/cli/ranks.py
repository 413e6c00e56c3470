"""Commands that start their own ranks: by `--ranks N` under torchrun on this machine, or as processes of their own."""

import contextlib
import datetime
import subprocess
import sys
from collections.abc import Iterator

import typer

from octavo.env import torchrun_place
from octavo.errors import ConfigError


def start_ranks(num_ranks: int, arguments: list[str]) -> int | None:
    """Run `octavo ARGUMENTS` on so many ranks of this machine.

    Args:
        arguments: of the command, `--ranks` included.
    Returns:
        torchrun's exit code; None in a rank, which goes on itself.
    Raises:
        ConfigError: fewer than two ranks, or a launcher has started another number.
    """
    place = torchrun_place()
    if place is not None:
        if place.world_size != num_ranks:
            raise ConfigError(f"--ranks {num_ranks} under a launcher of {place.world_size} ranks; give the same number")
        return None
    if num_ranks < 2:
        raise ConfigError(f"--ranks must be at least 2, got {num_ranks}; leave it out for one process")
    return subprocess.run(torchrun(num_ranks, "octavo", *arguments), check=False).returncode


@contextlib.contextmanager
def on_first_rank(num_ranks: int) -> Iterator[None]:
    """Under torchrun, let the first rank alone run a command that starts its processes itself; the others wait.

    Args:
        num_ranks: processes that the command would start, itself included.
    Raises:
        ConfigError: torchrun has started another number, or several hosts' ranks.
        typer.Exit: in the other ranks, when the first one is done.
    """
    place = torchrun_place()
    if place is None or place.world_size == 1:
        yield
        return
    if place.world_size != num_ranks or place.rank != place.local_rank:
        raise ConfigError(
            f"this command starts its {num_ranks} ranks itself, on one host, and a launcher has started "
            f"{place.world_size}; leave torchrun out, or give it as many ranks of one host"
        )
    from octavo.distributed.local_job import launchers_store

    store, key = launchers_store(), f"octavo/first_rank_ended/{place.attempt}"
    if place.rank > 0:
        with contextlib.suppress(RuntimeError):  # torchrun is gone
            store.wait([key], datetime.timedelta(days=1000))
        raise typer.Exit
    try:
        yield
    finally:
        with contextlib.suppress(RuntimeError):
            store.set(key, "")


def torchrun(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """The command line that runs a module on so many ranks of this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]
