"""One job a run folder: a lock that the system takes back when the process dies, however it dies."""

import contextlib
import fcntl
import os
from collections.abc import Iterator
from pathlib import Path

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import ConfigError
from octavo.models.checkpoint.storage import writing

_FILE = ".lock"


@contextlib.contextmanager
def locked_folder(directory: Path, mesh: Mesh = ONE_PROCESS) -> Iterator[None]:
    """Hold a run's folder while the block runs; the first rank does so for all.

    Raises:
        ConfigError: on every rank, where another job holds it.
        StorageError: it cannot be written.
    """
    with contextlib.ExitStack() as held:
        owner = _hold(directory, held) if mesh.is_first else None
        (owner, *_) = mesh.gather_objects(owner)
        if owner is not None:
            raise ConfigError(
                f"run.dir = {directory} is used by process {owner or '(unknown)'}, and one job writes into a run's "
                "folder; end that job, or choose another run.dir"
            )
        yield


def _hold(directory: Path, held: contextlib.ExitStack) -> str | None:
    """Take the lock until `held` ends; else who has it."""
    with writing(directory):
        directory.mkdir(parents=True, exist_ok=True)
        file = held.enter_context((directory / _FILE).open("a+", encoding="utf-8"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip()
    file.truncate(0)
    file.write(f"{os.getpid()}\n")
    file.flush()
    return None
