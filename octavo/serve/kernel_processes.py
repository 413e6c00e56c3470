"""Processes that compile kernels, one a core to spare, and their program (octavo.serve.worker_process)."""

import contextlib
import logging
import os
import signal
import threading
from concurrent.futures import CancelledError, Future, ThreadPoolExecutor
from multiprocessing.connection import Connection

from octavo.ops._runtime.kernel_requests.triton import KernelRequest, compile_kernel, load_kernels
from octavo.serve.engine.request import UnavailableError
from octavo.serve.nursery import Nursery
from octavo.serve.worker_process import address_space

MAX_PROCESSES = 16
LIMIT_S = 120.0  # of one kernel; the slowest take a few
WORKER_BYTES = 16 << 30  # that compiling may map beside what is loaded; it takes less than a GiB

logger = logging.getLogger(__name__)


class KernelProcesses:
    """Compiles kernels into Triton's cache on disk, beside what the caller does.

    Args:
        target: of triton.backends.compiler.GPUTarget.
        num_processes: None for one less than this process may use cores.
        at_once: start processes now, not with the first kernel: as a fork where this process has one thread.
    """

    def __init__(self, target: tuple[str, int, int], num_processes: int | None = None, *, at_once: bool = True) -> None:
        num = num_processes or min(MAX_PROCESSES, max(1, len(os.sched_getaffinity(0)) - 1))
        self._nursery = Nursery(__name__, lambda: target)
        self._threads = ThreadPoolExecutor(num, thread_name_prefix="octavo-kernel")
        self._own = threading.local()  # each thread has a worker
        self._asked: list[Future[bool]] = []
        self._is_over = False
        if at_once:
            self._nursery.start_as_fork()
            self._threads.submit(self._nursery.start)

    def compile(self, request: KernelRequest) -> None:
        """Have it compiled behind those that were asked for before; nothing once closed, or where none can start."""
        if not self._is_over:
            self._asked.append(self._threads.submit(self._compile, request))

    @property
    def num_asked(self) -> int:
        """Kernels so far."""
        return len(self._asked)

    def wait(self) -> int:
        """Wait for all that was asked for; how many were compiled. What was not is compiled when it is needed."""
        num_compiled = 0
        for asked in self._asked:
            with contextlib.suppress(CancelledError):  # closed meanwhile
                num_compiled += asked.result()
        return num_compiled

    def close(self) -> None:
        """End the processes, also amid a kernel."""
        self._is_over = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        self._nursery.close()

    def _compile(self, request: KernelRequest) -> bool:
        if self._is_over:
            return False
        worker: Connection | None = getattr(self._own, "worker", None)
        try:
            worker = worker or self._nursery.fork(niceness=0)
            worker.send((signal.ITIMER_REAL, LIMIT_S, compile_kernel.__name__, (request,)))
            outcome, value, is_last = worker.recv()
        except Exception as error:  # also of an answer that cannot be read
            outcome, value, is_last = "failed", error, True
            self._is_over |= isinstance(error, UnavailableError)  # the others would not start either
        if is_last and worker is not None:
            worker.close()
        self._own.worker = None if is_last else worker
        if outcome != "returned" and not self._is_over:
            logger.info("%s was not compiled ahead: %s %s", request.name, outcome, value)
        return outcome == "returned"


def prepare(target: tuple[str, int, int]) -> int:
    """Load what a worker needs, before the first fork; the address space that it may have."""
    load_kernels(target)
    return address_space() + WORKER_BYTES
