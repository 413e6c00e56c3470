"""A lock for tests that measure times beside those that start processes of their own on every core."""

import contextlib
import fcntl
import os
import tempfile
from collections.abc import Iterator
from pathlib import Path


def cores_alone() -> contextlib.AbstractContextManager[None]:
    """Wait until no other test of either kind runs, in whichever worker."""
    return _locked(fcntl.LOCK_EX)


def cores_shared() -> contextlib.AbstractContextManager[None]:
    """For processes that are in no hurry: wait until no test has the cores alone."""
    return _locked(fcntl.LOCK_SH)


@contextlib.contextmanager
def _locked(kind: int) -> Iterator[None]:
    with (Path(tempfile.gettempdir()) / f"octavo-tests-{os.getuid()}.lock").open("w") as file:
        fcntl.flock(file, kind)
        yield
