"""SchemaTrials: every new JSON schema is tried in a worker process that can be killed before the engine compiles it."""

import asyncio
import contextlib
import dataclasses
import json
import logging
import os
import signal
import sys
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any, TypeVar

from octavo.env import child_environment
from octavo.serve.engine import schema_worker
from octavo.serve.engine.grammar import CompiledSchema, GrammarFactory
from octavo.serve.engine.request import BusyError, UnavailableError
from octavo.serve.http.config import ServerConfig
from octavo.serve.sampling_params import ParameterError

# one that is hard shall not keep all others; each takes a core and up to ServerConfig.max_schema_memory_bytes
NUM_WORKERS = 2
# new schemas that wait for a worker: the last of them waits for 80 s at most, less than clients' usual time-outs
MAX_WAITING = 16
# a worker's start; a vocabulary of 150,000 tokens takes one second
START_TIMEOUT_S = 60.0

T = TypeVar("T")
logger = logging.getLogger(__name__)


@dataclasses.dataclass
class _Trial:
    """A schema on its way, and how many requests wait for it."""

    task: asyncio.Task[CompiledSchema]
    num_requests: int = 0


class SchemaTrials:
    """Compiles schemas of strangers; for the tasks of one event loop.

    A schema that passed is compiled again in this process, in a thread, as a grammar cannot leave its process: by then
    its time and memory are known to be within the limits. All requests with one schema share one trial, which ends when
    the last of them has gone.

    Args:
        config: its limits of schemas.
    """

    def __init__(self, config: ServerConfig) -> None:
        self._config = config
        self._threads = ThreadPoolExecutor(NUM_WORKERS, "octavo-schema")
        self._slots = asyncio.Semaphore(NUM_WORKERS)
        self._trials: dict[str, _Trial] = {}
        self._idle: list[_Worker] = []
        self._setup: bytes | None = None
        self._is_stopped = False

    async def compile(self, grammars: GrammarFactory, schema: str) -> CompiledSchema:
        """A schema as a grammar; at once where it was compiled before.

        Raises:
            ParameterError: it is too large, breaks a limit, or cannot be kept to. BusyError: too many new ones wait, or
                the compiled ones in use leave no room. UnavailableError: the server stops, or the worker was killed.
        """
        if len(schema) > self._config.max_schema_bytes:
            text = (
                f"must have at most {self._config.max_schema_bytes} bytes on this server, got {len(schema)}; split it"
            )
            raise ParameterError("json_schema", text)
        if (compiled := grammars.find(schema)) is not None:
            return compiled
        if self._is_stopped:
            raise UnavailableError("the server is shutting down and takes no requests; try again later")
        trial = self._trials.get(schema) or self._begin(grammars, schema)
        trial.num_requests += 1
        try:
            return await asyncio.shield(trial.task)
        except asyncio.CancelledError:
            if self._is_stopped and trial.task.cancelled():
                raise UnavailableError("the server shut down before the json_schema was compiled") from None
            raise
        finally:
            trial.num_requests -= 1
            if not trial.num_requests:
                self._forget(schema, trial)
                trial.task.cancel()

    def stop(self) -> None:
        """End all trials and workers; from the event loop. What is compiled is still found."""
        self._is_stopped = True
        for trial in self._trials.values():
            trial.task.cancel()
        for worker in self._idle:
            worker.kill()

    async def close(self) -> None:
        """Stop, and wait for the processes' ends."""
        self.stop()
        await asyncio.gather(*(trial.task for trial in self._trials.values()), return_exceptions=True)
        await asyncio.gather(*(worker.end() for worker in self._idle))
        self._idle.clear()
        self._threads.shutdown(wait=False, cancel_futures=True)

    def _begin(self, grammars: GrammarFactory, schema: str) -> _Trial:
        if len(self._trials) >= NUM_WORKERS + MAX_WAITING:
            raise BusyError(
                f"{NUM_WORKERS} new schemas are being compiled and {MAX_WAITING} wait, which is all there is room for; "
                "try again later (schemas that were used before are taken)"
            )
        trial = _Trial(asyncio.create_task(self._try_and_compile(grammars, schema)))
        trial.task.add_done_callback(lambda _: self._forget(schema, trial))
        self._trials[schema] = trial
        return trial

    def _forget(self, schema: str, trial: _Trial) -> None:
        if self._trials.get(schema) is trial:
            del self._trials[schema]

    async def _try_and_compile(self, grammars: GrammarFactory, schema: str) -> CompiledSchema:
        async with self._slots:
            num_bytes = await self._try(grammars, schema)
            if not grammars.has_room(num_bytes):
                raise BusyError("the schemas in use leave no memory for another one as large; try again later")
            return await self._in_thread(lambda: grammars.compile(schema, num_bytes))

    async def _try(self, grammars: GrammarFactory, schema: str) -> int:
        """Bytes that a schema takes once it is compiled."""
        while self._idle:
            worker = self._idle.pop()
            if worker.is_alive:
                break
            await worker.end()
        else:
            worker = await self._start_worker(grammars)
        try:
            return await worker.try_schema(schema)
        finally:
            if worker.is_alive and not self._is_stopped:
                self._idle.append(worker)
            else:
                await worker.end()

    async def _start_worker(self, grammars: GrammarFactory) -> "_Worker":
        if self._setup is None:
            self._setup = await self._in_thread(lambda: self._make_setup(grammars))
        return await _Worker.start(self._setup, self._config)

    def _make_setup(self, grammars: GrammarFactory) -> bytes:
        limits = {"timeout_s": self._config.schema_timeout_s, "max_memory_bytes": self._config.max_schema_memory_bytes}
        return json.dumps(grammars.worker_setup() | limits).encode() + b"\n"

    async def _in_thread(self, work: Callable[[], T]) -> T:
        return await asyncio.get_running_loop().run_in_executor(self._threads, work)


class _Worker:
    """A process that runs schema_worker.py, which describes what goes in and out.

    Nothing of this process is in it but its environment: it is a fresh process and inherits no file but its two pipes.
    """

    def __init__(self, process: asyncio.subprocess.Process, config: ServerConfig) -> None:
        self._process, self._config = process, config
        self._is_over = False

    @classmethod
    async def start(cls, setup: bytes, config: ServerConfig) -> "_Worker":
        process = await asyncio.create_subprocess_exec(
            *(sys.executable, "-P", schema_worker.__file__),  # -P: the folder's modules are not to be imported
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.PIPE,
            stderr=asyncio.subprocess.DEVNULL,
            env=child_environment(MALLOC_ARENA_MAX="1"),  # an arena a thread would count as address space
            start_new_session=True,  # a Ctrl-C is the server's, which drains first
        )
        worker = cls(process, config)
        try:
            async with asyncio.timeout(START_TIMEOUT_S):
                answer = await worker._ask(setup)
            error = "it died" if answer is None else answer["error"]
        except TimeoutError:
            error = f"it took longer than {START_TIMEOUT_S:g} s"
        except BaseException:
            await worker.end()
            raise
        if error is not None:
            await worker.end()
            logger.error("a worker for json_schema did not start: %s", error)
            raise UnavailableError(f"the process that tries a json_schema did not start: {error}")
        return worker

    @property
    def is_alive(self) -> bool:
        if self._is_over or self._process.returncode is not None:
            return False
        try:
            os.kill(self._process.pid, 0)  # asyncio hears of an end a little later
        except ProcessLookupError:
            return False
        return True

    async def try_schema(self, schema: str) -> int:
        """Bytes that it takes; the process is over after what was not its own answer.

        Raises:
            ParameterError: it cannot be kept to, or breaks a limit. UnavailableError: the process was killed.
        """
        try:
            # the worker's own alarm comes first, unless its clock is stopped
            async with asyncio.timeout(self._config.schema_timeout_s + 1):
                answer = await self._ask(json.dumps(schema).encode() + b"\n")
        except TimeoutError:
            await self.end()
            raise self._too_slow() from None
        except BaseException:
            await self.end()
            raise
        if answer is None:
            raise self._explain(await self._process.wait())
        self._is_over = answer["is_last"]
        if answer["error"] is not None:
            raise ParameterError("json_schema", f"cannot be kept to: {answer['error']}")
        num_bytes: int = answer["num_bytes"]
        return num_bytes

    def kill(self) -> None:
        self._is_over = True
        if self._process.returncode is None:
            with contextlib.suppress(ProcessLookupError):
                self._process.kill()

    async def end(self) -> int:
        """Kill it if it lives, and wait for its end: its exit code."""
        self.kill()
        assert self._process.stdin is not None, "it is a pipe"
        self._process.stdin.close()
        await self._process.communicate()
        assert self._process.returncode is not None, "it has ended"
        return self._process.returncode

    async def _ask(self, line: bytes) -> dict[str, Any] | None:
        """What it answers; None where it has died."""
        assert self._process.stdin is not None and self._process.stdout is not None, "they are pipes"
        with contextlib.suppress(ConnectionError):  # then there is no answer either
            self._process.stdin.write(line)
            await self._process.stdin.drain()
        answer = await self._process.stdout.readline()
        content: dict[str, Any] | None = json.loads(answer) if answer.endswith(b"\n") else None
        return content

    def _explain(self, exit_code: int) -> Exception:
        """Why a worker died at a schema."""
        if exit_code == -signal.SIGALRM:
            return self._too_slow()
        name = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        logger.warning("a worker ended at a json_schema (%s); another takes its place", name)
        if exit_code == -signal.SIGKILL:
            return UnavailableError("the process that compiled the json_schema was killed from outside; try again")
        text = (
            f"must compile within {self._config.max_schema_memory_bytes >> 20} MiB and not nest too deep, but ended "
            f"the process that tried it ({name}); simplify it"
        )
        return ParameterError("json_schema", text)

    def _too_slow(self) -> ParameterError:
        text = f"must compile within {self._config.schema_timeout_s:g} s, which this one does not; simplify it"
        return ParameterError("json_schema", f"{text}, patterns above all")
