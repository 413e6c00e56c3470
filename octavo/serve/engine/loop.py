"""EngineLoop: one thread that builds an engine and drives it; requests come in and tokens go out from any other thread.

Every request that is admitted gets exactly one last delta for each of its sequences, whatever happens.
"""

import contextlib
import logging
import math
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from octavo.errors import LostWeightsError, OctavoError, RequestError
from octavo.serve.engine.driver import EngineDriver
from octavo.serve.engine.engine import Engine
from octavo.serve.engine.request import (
    BusyError,
    Delta,
    FailedError,
    LostRankError,
    Phase,
    RequestInput,
    RequestState,
    UnavailableError,
    delta_of,
)
from octavo.serve.engine.sequence import Sequence as EngineSequence
from octavo.weights.update import RunningPolicy, WeightUpdate

# failing steps in a row after which the engine is given up
MAX_FAILURES = 3

logger = logging.getLogger(__name__)

T = TypeVar("T")
Deltas = list[tuple[RequestState, Delta]]
Publish = Callable[[Deltas], None]


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        build: makes the engine, in the thread.
        publish: takes all deltas of a step at once; called in the thread, must not block.
        max_num_waiting: sequences that may wait beside the max_num_seqs that run.
        step_timeout_s: age of a step from which on other ranks that compute with this process are ended.

    Attributes:
        phase: what it is doing.
        error: what the engine failed of, or None.
        num_admitted: requests taken in.
        num_ended: sequences ended, by finish reason.
    """

    def __init__(
        self,
        build: Callable[[], Engine],
        publish: Publish,
        *,
        max_num_waiting: int,
        step_timeout_s: float = math.inf,
    ) -> None:
        self._build, self._publish, self.max_num_waiting = build, publish, max_num_waiting
        self._step_timeout_s = step_timeout_s
        self.phase = Phase.STARTING
        self.error: BaseException | None = None
        self.num_admitted = 0
        self.num_ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._driver: EngineDriver | None = None
        # over phase, num_open and the sequences' ends: what is admitted before a drain is finished by it
        self._lock = threading.RLock()
        self._num_open = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._requests: dict[EngineSequence, RequestState] = {}  # of sequences that have not ended
        self._not_started: list[RequestState] = []
        self._sleeper: Future[None] | None = None
        self._waiting_update: tuple[Future[int], WeightUpdate] | None = None
        self._held: list[RequestState] = []  # came while an update waited for those before them
        self._busy_since: float | None = None
        self._num_failures = 0
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)

    @property
    def engine(self) -> Engine:
        """The engine; only to be read from.

        Raises:
            UnavailableError: it is not built.
        """
        if self._driver is None:
            raise UnavailableError(f"the server is {self.phase}; try again later")
        return self._driver.engine

    @property
    def is_built(self) -> bool:
        """There is an engine, whatever became of it."""
        return self._driver is not None

    @property
    def capacity(self) -> int:
        """Sequences that may be open at a time."""
        return self.engine.config.max_num_seqs + self.max_num_waiting

    @property
    def num_open(self) -> int:
        """Sequences that were admitted and have not ended."""
        return self._num_open

    @property
    def step_age_s(self) -> float:
        """Seconds that the step under way has taken; 0 between steps."""
        busy_since = self._busy_since
        return 0.0 if busy_since is None else time.perf_counter() - busy_since

    @property
    def is_alive(self) -> bool:
        """The thread runs and the engine was not given up."""
        return self._thread.is_alive() and self.phase is not Phase.FAILED

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def submit(self, inputs: Sequence[RequestInput]) -> list[RequestState]:
        """Admit requests, all or none.

        Returns:
            One state an input; their deltas come through publish.
        Raises:
            UnavailableError: not serving.
            BusyError: no room.
            RequestError: more than there could ever be room for.
        """
        self.check_serving()
        wanted = sum(given.params.n for given in inputs)
        if wanted > self.capacity:
            raise RequestError(f"a request may ask for {self.capacity} sequences at most here, got {wanted}; split it")
        arrived = time.perf_counter()
        with self._lock:
            self.check_serving()
            if self._num_open + wanted > self.capacity:
                raise BusyError(
                    f"{self._num_open} sequences are running or waiting and this request has {wanted}, but there is "
                    f"room for {self.capacity}; try again later"
                )
            self._num_open += wanted
            self.num_admitted += len(inputs)
            requests = [RequestState(given, arrived_s=arrived, num_open=given.params.n) for given in inputs]
            self._inbox.put(partial(self._admit, requests))
        return requests

    def abort(self, requests: Sequence[RequestState]) -> None:
        """End what is unfinished of these requests, with "abort"; soon."""
        self._inbox.put(partial(self._end_all, requests, "abort", None))

    def run(self, action: Callable[[Engine], T]) -> "Future[T]":
        """Do something to the engine between two steps.

        Raises:
            UnavailableError: there is no engine, or it takes no more orders.
        """
        self._check_running()
        done: Future[T] = Future()
        self._inbox.put(partial(self._fulfil, done, lambda: action(self.engine)))
        return done

    def update_weights(self, update: WeightUpdate, running: RunningPolicy = "wait") -> "Future[int]":
        """Commit a staged update between two steps; its result is the new weight version, or what kept it from that.

        Args:
            running: of the sequences that run: see Engine.commit_update. With "wait" those that were admitted before
                this are finished first, and those that come meanwhile start after it, under the new weights.
        Raises:
            UnavailableError: there is no engine, or it takes no more orders.
        """
        if running != "wait":
            return self.run(lambda _: self._commit(update, running))
        self._check_running()
        done: Future[int] = Future()
        self._inbox.put(partial(self._await_idle, done, update))
        return done

    def sleep(self) -> "Future[None]":
        """Take no more requests, finish those that were admitted, then give the KV cache's memory back."""
        done: Future[None] = Future()
        with self._lock:
            self.check_serving()
            self.phase = Phase.SLEEPING
        self._inbox.put(partial(setattr, self, "_sleeper", done))
        return done

    def wake(self) -> "Future[None]":
        """Undo sleep().

        Raises:
            UnavailableError: it is not asleep.
        """
        self._check_not_failed()
        if self.phase is not Phase.SLEEPING:
            raise UnavailableError(f"the server is {self.phase}, not asleep")
        return self.run(self._wake)

    def drain(self) -> None:
        """Take no more requests; the thread ends when those that were admitted are finished."""
        with self._lock:
            if self.phase in (Phase.STARTING, Phase.SERVING, Phase.SLEEPING):
                self.phase = Phase.DRAINING
        self._inbox.put(lambda: None)

    def abort_all(self) -> None:
        """End every unfinished request, with "abort"; soon."""
        self._inbox.put(lambda: self._end_all(self._all_requests(), "abort", None))

    def give_up(self, error: BaseException, is_stuck: bool = False) -> None:
        """Fail, from any thread: from now on nothing is taken in. Requests end with the step under way.

        Args:
            is_stuck: that step does not end, so the requests end here and now.
        """
        if self._fail(error):
            self._inbox.put(partial(_raise, error))  # to a thread that waits for messages
        if is_stuck:
            self._end_with(error)

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; False if it has not ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def check_serving(self) -> None:
        """Whether requests are taken.

        Raises:
            FailedError: never again.
            UnavailableError: not now.
        """
        self._check_not_failed()
        if self.phase is not Phase.SERVING:
            raise UnavailableError(f"the server is {self.phase} and takes no requests; try again later")

    def _check_running(self) -> None:
        self._check_not_failed()
        if self.phase in (Phase.STARTING, Phase.STOPPED):
            raise UnavailableError(f"the server is {self.phase}")

    def _check_not_failed(self) -> None:
        if self.phase is Phase.FAILED:
            raise FailedError(f"the server has failed and takes no requests until it is started again: {self.error}")

    def _main(self) -> None:
        try:
            self._driver = driver = EngineDriver(self._build())
            driver.engine.watch_ranks(self.give_up, self._step_timeout_s)
            with self._lock:
                self.phase = Phase.SERVING if self.phase is Phase.STARTING else self.phase
            self._serve(driver)
            with self._lock:
                self.phase = self.phase if self.phase is Phase.FAILED else Phase.STOPPED
        except BaseException as error:
            self._fail(error)
            assert self.error is not None, "it has just been set, or before"
            self._end_with(self.error)

    def _fail(self, error: BaseException) -> bool:
        """Be FAILED; False where it is already, or has stopped."""
        with self._lock:
            if self.phase in (Phase.FAILED, Phase.STOPPED):
                return False
            self.phase, self.error = Phase.FAILED, error
        if not self.is_built:  # the server raises it
            return True
        if isinstance(error, OctavoError):  # its text is for users
            logger.error("the engine failed: %s", error)
        else:
            logger.error("the engine failed", exc_info=error)
        return True

    def _end_with(self, error: BaseException) -> None:
        """Give all that is open its end, once the phase is FAILED."""
        with self._lock:
            self._take_messages(is_last=True)
            self._emit(self._last_deltas(self._all_requests(), "error", f"the engine failed: {error}"))
            self._held.clear()
            waiting = [self._sleeper, self._waiting_update and self._waiting_update[0]]
            self._sleeper = self._waiting_update = None
        for done in waiting:
            if done is not None and done.set_running_or_notify_cancel():
                done.set_exception(FailedError(f"the engine failed: {error}"))

    def _serve(self, driver: EngineDriver) -> None:
        engine = driver.engine
        while True:
            is_last = self.phase is Phase.DRAINING  # read first: what was admitted before that is in the inbox
            self._take_messages()
            if engine.has_unfinished:
                self._step(driver)
            elif self._waiting_update is not None:
                self._commit_waiting(*self._waiting_update)
            elif self._sleeper is not None:
                done, self._sleeper = self._sleeper, None
                self._fulfil(done, engine.sleep)
            elif is_last:
                return
            elif self.phase is not Phase.DRAINING and not self._can_prepare(engine):  # its message may be taken already
                self._inbox.get()()

    def _can_prepare(self, engine: Engine) -> bool:
        """Whether this idle moment was used to get ready for steps to come; without a warm-up not before the first."""
        may_begin = engine.config.warm_up or engine.stats.num_steps > 0
        return may_begin and self._inbox.empty() and engine.prepare_next()

    def _take_messages(self, is_last: bool = False) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            with contextlib.suppress(Exception) if is_last else contextlib.nullcontext():
                message()

    def _step(self, driver: EngineDriver) -> None:
        began = self._busy_since = time.perf_counter()
        try:
            advanced = driver.step()
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES or isinstance(error, LostRankError):
                raise
            logger.exception("a step failed; its requests are given up")
            self._end_all([*self._requests.values()], "error", f"the engine failed at a step: {error}")
            driver.engine.abort_all()
            return
        finally:
            self._busy_since = None
        self._num_failures = 0
        self._note_started(began)
        self._emit_tokens(advanced)

    def _emit_tokens(self, advanced: Sequence[EngineSequence]) -> None:
        now = time.perf_counter()
        deltas = [(request := self._requests[seq], delta_of(request, seq, now)) for seq in advanced]
        with self._lock:
            self._check_not_failed()  # else the requests may have had their end from another thread
            self._emit(deltas)

    def _all_requests(self) -> list[RequestState]:
        return [*self._requests.values(), *self._held]

    def _commit(self, update: WeightUpdate, running: RunningPolicy) -> int:
        """Commit an update now; a bad one is refused before anything happens to the sequences that run."""
        update.verify()
        if running == "abort":
            self._end_all([*self._requests.values()], "abort", "new weights were taken over")
        try:
            while self.engine.has_pending:
                self._emit_tokens(self.engine.collect_pending())
        except Exception as error:
            self._end_all([*self._requests.values()], "error", f"the engine failed at a step: {error}")
            raise
        return self.engine.commit_update(update, running)

    def _await_idle(self, done: "Future[int]", update: WeightUpdate) -> None:
        """Let an update wait until nothing runs; what is found wrong with it now is said now."""
        if self.phase is Phase.FAILED:
            done.set_exception(FailedError(f"the engine failed: {self.error}"))
            return
        if self._waiting_update is not None:
            done.set_exception(BusyError("another weight update is waiting for running requests; try again later"))
            return
        try:
            update.verify()
        except Exception as error:
            done.set_exception(error)
        else:
            self._waiting_update = done, update

    def _commit_waiting(self, done: "Future[int]", update: WeightUpdate) -> None:
        """Commit the update that waited, and take in the requests that waited for it."""
        self._waiting_update = None
        try:
            self._fulfil(done, lambda: self.engine.commit_update(update))
        finally:
            held, self._held = self._held, []
            self._admit(held)

    def _note_started(self, began: float) -> None:
        """Stamp the requests of which something was computed for the first time."""
        for request in self._not_started:
            if any(seq.num_computed_tokens > 0 for seq in request.sequences):
                request.started_s = began
        self._not_started = [r for r in self._not_started if r.started_s is None and r.num_open]

    def _admit(self, requests: list[RequestState]) -> None:
        if self._waiting_update is not None and self.phase is not Phase.FAILED:
            self._held += requests
            return
        lost: LostRankError | None = None
        for request in requests:
            try:
                self._check_not_failed()
                assert self._driver is not None, "nothing is taken in before there is an engine"
                self._driver.engine.admit(request, keep_text=True)
            except Exception as error:
                self._end_all([request], "error", str(error))
                lost = error if isinstance(error, LostRankError) else lost
            else:
                self._requests |= dict.fromkeys(request.sequences, request)
                self._not_started.append(request)
        if lost is not None:
            raise lost

    def _end_all(self, requests: Sequence[RequestState], reason: str, message: str | None) -> None:
        """End what is unfinished of these requests without another token."""
        with self._lock:
            deltas = self._last_deltas(requests, reason, message)
            self._held = [request for request in self._held if request not in requests]
            for request in requests:
                if request.sequences:
                    self.engine.abort(request)
            self._emit(deltas)

    def _last_deltas(self, requests: Sequence[RequestState], reason: str, message: str | None) -> Deltas:
        now = time.perf_counter()
        deltas: Deltas = []
        for request in dict.fromkeys(requests):
            if request.sequences:
                indices = [seq.index for seq in request.sequences if seq in self._requests]
            else:
                indices = list(range(request.num_open))
            deltas += [
                (request, Delta(index, finish_reason=reason, stop_reason=message, time_s=now)) for index in indices
            ]
        return deltas

    def _emit(self, deltas: Deltas) -> None:
        """Count the sequences that ended, and hand the deltas out; under the lock."""
        ended = [(request, delta) for request, delta in deltas if delta.finish_reason is not None]
        for request, delta in ended:
            assert delta.finish_reason is not None, "it was chosen for that"
            request.num_open -= 1
            self.num_ended[delta.finish_reason] += 1
            if request.sequences:
                self._requests.pop(request.sequences[delta.index])
        self._num_open -= len(ended)
        if deltas:
            self._publish(deltas)

    def _fulfil(self, done: "Future[Any]", action: Callable[[], Any]) -> None:
        """Resolve a future, unless it was cancelled, with what the action returns or raises."""
        if not done.set_running_or_notify_cancel():
            return
        try:
            self._check_not_failed()
            result = action()
        except Exception as error:
            done.set_exception(error)
            if isinstance(error, LostWeightsError | LostRankError):
                raise  # there is nothing left to serve with
        else:
            done.set_result(result)

    def _wake(self, engine: Engine) -> None:
        if self._sleeper is not None:
            self._sleeper.set_exception(UnavailableError("it was woken before it slept"))
            self._sleeper = None
        engine.wake()
        with self._lock:
            if self.phase is Phase.SLEEPING:
                self.phase = Phase.SERVING


def _raise(error: BaseException) -> None:
    raise error
