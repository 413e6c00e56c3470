"""A lock for tests that measure times beside those that start processes of their own on every core."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


@contextlib.contextmanager
def cores_alone() -> Iterator[None]:
    """Wait until no other test of this kind runs, in whichever worker."""
    with (Path(tempfile.gettempdir()) / f"octavo-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield
