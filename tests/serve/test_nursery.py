"""A nursery's process starts as a fork of this one where that has one thread, and ends with it."""

import logging
import os
import signal
import subprocess
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from octavo.serve.engine.request import UnavailableError
from octavo.serve.nursery import Fork, Nursery
from tests import forks

PROGRAM = """
import os, sys, time

def prepare(setup):
    if setup == "broken":
        raise ValueError("no vocabulary")
    if setup == "slow":
        time.sleep(60)
    return 1 << 40

def sleep(seconds):
    time.sleep(seconds)

def about():
    return os.getpid(), "torch" in sys.modules, os.readlink("/proc/self/fd/1")
"""


def in_one_thread(job: Callable[..., None], tmp_path: Path) -> None:
    """Run a part of a test in a process that has what pytest has loaded, and none of its threads."""
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    assert forks.Fork(job, str(program)).wait(60) == 0


def forked(program: str, setup: object = None) -> tuple[Nursery, Fork]:
    nursery = Nursery(program, lambda: setup)
    nursery.start_as_fork()
    assert isinstance(nursery._process, Fork)
    return nursery, nursery._process


def about(nursery: Nursery) -> Any:
    """A new worker's answer."""
    worker = nursery.fork(0)
    worker.send((signal.ITIMER_REAL, 30, "about", ()))
    outcome, value, _ = worker.recv()
    assert outcome == "returned", value
    worker.close()
    return value


def wait_for(process: Fork) -> int | None:
    deadline = time.monotonic() + 20
    while process.poll() is None and time.monotonic() < deadline:
        time.sleep(0.01)
    return process.poll()


def test_workers_fork_from_a_fork(tmp_path: Path) -> None:
    in_one_thread(_workers_fork_from_a_fork, tmp_path)


def _workers_fork_from_a_fork(program: str) -> None:
    nursery, process = forked(program)
    assert os.getpgid(process.pid) == process.pid, "a Ctrl-C is not meant for it"
    nursery.start()
    found = [about(nursery) for _ in range(2)]
    assert nursery._process is process and process.poll() is None
    assert len({os.getpid(), process.pid, *(answer[0] for answer in found)}) == 4
    assert {answer[1:] for answer in found} == {(True, "/dev/null")}
    os.kill(process.pid, signal.SIGKILL)
    assert wait_for(process) == -signal.SIGKILL
    assert about(nursery)[1] is False, "one that died is followed by a fresh interpreter"
    nursery.close()


@pytest.mark.parametrize("when", ["started", "forked"])
def test_it_ends_when_this_process_hangs_up(when: str, tmp_path: Path) -> None:
    in_one_thread(_hang_up_once_started if when == "started" else _hang_up_once_forked, tmp_path)


def _hang_up_once_started(program: str) -> None:
    nursery, process = forked(program)
    nursery.start()
    assert nursery._control is not None
    nursery._control.close()
    assert wait_for(process) == 0


def _hang_up_once_forked(program: str) -> None:
    nursery, process = forked(program)
    assert nursery._forked is not None
    nursery._forked.close()
    assert wait_for(process) is not None


def test_close_ends_it(tmp_path: Path) -> None:
    in_one_thread(_close_ends_it, tmp_path)


def _close_ends_it(program: str) -> None:
    for setup, starts in ((None, True), (None, False), ("slow", False)):
        nursery, process = forked(program, setup)
        if starts:
            nursery.start()
        sockets = [socket for socket in (nursery._control, nursery._forked) if socket is not None]
        began = time.monotonic()
        nursery.close()
        assert time.monotonic() < began + 10 and process.poll() is not None
        assert len(sockets) == 1 and sockets[0].fileno() == -1
        with pytest.raises(ProcessLookupError):
            os.kill(process.pid, 0)


def test_a_process_with_threads_forks_nothing(tmp_path: Path) -> None:
    in_one_thread(_threads_fork_nothing, tmp_path)


def _threads_fork_nothing(program: str) -> None:
    go_on = threading.Event()
    thread = threading.Thread(target=go_on.wait, daemon=True)
    thread.start()
    nursery = Nursery(program, lambda: None)
    nursery.start_as_fork()
    assert nursery._process is None
    nursery.start()
    assert isinstance(nursery._process, subprocess.Popen)
    assert about(nursery)[1:] == (False, "/dev/null"), "it is a fresh interpreter"
    nursery.close()
    go_on.set()
    thread.join()


def test_one_that_is_closed_starts_no_more(tmp_path: Path) -> None:
    (tmp_path / "program.py").write_text(PROGRAM)
    nursery = Nursery(str(tmp_path / "program.py"), lambda: None)
    nursery.close()
    with pytest.raises(UnavailableError, match="closed"):
        nursery.fork(0)
    assert nursery._process is None


def test_a_fork_has_the_systems_signal_handlers(tmp_path: Path) -> None:
    """So that a limit of time ends a worker whatever this program does on an alarm."""
    in_one_thread(_a_limit_in_a_fork, tmp_path)


def _a_limit_in_a_fork(program: str) -> None:
    signal.signal(signal.SIGALRM, lambda *_: None)
    nursery, _ = forked(program)
    worker = nursery.fork(0)
    worker.send((signal.ITIMER_REAL, 0.2, "sleep", (20,)))
    assert worker.recv() == ("ended", -signal.SIGALRM, True)
    nursery.close()


def test_a_fork_that_the_system_refuses_leaves_a_fresh_process(tmp_path: Path) -> None:
    in_one_thread(_a_fork_that_the_system_refuses, tmp_path)


def _a_fork_that_the_system_refuses(program: str) -> None:
    def refuse() -> int:
        raise BlockingIOError("out of processes")

    fork, os.fork = os.fork, refuse
    nursery = Nursery(program, lambda: None)
    nursery.start_as_fork()
    os.fork = fork
    assert nursery._process is None
    assert about(nursery)[0] != os.getpid()
    assert isinstance(nursery._process, subprocess.Popen)
    nursery.close()


def test_a_program_that_fails_is_said(tmp_path: Path) -> None:
    in_one_thread(_a_program_that_fails, tmp_path)


def _a_program_that_fails(program: str) -> None:
    said: list[str] = []
    handler = logging.Handler()
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("octavo.serve.nursery").addHandler(handler)
    nursery, process = forked(program, "broken")
    nursery.start()
    assert said == ["a worker process did not start: ValueError: no vocabulary"] and process.poll() is not None
    for each in (nursery, forked(program, "broken")[0]):
        with pytest.raises(UnavailableError, match="did not start: ValueError: no vocabulary"):
            each.fork(0)
        each.close()


def test_how_a_fork_ended_is_kept() -> None:
    assert forks.Fork(_how_a_fork_ended).wait(60) == 0


def _how_a_fork_ended() -> None:
    ended = Fork(lambda: os._exit(3))
    assert ended.wait() == ended.poll() == ended.wait() == 3
    assert Fork(lambda: 1 // 0).wait() == 1, "it never goes on where its parent does"
    killed = Fork(lambda: time.sleep(60))
    assert killed.poll() is None
    os.kill(killed.pid, signal.SIGKILL)
    assert killed.wait() == killed.poll() == -signal.SIGKILL
    signal.signal(signal.SIGCHLD, signal.SIG_IGN)  # the system collects it, with its exit code
    unknown = Fork(lambda: time.sleep(0.3))
    assert unknown.poll() is None
    assert unknown.wait() == unknown.poll() == 0
