"""SchemaTrials: every new JSON schema is tried in a worker process that can be killed before the engine compiles it."""

import asyncio
import dataclasses
import logging
import signal
from collections.abc import Callable
from typing import Any

from octavo.serve.engine import schema_worker
from octavo.serve.engine.grammar import CompiledSchema, GrammarFactory
from octavo.serve.engine.request import BusyError, UnavailableError
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.lanes import TooExpensiveError, WorkerLane
from octavo.serve.nursery import Nursery
from octavo.serve.sampling_params import ParameterError

# one that is hard shall not keep all others; each takes a core and up to ServerConfig.max_schema_memory_bytes
NUM_WORKERS = 2
# new schemas that wait for a worker: the last of them waits for 80 s at most, less than clients' usual time-outs
MAX_WAITING = 16
NICENESS = 10  # the engine and its requests come first

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
        grammars: returns the server's.
    """

    def __init__(self, config: ServerConfig, grammars: Callable[[], GrammarFactory]) -> None:
        self._config = config

        def setup() -> dict[str, Any]:
            return grammars().worker_setup() | {"max_memory_bytes": config.max_schema_memory_bytes}

        self._nursery = Nursery(schema_worker.__file__, setup)
        self._lane = WorkerLane(
            "new schemas",
            NUM_WORKERS,
            NUM_WORKERS + MAX_WAITING,  # a trial whose clients went may be there a little longer
            nursery=self._nursery,
            limit_s=config.schema_timeout_s,
            niceness=NICENESS,
            clock=signal.ITIMER_REAL,
        )
        self._trials: dict[str, _Trial] = {}
        self._is_stopped = False

    async def compile(self, grammars: GrammarFactory, schema: str) -> CompiledSchema:
        """A schema as a grammar; at once where it was compiled before.

        Raises:
            ParameterError: it is too large, breaks a limit, or cannot be kept to.
            BusyError: too many new ones wait, or the compiled ones in use leave no room.
            UnavailableError: the server stops, or the worker was killed.
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
        """End all trials; from the event loop. What is compiled is still found."""
        self._is_stopped = True
        for trial in self._trials.values():
            trial.task.cancel()

    async def close(self) -> None:
        """Stop, and wait for the processes' ends."""
        self.stop()
        await asyncio.gather(*(trial.task for trial in self._trials.values()), return_exceptions=True)
        self._lane.close()
        await asyncio.to_thread(self._nursery.close)

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
        def compile_here(found: tuple[int, str | None]) -> CompiledSchema:
            num_bytes, error = found
            if error is not None:
                raise ParameterError("json_schema", f"cannot be kept to: {error}")
            if not grammars.has_room(num_bytes):
                raise BusyError("the schemas in use leave no memory for another one as large; try again later")
            return grammars.compile(schema, num_bytes)

        try:
            compiled: CompiledSchema = await self._lane.run("try_schema", schema, then=compile_here)
        except TooExpensiveError as error:
            raise self._explain(error.exit_code or 0) from None
        return compiled

    def _explain(self, exit_code: int) -> Exception:
        if exit_code == -signal.SIGALRM:
            text = f"must compile within {self._config.schema_timeout_s:g} s, which this one does not; simplify it"
            return ParameterError("json_schema", f"{text}, patterns above all")
        name = signal.Signals(-exit_code).name if exit_code < 0 else f"exit code {exit_code}"
        logger.warning("a worker ended at a json_schema (%s); another takes its place", name)
        if exit_code == -signal.SIGKILL:
            return UnavailableError("the process that compiled the json_schema was killed from outside; try again")
        text = (
            f"must compile within {self._config.max_schema_memory_bytes >> 20} MiB and not nest too deep, but ended "
            f"the process that tried it ({name}); simplify it"
        )
        return ParameterError("json_schema", text)
