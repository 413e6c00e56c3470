"""One job a run folder, and the lock goes with its process."""

import errno
import multiprocessing
import os
import signal
from pathlib import Path

import pytest

from octavo.errors import ConfigError
from octavo.run.folder_lock import locked_folder


def _hold(folder: Path, ready: "multiprocessing.connection.Connection") -> None:  # type: ignore[name-defined]
    with locked_folder(folder):
        ready.send(os.getpid())
        signal.pause()


def test_a_second_job_is_refused_until_the_first_is_gone(tmp_path: Path) -> None:
    context = multiprocessing.get_context("fork")
    mine, theirs = context.Pipe()
    process = context.Process(target=_hold, args=(tmp_path / "run", theirs))
    process.start()
    owner = mine.recv()
    with (
        pytest.raises(ConfigError, match=f"is used by process {owner}, and one job writes into a run's folder"),
        locked_folder(tmp_path / "run"),
    ):
        pass
    process.kill()
    process.join()
    with locked_folder(tmp_path / "run"):
        pass


def test_a_file_system_without_locks_warns(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: object) -> None:
        raise OSError(errno.ENOLCK, "No locks available")

    monkeypatch.setattr("fcntl.flock", refuse)
    with pytest.warns(UserWarning, match="has no locks"), locked_folder(tmp_path):
        pass


def test_the_lock_ends_with_the_block(tmp_path: Path) -> None:
    for _ in range(2):
        with locked_folder(tmp_path):
            assert (tmp_path / ".lock").read_text() == f"{os.getpid()}\n"
