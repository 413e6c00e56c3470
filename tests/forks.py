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
import tempfile
import threading
from collections.abc import Callable, Mapping, Sequence
from multiprocessing import forkserver
from multiprocessing.connection import Connection
from multiprocessing.context import ForkServerContext
from pathlib import Path
from typing import Any

# torch's optimizers and fully_shard load torch._dynamo, which takes as long as torch itself
PRELOADED = [
    *("octavo.train", "octavo.rl.loop", "octavo.cli.train", "octavo.cli.serve", "octavo.serve.http.server"),
    *("octavo.serve.tensor_updates", "pytest", "triton"),
    *("torch._dynamo", "torch.distributed.fsdp", "torch.distributed.checkpoint", "torch.utils.tensorboard"),
    "torch.distributed.run",
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


class Fork:
    """A process that runs job(*arguments), with what tests, octavo and torchrun use of subprocess.Popen.

    Args:
        environment: this process's where it is not given; the folder is this process's too.
        streams: descriptors of its stdout and stderr.
    """

    def __init__(
        self,
        job: Callable[..., Any],
        *arguments: Any,
        environment: Mapping[str, str] = os.environ,
        streams: tuple[int, int] = (1, 2),
    ) -> None:
        given = [Connection(os.dup(fd)) for fd in streams]
        place = dict(environment), os.getcwd(), given
        self._process = context().Process(target=_run, args=(*place, job, arguments))
        self._process.start()
        for stream in given:
            stream.close()
        assert self._process.pid is not None, "it was started"
        self.pid = self._process.pid
        self._lock = threading.Lock()  # its exit code can be read once
        if multiprocessing.parent_process() is None:  # a test that failed must not keep pytest waiting for it
            atexit.register(self.kill)

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


def _run(
    environment: dict[str, str], folder: str, streams: list[Connection], job: Callable[..., Any], arguments: Any
) -> None:
    take_environment(environment)
    os.chdir(folder)
    for number, stream in enumerate(streams, 1):
        with stream:
            os.dup2(stream.fileno(), number)
    # the server that this process came from has the imports; Python would start another one
    forkserver._forkserver.ensure_running = lambda: None  # type: ignore[attr-defined]
    try:
        job(*arguments)
    finally:
        atexit._run_exitfuncs()  # as an interpreter does, and multiprocessing does not


def start_octavo(log: Path, *arguments: str) -> Fork:
    """`octavo ARGUMENT ...`, which writes to the end of `log`."""
    with log.open("ab") as file:
        return Fork(_octavo, *arguments, streams=(file.fileno(), file.fileno()))


def _octavo(*arguments: str) -> None:
    from octavo import cli

    sys.argv = ["octavo", *arguments]
    cli.main()


def _run_module(*arguments: str) -> None:
    """`python -m MODULE ARGUMENT ...` in a session of its own."""
    os.setsid()
    sys.argv = [*arguments]
    runpy.run_module(arguments[0], run_name="__main__")


_popen = subprocess.Popen
_WORKERS = [[sys.executable, "-m", module] for module in ("octavo.serve.tensor_worker", "tests.serve.dying_worker")]


def popen_or_fork(command: Sequence[str], **given: Any) -> Any:
    """For subprocess.Popen: a tensor-parallel worker is a fork, which spends no seconds on imports."""
    if command[:3] not in _WORKERS:
        return _popen(command, **given)
    ends = [Connection(os.dup(fd)) for fd in given["pass_fds"]]
    fork = Fork(_work, os.getpid(), command[2], ends, *command[5:])
    for end in ends:
        end.close()
    return fork


def _work(parent: int, module: str, ends: list[Connection], *arguments: str) -> None:
    Path("/proc/self/comm").write_text(rank_name(parent))
    # its own parent is the server of forks
    os.getppid = lambda: parent if Path(f"/proc/{parent}").exists() else 1
    _run_module(module, *(str(end.fileno()) for end in ends), *arguments)


def rank_name(parent: int) -> str:
    """Of a worker's process in /proc/PID/comm, by which it is found from outside."""
    return f"rank of {parent}"


def serve(*arguments: str) -> None:
    """In a Fork, `octavo serve ARGUMENT ...`."""
    subprocess.Popen = popen_or_fork  # type: ignore[misc,assignment]
    _octavo("serve", *arguments)


def torchrun(folder: Path, environment: Mapping[str, str], *arguments: str) -> "subprocess.CompletedProcess[str]":
    """`torchrun --standalone ARGUMENT ...` in a folder; its ranks are forks too."""
    with tempfile.TemporaryFile("w+") as out, tempfile.TemporaryFile("w+") as errors:
        streams = out.fileno(), errors.fileno()
        launcher = Fork(_launch, str(folder), *arguments, environment=environment, streams=streams)
        try:
            code = launcher.wait(180)
        finally:
            launcher.kill()
        for file in (out, errors):
            file.seek(0)
        return subprocess.CompletedProcess(arguments, code, out.read(), errors.read())


def _launch(folder: str, *arguments: str) -> None:
    from torch.distributed import run
    from torch.distributed.elastic.multiprocessing.subprocess_handler import subprocess_handler

    def start(args: Sequence[str], env: Mapping[str, str], **_: Any) -> Fork:
        assert args[1:3] == ("-u", "-m"), args
        return Fork(_run_module, *args[3:], environment=env)

    end_group = os.killpg

    def end(group: int, number: int) -> None:
        """torchrun's own child that ended would still take a signal; the server of forks has already waited for it."""
        with contextlib.suppress(ProcessLookupError):
            end_group(group, number)

    os.chdir(folder)
    os.killpg = end
    subprocess_handler.Popen = start  # type: ignore[assignment,misc]
    run.main(["--standalone", *arguments])
