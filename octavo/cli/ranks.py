"""Commands that start their own ranks: `--ranks N` runs the same command under torchrun on this machine."""

import subprocess
import sys

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


def torchrun(num_ranks: int, module: str, *arguments: str) -> list[str]:
    """The command line that runs a module on so many ranks of this machine."""
    launcher = ["torch.distributed.run", "--standalone", "--nproc-per-node", str(num_ranks)]
    return [sys.executable, "-m", *launcher, "-m", module, *arguments]
