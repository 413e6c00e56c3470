"""Lanes: work beside the event loop, so much at a time and so much waiting; what is more is refused with 503.

Threads do what is short whatever comes in; processes (octavo.serve.worker_process) the rest, for those can be
ended: by a limit of time or memory, or because the client has gone.
"""

import asyncio
import contextlib
import os
import signal
import socket
import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor
from multiprocessing.connection import Connection
from typing import Any, TypeVar

from octavo.errors import DataError
from octavo.serve.http.errors import BUSY_RETRY_S, ApiError
from octavo.serve.nursery import Nursery

T = TypeVar("T")


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
