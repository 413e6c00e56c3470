"""AsyncEngine: asyncio's face of an EngineLoop. A server submits jobs and reads their events from the event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.serve.engine import Engine
from octavo.serve.engine.loop import EngineLoop
from octavo.serve.engine.ticket import Job, Ticket, TokenEvent

Observe = Callable[[Ticket, TokenEvent], None]
Events = list[tuple[Ticket, TokenEvent]]

logger = logging.getLogger(__name__)


class Generation:
    """Jobs that were admitted together, and their events as they come."""

    def __init__(self, engine: "AsyncEngine", tickets: list[Ticket]) -> None:
        self.tickets = tickets
        self._engine = engine
        self._positions = {ticket: position for position, ticket in enumerate(tickets)}
        self._events: asyncio.Queue[tuple[Ticket, TokenEvent]] = asyncio.Queue()
        self._num_open = sum(ticket.job.params.n for ticket in tickets)

    async def events(self) -> AsyncIterator[tuple[int, TokenEvent]]:
        """(position of the job, event) until every sequence has ended."""
        while self._num_open:
            ticket, event = await self._events.get()
            self._num_open -= event.finish_reason is not None
            yield self._positions[ticket], event

    def put(self, ticket: Ticket, event: TokenEvent) -> None:
        """Take an event in; AsyncEngine calls it."""
        self._events.put_nowait((ticket, event))

    def close(self) -> None:
        """End what is unfinished. Every generation must be closed."""
        self._engine.release(self, is_finished=not self._num_open)


class AsyncEngine:
    """Runs an EngineLoop for the tasks of one event loop.

    Args:
        build: makes the engine, in the loop's thread.
        max_queue: see EngineLoop.
        observe: is told of every event, also of those that nobody waits for any more.

    Attributes:
        loop: the EngineLoop.
    """

    def __init__(self, build: Callable[[], Engine], *, max_queue: int, observe: Observe) -> None:
        self.loop = EngineLoop(build, self._publish, max_queue=max_queue)
        self._observe = observe
        self._generations: dict[Ticket, Generation] = {}
        self._tasks_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; to be called from the event loop."""
        self._tasks_loop = asyncio.get_running_loop()
        self.loop.start()

    def submit(self, jobs: Sequence[Job]) -> Generation:
        """Admit jobs, all or none; from the event loop. Raises: see EngineLoop.submit."""
        generation = Generation(self, self.loop.submit(jobs))
        # the events of these come through the event loop, after this
        self._generations |= dict.fromkeys(generation.tickets, generation)
        return generation

    def release(self, generation: Generation, is_finished: bool) -> None:
        """Forget a generation; Generation.close calls it."""
        for ticket in generation.tickets:
            self._generations.pop(ticket, None)
        if not is_finished:
            self.loop.abort(generation.tickets)

    def _publish(self, events: Events) -> None:
        assert self._tasks_loop is not None, "the thread was started by start()"
        try:
            self._tasks_loop.call_soon_threadsafe(self._dispatch, events)
        except RuntimeError:
            logger.warning("%d events came after the event loop was closed", len(events))

    def _dispatch(self, events: Events) -> None:
        for ticket, event in events:
            self._observe(ticket, event)
            if generation := self._generations.get(ticket):
                generation.put(ticket, event)
