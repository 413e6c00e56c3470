"""EngineLoop: one thread that builds an engine and steps it; requests come in and tokens go out from any other thread.

Every request that is admitted gets exactly one last event for each of its sequences, whatever happens.
"""

import itertools
import logging
import queue
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from typing import Any, TypeVar

from octavo.errors import OctavoError, RequestError
from octavo.serve.engine.engine import Engine
from octavo.serve.engine.sequence import Sequence as EngineSequence
from octavo.serve.engine.ticket import BusyError, Job, Phase, Ticket, TokenEvent, UnavailableError, token_event
from octavo.weights.exchange import LostWeightsError
from octavo.weights.update import RunningPolicy, WeightUpdate

# failing steps in a row after which the engine is given up
MAX_FAILURES = 3

logger = logging.getLogger(__name__)

T = TypeVar("T")
Publish = Callable[[list[tuple[Ticket, TokenEvent]]], None]


class EngineLoop:
    """Runs an engine in a thread of its own.

    Args:
        build: makes the engine, in the thread.
        publish: takes all events of a step at once; called in the thread, must not block.
        max_queue: sequences that may wait beside the max_num_seqs that run.

    Attributes:
        phase: what it is doing. error: what the engine failed of, or None.
        num_admitted: requests taken in. num_ended: sequences ended, by finish reason.
    """

    def __init__(self, build: Callable[[], Engine], publish: Publish, *, max_queue: int) -> None:
        self._build, self._publish, self.max_queue = build, publish, max_queue
        self.phase = Phase.STARTING
        self.error: BaseException | None = None
        self.num_admitted = 0
        self.num_ended = {"stop": 0, "length": 0, "abort": 0, "error": 0}
        self._engine: Engine | None = None
        self._lock = threading.Lock()  # over phase and num_open: what is admitted before a drain is finished by it
        self._num_open = 0
        self._inbox: queue.SimpleQueue[Callable[[], None]] = queue.SimpleQueue()
        self._tickets: dict[EngineSequence, Ticket] = {}
        self._sleeper: Future[None] | None = None
        self._waiting_update: tuple[Future[int], WeightUpdate] | None = None
        self._held: list[Ticket] = []  # came while an update waited for those before them
        self._busy_since: float | None = None
        self._num_failures = 0
        self._ids = itertools.count()
        self._thread = threading.Thread(target=self._main, name="octavo-engine", daemon=True)

    @property
    def engine(self) -> Engine:
        """The engine; only to be read from.

        Raises:
            UnavailableError: it is not built.
        """
        if self._engine is None:
            raise UnavailableError(f"the server is {self.phase}; try again later")
        return self._engine

    @property
    def is_built(self) -> bool:
        """There is an engine, whatever became of it."""
        return self._engine is not None

    @property
    def capacity(self) -> int:
        """Sequences that may be open at a time."""
        return self.engine.config.max_num_seqs + self.max_queue

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

    def submit(self, jobs: Sequence[Job]) -> list[Ticket]:
        """Admit requests, all or none.

        Returns:
            One ticket a job; their events come through publish.
        Raises:
            UnavailableError: not serving. BusyError: no room. RequestError: more than there could ever be room for,
                or see Engine.check_request.
        """
        self._check_serving()
        for job in jobs:
            self.engine.check_request(job.prompt_ids, job.params)
        wanted = sum(job.params.n for job in jobs)
        if wanted > self.capacity:
            raise RequestError(f"a request may ask for {self.capacity} sequences at most here, got {wanted}; split it")
        arrived = time.perf_counter()
        with self._lock:
            self._check_serving()
            if self._num_open + wanted > self.capacity:
                raise BusyError(
                    f"{self._num_open} sequences are running or waiting and this request has {wanted}, but there is "
                    f"room for {self.capacity}; try again later"
                )
            self._num_open += wanted
            self.num_admitted += len(jobs)
            tickets = [Ticket(next(self._ids), job, job.params.n, arrived) for job in jobs]
            self._inbox.put(partial(self._admit, tickets))
        return tickets

    def abort(self, tickets: Sequence[Ticket]) -> None:
        """End what is unfinished of these requests, with "abort"; soon."""
        self._inbox.put(partial(self._end_all, tickets, "abort", None))

    def run(self, action: Callable[[Engine], T]) -> "Future[T]":
        """Do something to the engine between two steps.

        Raises:
            UnavailableError: there is no engine, or it takes no more orders.
        """
        if self.phase in (Phase.STARTING, Phase.STOPPED, Phase.FAILED):
            raise UnavailableError(f"the server is {self.phase}")
        done: Future[T] = Future()
        self._inbox.put(partial(_fulfil, done, lambda: action(self.engine)))
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
        done: Future[int] = Future()
        self.run(lambda _: self._await_idle(done, update))
        return done

    def sleep(self) -> "Future[None]":
        """Take no more requests, finish those that were admitted, then give the KV cache's memory back."""
        done: Future[None] = Future()
        with self._lock:
            self._check_serving()
            self.phase = Phase.SLEEPING
        self._inbox.put(partial(setattr, self, "_sleeper", done))
        return done

    def wake(self) -> "Future[None]":
        """Undo sleep().

        Raises:
            UnavailableError: it is not asleep.
        """
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
        self._inbox.put(lambda: self._end_all(self._all_tickets(), "abort", None))

    def join(self, timeout_s: float | None = None) -> bool:
        """Wait for the thread's end; False if it has not ended by then."""
        self._thread.join(timeout_s)
        return not self._thread.is_alive()

    def _check_serving(self) -> None:
        if self.phase is not Phase.SERVING:
            raise UnavailableError(f"the server is {self.phase} and takes no requests; try again later")

    def _main(self) -> None:
        try:
            self._engine = self._build()
            with self._lock:
                self.phase = Phase.SERVING if self.phase is Phase.STARTING else self.phase
            self._serve(self._engine)
            self.phase = Phase.STOPPED
        except BaseException as error:
            if isinstance(error, OctavoError):  # its text is for users
                logger.error("the engine failed: %s", error)
            else:
                logger.exception("the engine failed")
            with self._lock:
                self.phase, self.error = Phase.FAILED, error
            self._take_messages()
            self._emit(self._last_events(self._all_tickets(), "error", f"the engine failed: {error}"))
            if self._waiting_update is not None and self._waiting_update[0].set_running_or_notify_cancel():
                self._waiting_update[0].set_exception(UnavailableError(f"the engine failed: {error}"))

    def _serve(self, engine: Engine) -> None:
        while True:
            is_last = self.phase is Phase.DRAINING  # read first: what was admitted before that is in the inbox
            self._take_messages()
            if engine.has_unfinished:
                self._step(engine)
            elif self._waiting_update is not None:
                self._commit_waiting(*self._waiting_update)
            elif self._sleeper is not None:
                done, self._sleeper = self._sleeper, None
                _fulfil(done, engine.sleep)
            elif is_last:
                return
            elif not self._can_prepare(engine):
                self._inbox.get()()

    def _can_prepare(self, engine: Engine) -> bool:
        """Whether this idle moment was used to get ready for steps to come; not before the first request."""
        return engine.stats.num_steps > 0 and self._inbox.empty() and engine.prepare_next()

    def _take_messages(self) -> None:
        while True:
            try:
                message = self._inbox.get_nowait()
            except queue.Empty:
                return
            message()

    def _step(self, engine: Engine) -> None:
        began = self._busy_since = time.perf_counter()
        try:
            advanced = engine.step()
        except Exception as error:
            self._num_failures += 1
            if self._num_failures >= MAX_FAILURES:
                raise
            logger.exception("a step failed; its requests are given up")
            self._end_all([*self._tickets.values()], "error", f"the engine failed at a step: {error}")
            engine.abort_all()
            return
        finally:
            self._busy_since = None
        self._num_failures = 0
        self._note_started(began)
        self._emit_tokens(advanced)

    def _emit_tokens(self, advanced: Sequence[EngineSequence]) -> None:
        now = time.perf_counter()
        self._emit([(self._tickets[seq], token_event(self._tickets[seq], seq, now)) for seq in advanced])

    def _all_tickets(self) -> list[Ticket]:
        """Of every request that has not ended."""
        return [*self._tickets.values(), *self._held]

    def _commit(self, update: WeightUpdate, running: RunningPolicy) -> int:
        """Commit an update now; a bad one is refused before anything happens to the sequences that run."""
        update.verify()
        if running == "abort":
            self._end_all([*self._tickets.values()], "abort", "new weights were taken over")
        try:
            while self.engine.has_pending:
                self._emit_tokens(self.engine.collect_pending())
        except Exception as error:
            self._end_all([*self._tickets.values()], "error", f"the engine failed at a step: {error}")
            self.engine.abort_all()
            raise
        return self.engine.commit_update(update, running)

    def _await_idle(self, done: "Future[int]", update: WeightUpdate) -> None:
        """Let an update wait until nothing runs; what is found wrong with it now is said now."""
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
            _fulfil(done, lambda: self.engine.commit_update(update))
        finally:
            held, self._held = self._held, []
            self._admit(held)

    def _note_started(self, began: float) -> None:
        """Stamp the requests of which something was computed for the first time."""
        for seq, ticket in self._tickets.items():
            if ticket.started_s is None and seq.num_computed_tokens > 0:
                ticket.started_s = began

    def _admit(self, tickets: list[Ticket]) -> None:
        if self._waiting_update is not None and self.phase is not Phase.FAILED:
            self._held += tickets
            return
        for ticket in tickets:
            job = ticket.job
            try:
                if self._engine is None or self.phase is Phase.FAILED:
                    raise UnavailableError(f"the server is {self.phase}")
                ticket.request = self._engine.add_request(job.prompt_ids, job.params, job.prompt, keep_text=True)
            except Exception as error:
                self._end_all([ticket], "error", str(error))
            else:
                self._tickets |= dict.fromkeys(ticket.request.sequences, ticket)

    def _end_all(self, tickets: Sequence[Ticket], reason: str, message: str | None) -> None:
        """End what is unfinished of these requests without another token."""
        events = self._last_events(tickets, reason, message)
        self._held = [ticket for ticket in self._held if ticket not in tickets]
        for ticket in tickets:
            if ticket.request is not None:
                self.engine.abort(ticket.request)
        self._emit(events)

    def _last_events(
        self, tickets: Sequence[Ticket], reason: str, message: str | None
    ) -> list[tuple[Ticket, TokenEvent]]:
        now = time.perf_counter()
        events = []
        for ticket in dict.fromkeys(tickets):
            if ticket.request is None:
                indices = list(range(ticket.num_open))
            else:
                indices = [seq.index for seq in ticket.request.sequences if seq in self._tickets]
            events += [(ticket, TokenEvent(index, None, "", reason, message, now)) for index in indices]
        return events

    def _emit(self, events: list[tuple[Ticket, TokenEvent]]) -> None:
        """Do the books over sequences that ended, and hand the events out."""
        ended = [(ticket, event) for ticket, event in events if event.finish_reason is not None]
        for ticket, event in ended:
            assert event.finish_reason is not None, "it was chosen for that"
            ticket.num_open -= 1
            self.num_ended[event.finish_reason] += 1
            if ticket.request is not None:
                self._tickets.pop(ticket.request.sequences[event.index])
        with self._lock:
            self._num_open -= len(ended)
        if events:
            self._publish(events)

    def _wake(self, engine: Engine) -> None:
        if self._sleeper is not None:
            self._sleeper.set_exception(UnavailableError("it was woken before it slept"))
            self._sleeper = None
        engine.wake()
        with self._lock:
            if self.phase is Phase.SLEEPING:
                self.phase = Phase.SERVING


def _fulfil(done: "Future[Any]", action: Callable[[], Any]) -> None:
    """Keep a promise, unless it was taken back: what the action raises reaches whoever waits."""
    if not done.set_running_or_notify_cancel():
        return
    try:
        result = action()
    except Exception as error:
        done.set_exception(error)
        if isinstance(error, LostWeightsError):
            raise  # there is nothing left to serve with
    else:
        done.set_result(result)
