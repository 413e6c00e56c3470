"""Lanes: work beside the event loop, so much at a time and so much waiting; what is more is refused with 503.

Threads do what is short whatever comes in; processes (octavo.serve.http.worker_process) the rest, for those can be
ended: by a limit of time or memory, or because the client has gone.
"""

import asyncio
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
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from octavo.env import child_environment
from octavo.errors import DataError
from octavo.serve.engine.request import UnavailableError
from octavo.serve.http import worker_process
from octavo.serve.http.errors import BUSY_RETRY_S, ApiError

T = TypeVar("T")

# a program's start; a vocabulary of 150,000 tokens takes one second
START_TIMEOUT_S = 60.0

logger = logging.getLogger(__name__)


class Lane:
    """Runs calls in threads of its own.

    Args:
        name: what refusals call it.
        num_threads: calls at a time.
        max_waiting: calls that may wait beside those.
    """

    def __init__(self, name: str, num_threads: int, max_waiting: int) -> None:
        self._name, self._capacity = name, num_threads + max_waiting
        self._threads = ThreadPoolExecutor(num_threads, thread_name_prefix="octavo-lane")
        self._lock = threading.Lock()
        self._num_open = 0

    async def run(self, function: Callable[..., T], *arguments: Any) -> T:
        """What a call returns; from the event loop.

        Raises:
            ApiError: 503, the lane is full. What the function raises.
        """
        if self._num_open >= self._capacity:
            text = f"{self._num_open} requests wait for {self._name}; try again later"
            raise ApiError(503, text, code="overloaded", headers={"Retry-After": str(BUSY_RETRY_S)})
        with self._lock:
            self._num_open += 1
        done = self._threads.submit(function, *arguments)
        done.add_done_callback(self._note_end)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Begin no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _note_end(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_open -= 1


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

    def fork_here(self) -> None:
        """Begin its start as a fork, which has the modules that are loaded here; nothing in a process with threads."""
        if threading.active_count() == 1:
            setup = self._setup()
            ours, theirs = socket.socketpair()
            self._forked = ours

            def serve() -> None:
                ours.close()  # it ends when this process hangs up
                worker_process.serve(theirs, self._program, lambda: setup)

            with theirs:
                self._process = Fork(serve)

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
            try:
                self._lead()
                null = os.open(os.devnull, os.O_RDWR)
                for standard in range(3):
                    os.dup2(null, standard)
                run()
            finally:
                os._exit(0)
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


class TooExpensiveError(ApiError):
    """A call whose process was ended: it took longer than its lane allows, or something killed it.

    Attributes:
        exit_code: of the process, negative for a signal; None where it answered nothing.
    """

    exit_code: int | None = None


class WorkerCall:
    """A call, and the worker that is at it."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._worker: Connection | None = None
        self._is_abandoned = False

    def give_to(self, worker: Connection | None) -> bool:
        """Note which worker is at it, or None behind its answer; False if its client has gone."""
        with self._lock:
            self._worker = worker
            return not self._is_abandoned

    def abandon(self) -> None:
        """End its worker: the process beside it sees that the server hangs up."""
        with self._lock:
            self._is_abandoned = True
            if self._worker is not None:
                with socket.socket(fileno=os.dup(self._worker.fileno())) as ours:
                    ours.shutdown(socket.SHUT_RDWR)


class WorkerLane(Lane):
    """Runs calls in processes, each of which is ended when a call takes too long or its client has gone.

    Args:
        nursery: forks them.
        limit_s: time of a call, by the clock: ITIMER_PROF counts computing, ITIMER_REAL all.
        niceness: of the processes. The rest as in Lane.
    """

    def __init__(
        self,
        name: str,
        num_workers: int,
        max_waiting: int,
        *,
        nursery: Nursery,
        limit_s: float,
        niceness: int,
        clock: int = signal.ITIMER_PROF,
    ) -> None:
        super().__init__(name, num_workers, max_waiting)
        self._nursery, self._limit_s, self._niceness, self._clock = nursery, limit_s, niceness, clock
        self._thread = threading.local()  # each has a worker

    async def run(self, function: Callable[..., T] | str, *arguments: Any, then: Callable[[Any], T] | None = None) -> T:
        """What a call returns; its task's cancellation ends the worker.

        Args:
            function: or its name in the nursery's program.
            then: makes the result of what the worker returned, in the lane's thread.
        Raises:
            TooExpensiveError: it took longer than the limit, or something killed its process.
            DataError: it took too much memory. The rest as in Lane.
        """
        call = WorkerCall()
        try:
            return await super().run(self._ask, call, function, arguments, then)
        except asyncio.CancelledError:
            call.abandon()
            raise

    def _ask(
        self, call: WorkerCall, function: Any, arguments: tuple[Any, ...], then: Callable[[Any], Any] | None
    ) -> Any:
        worker: Connection | None = getattr(self._thread, "worker", None)
        if worker is not None and worker.poll():  # it has nothing to say but that it is gone
            worker.close()
            worker = None
        worker = worker or self._nursery.fork(self._niceness)
        self._thread.worker = None
        outcome, value, is_last = "ended", None, True
        with contextlib.suppress(EOFError, OSError):
            if call.give_to(worker):
                worker.send((self._clock, self._limit_s, function, arguments))
                # its own clock comes first, unless it is stopped
                if self._clock != signal.ITIMER_REAL or worker.poll(self._limit_s + 1):
                    outcome, value, is_last = worker.recv()
                else:
                    value = -signal.SIGALRM
        if not call.give_to(None) or is_last:
            worker.close()
        else:
            self._thread.worker = worker
        if outcome == "ended":
            text = f"{self._name} took more than {self._limit_s:g} s of computing for this request; send less"
            error = TooExpensiveError(400, text, code="too_expensive")
            error.exit_code = value
            raise error
        if outcome == "memory":
            raise DataError("the request takes too much memory; send less")
        if outcome == "raised":
            assert isinstance(value, Exception), "the worker caught it"
            raise value
        return value if then is None else then(value)
