"""Lanes: work beside the event loop, so much at a time and so much waiting; what is more is refused with 503.

Threads do what is short whatever comes in; processes (octavo.serve.http.worker) the rest, for those can be ended.
"""

import asyncio
import json
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
from octavo.models.tokenizer import Tokenizer
from octavo.serve.http.errors import BUSY_RETRY_S, ApiError

T = TypeVar("T")

_PROGRAM = (
    "import json, sys; sys.path[:] = json.loads(sys.argv[2]); "
    "import octavo.serve.http.app; "  # everything that a job may name, before the first fork
    "from octavo.serve.http.worker import main; main(int(sys.argv[1]))"
)


class Lane:
    """Runs calls in threads of its own.

    Args:
        name: what refusals call it. num_threads: calls at a time. max_waiting: calls that may wait beside those.
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
        done = self._threads.submit(self._call, function, arguments)
        done.add_done_callback(self._note_end)
        return await asyncio.wrap_future(done)

    def close(self) -> None:
        """Begin no more calls."""
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        return function(*arguments)

    def _note_end(self, _: Future[Any]) -> None:
        with self._lock:
            self._num_open -= 1


class Nursery:
    """The process that forks the workers; it starts when the first one is wanted.

    Args:
        tokenizer: returns the server's, or None where it has none.
    """

    def __init__(self, tokenizer: Callable[[], Tokenizer | None]) -> None:
        self._tokenizer = tokenizer
        self._lock = threading.Lock()
        self._process: subprocess.Popen[bytes] | None = None
        self._control: socket.socket | None = None

    def start(self) -> socket.socket:
        """Start the process, unless it lives; the socket that takes orders."""
        with self._lock:
            if self._control is None or self._process is None or self._process.poll() is not None:
                self._end()
                self._control = self._start()
            return self._control

    def fork(self, niceness: int) -> Connection:
        """A new worker's socket."""
        ours, theirs = socket.socketpair()
        with theirs:
            socket.send_fds(self.start(), [bytes([niceness])], [theirs.fileno()])
        return Connection(ours.detach())

    def close(self) -> None:
        """End it and its workers."""
        with self._lock:
            self._end()

    def _start(self) -> socket.socket:
        ours, theirs = socket.socketpair()
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-c", _PROGRAM, str(theirs.fileno()), json.dumps(sys.path)],
                stdin=subprocess.PIPE,
                pass_fds=[theirs.fileno()],
                start_new_session=True,  # a Ctrl-C at the terminal is the server's, which drains
                # a process with more than one thread must not fork
                env=child_environment(TOKENIZERS_PARALLELISM="false", OMP_NUM_THREADS="1", OPENBLAS_NUM_THREADS="1"),
            )
        assert self._process.stdin is not None, "it is a pipe"
        with self._process.stdin as pipe:
            pickle.dump(_arguments(self._tokenizer()), pipe)
        return ours

    def _end(self) -> None:
        if self._process is not None:
            if self._process.poll() is None:
                os.killpg(self._process.pid, signal.SIGKILL)
            self._process.wait()
        if self._control is not None:
            self._control.close()
        self._process = self._control = None


class TooExpensiveError(ApiError):
    """A call that took longer than its lane allows, or more memory than its process could have."""


class WorkerLane(Lane):
    """Runs calls in processes, each of which is ended when a call takes too long.

    Args:
        nursery: forks them. limit_s: computing time of a call. niceness: of the processes. The rest as in Lane.
    """

    def __init__(
        self, name: str, num_workers: int, max_waiting: int, *, nursery: Nursery, limit_s: float, niceness: int
    ) -> None:
        super().__init__(name, num_workers, max_waiting)
        self._nursery, self._limit_s, self._niceness = nursery, limit_s, niceness
        self._thread = threading.local()  # each has a worker

    def _call(self, function: Callable[..., T], arguments: tuple[Any, ...]) -> T:
        worker: Connection | None = getattr(self._thread, "worker", None)
        if worker is None or worker.poll():  # it has nothing to say but that it is gone
            worker = self._thread.worker = self._nursery.fork(self._niceness)
        try:
            worker.send((self._limit_s, function, arguments))
            has_returned, value = worker.recv()
        except (EOFError, OSError):
            self._thread.worker = None
            worker.close()
            text = f"{self._name} took more than {self._limit_s:g} s of computing for this request; send less"
            raise TooExpensiveError(400, text, code="too_expensive") from None
        if not has_returned:
            raise value
        return value  # type: ignore[no-any-return]


def _arguments(tokenizer: Tokenizer | None) -> tuple[Any, ...] | None:
    """What a worker makes the tokenizer of."""
    if tokenizer is None:
        return None
    named = {"bos_token": tokenizer.bos_token, "chat_template": tokenizer.chat_template}
    return (tokenizer.backend, tokenizer.eos_id), named
