"""Processes that begin with what most tests import: each of pytest's workers has a server that forks them."""

import atexit
import contextlib
import multiprocessing
import multiprocessing.connection
import os
import runpy
import signal
import subprocess
import sys
import threading
from collections.abc import Callable, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext, ForkServerProcess
from pathlib import Path
from typing import Any

# torch's optimizers and fully_shard load torch._dynamo, which takes as long as torch itself
PRELOADED = [
    *("octavo.train", "octavo.rl.loop", "octavo.cli.train", "octavo.cli.serve", "octavo.serve.http.server"),
    *("octavo.serve.tensor_updates", "pytest", "triton"),
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


class Fork:
    """A process that runs job(*arguments), with what tests and octavo use of subprocess.Popen."""

    def __init__(self, job: Callable[..., Any], *arguments: Any) -> None:
        self._process = context().Process(target=_run, args=(dict(os.environ), job, arguments))
        self._process.start()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self._lock = threading.Lock()  # its exit code can be read once

    def poll(self) -> int | None:
        with self._lock:
            return self._process.exitcode

    @property
    def returncode(self) -> int | None:
        return self.poll()

    def wait(self, timeout: float | None = None) -> int:
        ended = multiprocessing.connection.wait([self._process.sentinel], timeout)
        code = self.poll() if ended else None
        if code is None:
            raise subprocess.TimeoutExpired("a fork", timeout or 0.0)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.kill(self.pid, number)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


def _run(environment: dict[str, str], job: Callable[..., Any], arguments: tuple[Any, ...]) -> None:
    take_environment(environment)
    # the server that this process came from has the imports; Python would start another one
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    try:
        job(*arguments)
    finally:
        atexit._run_exitfuncs()  # as an interpreter does, and multiprocessing does not


_popen = subprocess.Popen
_WORKER = [sys.executable, "-m", "octavo.serve.tensor_worker"]


def popen_or_fork(command: Sequence[str], **given: Any) -> Any:
    """For subprocess.Popen: a tensor-parallel worker is a fork, which spends no seconds on imports."""
    if command[:3] != _WORKER:
        return _popen(command, **given)
    ends = [Connection(os.dup(fd)) for fd in given["pass_fds"]]
    fork = Fork(_work, os.getpid(), ends, *command[5:])
    for end in ends:
        end.close()
    return fork


def _work(parent: int, ends: list[Connection], *arguments: str) -> None:
    os.setsid()
    Path("/proc/self/comm").write_text(rank_name(parent))
    # its own parent is the server of forks
    os.getppid = lambda: parent if Path(f"/proc/{parent}").exists() else 1
    sys.argv = [_WORKER[2], *(str(end.fileno()) for end in ends), *arguments]
    runpy.run_module(_WORKER[2], run_name="__main__")


def rank_name(parent: int) -> str:
    """Of a worker's process in /proc/PID/comm, by which it is found from outside."""
    return f"rank of {parent}"


def serve(stderr: Connection, *arguments: str) -> None:
    """In a Fork, `octavo serve ARGUMENT ...`."""
    subprocess.Popen = popen_or_fork  # type: ignore[misc,assignment]
    with stderr, open(os.devnull, "w") as nowhere:
        os.dup2(stderr.fileno(), 2)
        os.dup2(nowhere.fileno(), 1)
    sys.argv = ["octavo", "serve", *arguments]
    from octavo import cli

    cli.main()
