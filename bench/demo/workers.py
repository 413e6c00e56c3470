"""Variants side by side: worker processes that live as long as the demo, so that torch is imported once in each.

On a CPU each variant has a process with its share of the cores; on a GPU they run one after another in this process.
"""

import contextlib
import multiprocessing
import os
import traceback
from collections.abc import Callable, Iterator, Mapping
from multiprocessing.connection import Connection, wait
from multiprocessing.context import SpawnProcess
from types import TracebackType
from typing import Any, Self, TypeVar

import torch

from octavo.errors import OctavoError

Job = TypeVar("Job")
Result = TypeVar("Result")
Tell = Callable[[Any], None]  # what a running variant reports through

_EVENT, _DONE, _FAILED = "event", "done", "failed"


def num_cores() -> int:
    """Cores that this process may run on."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1


@contextlib.contextmanager
def one_thread(enabled: bool) -> Iterator[None]:
    """Let torch use one thread: at the demo's sizes two gain little, and on a busy machine they wait for each other."""
    num_threads = torch.get_num_threads()
    if enabled:
        torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


class Workers:
    """Runs one job a variant, all at a time.

    Args:
        size: processes; 0 runs every job in this process, one after another.
    """

    def __init__(self, size: int) -> None:
        self._threads = max(1, num_cores() // max(size, 1))
        self._size = size
        self._processes: list[SpawnProcess] = []
        self._connections: list[Connection] = []

    @property
    def is_parallel(self) -> bool:
        """Whether variants run side by side."""
        return self._size > 0

    def __enter__(self) -> Self:
        context = multiprocessing.get_context("spawn")
        for _ in range(self._size):
            ours, theirs = context.Pipe()
            process = context.Process(target=_serve, args=(theirs, self._threads), daemon=True)
            process.start()
            theirs.close()  # so that the worker's death ends the connection
            self._processes.append(process)
            self._connections.append(ours)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in self._processes:
            process.terminate()
        for process, connection in zip(self._processes, self._connections, strict=True):
            process.join()
            connection.close()

    def run(
        self,
        function: Callable[[Job, Tell], Result],
        jobs: Mapping[str, Job],
        on_event: Callable[[str, Any], None] = lambda name, event: None,
    ) -> dict[str, Result]:
        """Run function(job, tell) for every variant, at most as many as there are processes.

        Args:
            function: of a module, so that another process can import it.
            jobs: variant -> its job.
            on_event: called here with (variant, event) for every event that function told.
        Returns:
            variant -> what function returned.
        Raises:
            OctavoError: what a variant raised, with the variant's name in front.
            RuntimeError: any other error of a variant, with its traceback, or its process died.
        """
        if self._size == 0:
            return {name: function(job, lambda event, name=name: on_event(name, event)) for name, job in jobs.items()}  # type: ignore[misc]
        assert len(jobs) <= self._size, f"{len(jobs)} variants for {self._size} workers"
        names: dict[Any, str] = dict(zip(self._connections, jobs, strict=False))
        for connection, name in names.items():
            connection.send((function, jobs[name]))
        results: dict[str, Result] = {}
        while len(results) < len(jobs):
            for connection in wait([c for c, name in names.items() if name not in results]):
                name = names[connection]
                kind, value = self._receive(connection, name)  # type: ignore[arg-type]
                if kind == _EVENT:
                    on_event(name, value)
                else:
                    results[name] = value
        return {name: results[name] for name in jobs}

    def _receive(self, connection: Connection, name: str) -> tuple[str, Any]:
        try:
            kind, value = connection.recv()
        except (EOFError, ConnectionResetError):
            process = self._processes[self._connections.index(connection)]
            process.join()
            raise RuntimeError(
                f"variant {name!r}: its process died with exit code {process.exitcode}"
                + ("; a killed process often means too little memory" if process.exitcode == -9 else "")
            ) from None
        if kind == _FAILED:
            error, text = value
            if error is not None:
                raise type(error)(f"variant {name!r}: {error}")
            raise RuntimeError(f"variant {name!r} failed:\n{text}")
        return kind, value


def _serve(connection: Connection, num_threads: int) -> None:
    """A worker's life: jobs in, events and results out, until its parent is gone."""
    torch.set_num_threads(num_threads)
    while True:
        try:
            function, job = connection.recv()
        except (EOFError, KeyboardInterrupt):
            return
        try:
            result = function(job, lambda event: connection.send((_EVENT, event)))
        except KeyboardInterrupt:
            return
        except OctavoError as error:
            connection.send((_FAILED, (error, "")))
        except Exception:
            connection.send((_FAILED, (None, traceback.format_exc())))
        else:
            connection.send((_DONE, result))
