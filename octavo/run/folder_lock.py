"""One job a run folder: a lock that the system takes back when the process dies, however it dies."""

import contextlib
import errno
import fcntl
import os
import warnings
from collections.abc import Iterator
from pathlib import Path

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.distributed.outcome import together
from octavo.errors import ConfigError
from octavo.models.checkpoint.storage import writing

LOCK_FILE = ".lock"
_LOCKLESS = (errno.ENOSYS, errno.ENOTSUP, errno.ENOLCK)


@contextlib.contextmanager
def locked_folder(directory: Path, mesh: Mesh = ONE_PROCESS) -> Iterator[None]:
    """Hold a run's folder while the block runs; the first rank does so for all.

    Raises:
        ConfigError: on every rank, where another job holds it.
        StorageError: it cannot be written.
    """
    with contextlib.ExitStack() as held:
        owner, *_ = together(mesh.host_group, lambda: _hold(directory, held) if mesh.is_first else None)
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
        file = held.enter_context((directory / LOCK_FILE).open("a+", encoding="utf-8"))
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        file.seek(0)
        return file.read().strip()
    except OSError as error:
        if error.errno not in _LOCKLESS:
            raise
        warnings.warn(
            f"{directory}: its file system has no locks ({error.strerror}); start one job only in it", stacklevel=2
        )
        return None
    with writing(directory):
        file.truncate(0)
        file.write(f"{os.getpid()}\n")
        file.flush()
    return None
