"""Nursery: a process that loads a program once and forks workers for it, of octavo.serve.http and kernel_processes."""

import contextlib
import logging
import os
import pickle
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from multiprocessing.connection import Connection
from typing import Any

from octavo.env import child_environment
from octavo.serve import worker_process
from octavo.serve.engine.request import UnavailableError

# a program's start; a vocabulary of 150,000 tokens takes one second
START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class Nursery:
    """The process that forks the workers; it starts when the first one is wanted.

    Args:
        program: what they run, a module's name or a file that imports nothing of octavo; see worker_process.main.
        setup: returns what the program's prepare() gets.
    """

    def __init__(self, program: str, setup: Callable[[], Any]) -> None:
        self._program, self._setup = program, setup
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | Fork | None = None
        self._control: socket.socket | None = None
        self._forked: socket.socket | None = None
        self._is_closed = False

    def start_as_fork(self) -> None:
        """Begin its start as a fork, which has the modules that are loaded here; nothing in a process with threads.

        Where the system refuses one, the start is that of a fresh process.
        """
        if threading.active_count() == 1:
            setup = self._setup()
            ours, theirs = socket.socketpair()

            def serve() -> None:
                ours.close()  # it ends when this process hangs up
                worker_process.serve(theirs, self._program, lambda: setup)

            with theirs:
                try:
                    self._process = Fork(serve)
                except OSError as error:  # too little memory for a copy; a fresh process takes less
                    ours.close()
                    logger.info("no fork: %s", error)
                    return
            self._forked = ours

    def start(self) -> None:
        """Start it, so that the first fork need not wait for it; one that does not start says so on the log."""
        with contextlib.suppress(UnavailableError), self._lock:
            if not self._is_closed:
                self._running()

    def fork(self, niceness: int) -> Connection:
        """A new worker's socket.

        Raises:
            UnavailableError: the program did not start. What setup raises.
        """
        with self._lock:
            control = self._running()
            ours, theirs = socket.socketpair()
            with theirs:
                socket.send_fds(control, [bytes([niceness])], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        """End it and its workers."""
        self._is_closed = True
        self._kill()  # also while it starts
        with self._lock:
            self._end()

    def _running(self) -> socket.socket:
        """The socket of a process that lives."""
        if self._is_closed:
            raise UnavailableError("the process that this request needs has been closed")
        if self._forked is not None:
            forked, self._forked = self._forked, None
            self._control = self._ready(forked)
        elif self._control is None or self._process is None or self._process.poll() is not None:
            self._end()
            self._control = self._start()
        return self._control

    def _start(self) -> socket.socket:
        setup = self._setup()
        ours, theirs = socket.socketpair()
        path = None if self._program.endswith(".py") else sys.path
        with theirs:
            self._process = subprocess.Popen(
                # -P: the folder's modules are not to be imported
                [sys.executable, "-P", worker_process.__file__, str(theirs.fileno())],
                stdin=subprocess.PIPE,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is the server's, which drains
                # a process with more than one thread must not fork; an arena a thread would count as address space
                env=child_environment(
                    TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1", MALLOC_ARENA_MAX="1"
                ),
            )
        assert self._process.stdin is not None, "it is a pipe"
        with contextlib.suppress(OSError), self._process.stdin as pipe:  # one that has died answers nothing
            pickle.dump((path, self._program), pipe)
            pickle.dump(setup, pipe)
        return self._ready(ours)

    def _ready(self, ours: socket.socket) -> socket.socket:
        """Its socket, once it has said that it is ready."""
        ours.settimeout(START_TIMEOUT_S)
        try:
            answer = ours.recv(1024)
            error = answer.decode() or "it died"
        except (OSError, TimeoutError) as failure:
            answer, error = b"", str(failure)
        if answer != worker_process.READY:
            ours.close()
            self._end()
            if not self._is_closed:
                logger.error("a worker process did not start: %s", error)
            raise UnavailableError(f"the process that this request needs did not start: {error}")
        return ours

    def _kill(self) -> None:
        if (process := self._process) is not None and process.poll() is None:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)

    def _end(self) -> None:
        self._kill()
        if self._process is not None:
            self._process.wait()
        for held in (self._control, self._forked):
            if held is not None:
                held.close()
        self._process = self._control = self._forked = None


class Fork:
    """A fork of this process that calls a function and ends, with the part of subprocess.Popen that is used here."""

    def __init__(self, run: Callable[[], None]) -> None:
        self.pid = os.fork()
        self._exit_code: int | None = None
        if self.pid == 0:
            exit_code = 1
            try:
                self._lead()
                for number in (signal.SIGINT, signal.SIGTERM, signal.SIGALRM, signal.SIGPROF):
                    signal.signal(number, signal.SIG_DFL)  # what this program has set is not meant for it
                null = os.open(os.devnull, os.O_RDWR)
                for standard in range(3):
                    os.dup2(null, standard)
                run()
                exit_code = 0
            finally:
                os._exit(exit_code)
        self._lead()

    def poll(self) -> int | None:
        """Its exit code; None while it runs."""
        return self._collect(os.WNOHANG)

    def wait(self) -> int | None:
        """Its exit code, once it has ended."""
        return self._collect(0)

    def _collect(self, flags: int) -> int | None:
        if self._exit_code is None:
            try:
                pid, status = os.waitpid(self.pid, flags)
            except ChildProcessError:  # this process lets the system collect its children
                pid, status = self.pid, 0
            self._exit_code = os.waitstatus_to_exitcode(status) if pid else None
        return self._exit_code

    def _lead(self) -> None:
        """A process group, said on both sides: none may be late. A Ctrl-C at the terminal is not meant for it."""
        with contextlib.suppress(OSError):
            os.setpgid(self.pid, self.pid)
