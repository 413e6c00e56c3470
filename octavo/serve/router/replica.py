"""Replica: one server process on a port of its own; it is watched, ended where it hangs, and started again."""

import asyncio
import contextlib
import json
import logging
import os
import pickle
import signal
import sys
import time
from asyncio.subprocess import PIPE, Process
from collections.abc import Callable, Iterator

from octavo.distributed.agreement import versions
from octavo.env import child_environment
from octavo.errors import BackendError, ConfigError
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.server import bind
from octavo.serve.rank_watch import how_ended
from octavo.serve.router.upstream import LostReplicaError, Request, UnreachableError, ask, fetch
from octavo.serve.tensor_workers import LOAD_S

# wait before the first restart and before the last of many; seconds of readiness after which it is the first again
FIRST_WAIT_S, LAST_WAIT_S, STEADY_S = 1.0, 60.0, 60.0
# pause between two looks at a replica that starts, and at one that serves
STARTING_POLL_S, POLL_S = 0.1, 0.5
# time for one look, and time without a good one after which a replica that was ready is killed
LOOK_S, LOST_S = 5.0, 30.0
# the exit code of what a user has to correct: a second start would end alike
USAGE_ERROR = 2
_AMISS = ("unhealthy", "silent")
# states in which it is not asked for anything
NOT_ANSWERING = ("starting", "silent", "ended")

logger = logging.getLogger(__name__)


class Backoff:
    """How long to wait until the next start."""

    def __init__(self) -> None:
        self._wait_s = FIRST_WAIT_S

    def wait_after(self, ready_s: float) -> float:
        """Seconds to wait, after a process that was ready for so long."""
        wait_s = FIRST_WAIT_S if ready_s >= STEADY_S else self._wait_s
        self._wait_s = min(2 * wait_s, LAST_WAIT_S)
        return wait_s


class Replica:
    """One server process after the other.

    Args:
        index: its number, the metrics' label.
        order: what the process is told: see replica_process.
        devices: its CUDA_VISIBLE_DEVICES; None for the router's own.
        start_timeout_s: how long it may take to become ready.

    Attributes:
        port: where it listens.
        state: in a word, as it says of itself; "serving" if it would take requests.
        is_outdated: it has older weights than the others, and waits for the next update.
        should_sleep: all replicas sleep; it is put to sleep again where its process is a new one.
        load: see Balance.
        num_in_flight: requests that it works on.
        num_routed: requests that were sent to it.
        num_failures: requests that it ended without an answer.
        num_restarts: how often it was started again.
        on_start: called with index before each start; a Fleet sets it.
        exit_code: the last process's, or None.
    """

    def __init__(
        self,
        index: int,
        order: tuple[Callable[[], object], ServerConfig],
        devices: str | None = None,
        start_timeout_s: float = LOAD_S,
    ) -> None:
        self.index, self.port, self.state = index, 0, "starting"
        self.load, self.num_in_flight = 0.0, 0
        self.num_routed = self.num_failures = self.num_restarts = 0
        self.should_sleep = self.is_outdated = False
        self.exit_code: int | None = None
        self.on_start: Callable[[int], None] = lambda index: None
        self._order, self._devices, self._start_timeout_s = order, devices, start_timeout_s
        self._process: Process | None = None
        self._stopping = asyncio.Event()
        self._was_ever_ready = False
        self._ready_since: float | None = None

    @property
    def is_ready(self) -> bool:
        """It takes requests."""
        return self.state == "serving" and not (self.should_sleep or self.is_outdated)

    @property
    def status(self) -> str:
        """Its state, as the router's users are told."""
        return "outdated" if self.state == "serving" and self.is_outdated else self.state

    @contextlib.contextmanager
    def working(self, weight: float) -> Iterator[None]:
        """Within, a request of this weight is with it."""
        self.load += weight
        self.num_in_flight += 1
        try:
            yield
        finally:
            self.load -= weight
            self.num_in_flight -= 1

    async def run(self) -> None:
        """Start it, and again whenever it ends, until stop() or kill().

        Raises:
            BackendError: it ended before it was ever ready, for a reason that the user has to remove.
        """
        backoff = Backoff()
        while not self._stopping.is_set():
            try:
                how = how_ended(await self._run_once())
            except (OSError, ConfigError) as error:  # no process or socket could be had
                how = f"could not be started: {error}"
            if self._stopping.is_set():
                return
            if self.exit_code == USAGE_ERROR and not self._was_ever_ready:
                raise BackendError(f"replica {self.index} could not start; its own error stands above")
            wait_s = backoff.wait_after(0.0 if self._ready_since is None else time.monotonic() - self._ready_since)
            logger.error("replica %d %s; it starts again in %g s", self.index, how, wait_s)
            with contextlib.suppress(TimeoutError):
                await asyncio.wait_for(self._stopping.wait(), wait_s)
            self.num_restarts += not self._stopping.is_set()

    def stop(self) -> None:
        """Let it finish what it has admitted and end; said twice, end what is unfinished."""
        self._end_by(signal.SIGTERM)

    def kill(self) -> None:
        """End it at once."""
        self._end_by(signal.SIGKILL)

    def restart(self) -> None:
        """End its process at once; another one is started."""
        if self._process is not None and self._process.returncode is None:
            self._process.kill()

    def _end_by(self, number: signal.Signals) -> None:
        self._stopping.set()
        if self._process is not None and self._process.returncode is None:
            self._process.send_signal(number)

    async def _run_once(self) -> int:
        """Run one process to its end; its exit code."""
        self.state, self.exit_code, self._ready_since = "starting", None, None
        self.on_start(self.index)
        self._process = process = await self._start()
        try:
            async with asyncio.TaskGroup() as group:
                watch = group.create_task(self._watch(process))
                self.exit_code = await process.wait()
                watch.cancel()
        finally:
            self.state = "ended"
            if process.returncode is None:  # the router itself ends
                process.kill()
        return self.exit_code

    async def _start(self) -> Process:
        changes = {} if self._devices is None else {"CUDA_VISIBLE_DEVICES": self._devices}
        changes["FORWARDED_ALLOW_IPS"] = "127.0.0.1"  # uvicorn's: the router says who a client is, and is believed
        with contextlib.closing(bind("127.0.0.1", 0)) as listener:
            self.port = listener.getsockname()[1]
            arguments = [str(each) for each in (self.index, listener.fileno(), os.getpid())]
            process = await asyncio.create_subprocess_exec(
                *(sys.executable, "-m", "octavo.serve.router.replica_process", *arguments),
                stdin=PIPE,
                pass_fds=(listener.fileno(),),
                env=child_environment(**changes),
                start_new_session=True,  # Ctrl-C in a terminal is for the router, which lets its replicas finish
            )
        assert process.stdin is not None, "it is a pipe"
        process.stdin.write(pickle.dumps(versions()) + pickle.dumps(self._order))
        process.stdin.close()
        if self._stopping.is_set():
            process.kill()
        return process

    async def _watch(self, process: Process) -> None:
        """Keep state, and kill what does not become ready or hangs."""
        deadline = time.monotonic() + self._start_timeout_s
        while True:
            self.state = await self._look()
            now = time.monotonic()
            if self.state == "serving":
                self._was_ever_ready = True
                self._ready_since = now if self._ready_since is None else self._ready_since
            if self.state == "serving" and self.should_sleep:
                await self._sleep_again()
            if self._ready_since is not None and self.state not in _AMISS:
                deadline = now + LOST_S
            if now > deadline:
                logger.error("replica %d is %s for too long and is killed", self.index, self.state)
                process.kill()
                return
            await asyncio.sleep(STARTING_POLL_S if self._ready_since is None else POLL_S)

    async def _sleep_again(self) -> None:
        """Put a process to sleep that began while all slept; where it does not, it is asked again."""
        answer = await ask(self.port, self._order[1].admin_key, Request(b"POST", b"/admin/sleep"), LOST_S)
        if answer.status == 200:
            self.state = "asleep"
        else:
            logger.warning("replica %d should sleep as the others do, and %s", self.index, answer.what)

    async def _look(self) -> str:
        """What it says of itself; "silent" if it says nothing that can be understood."""
        try:
            status, body = await fetch(self.port, Request(b"GET", b"/ready"), LOOK_S)
            state = str(json.loads(body)["status"])
        except UnreachableError:
            return "starting" if self._ready_since is None else "silent"
        except (LostReplicaError, ValueError, TypeError, KeyError) as error:
            if self.state != "silent":  # else it was said
                logger.warning("replica %d gave no answer at /ready: %s", self.index, error or type(error).__name__)
            return "silent"
        except OSError as error:  # the router lacks something, which says nothing of the replica
            logger.error("replica %d cannot be asked: %s", self.index, error)
            return self.state
        return state if (status == 200) == (state == "serving") else "silent"
