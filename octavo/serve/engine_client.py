"""EngineClient: asyncio's face of an EngineLoop. A server submits requests and reads their deltas in its event loop."""

import asyncio
import logging
from collections.abc import AsyncIterator, Callable, Sequence

from octavo.serve.engine import Engine
from octavo.serve.engine.loop import Deltas, EngineLoop
from octavo.serve.engine.request import Delta, RequestInput, RequestState

Observe = Callable[[Deltas], None]
# deltas that are taken from a stream at once, which bounds what an answer writes at once
MAX_BATCH = 128

logger = logging.getLogger(__name__)


class DeltaStream:
    """Requests that were admitted together, and their deltas as they come."""

    def __init__(self, client: "EngineClient", requests: list[RequestState]) -> None:
        self.requests = requests
        self._client = client
        self._positions = {request: position for position, request in enumerate(requests)}
        self._deltas: list[tuple[int, Delta]] = []
        self._has_deltas = asyncio.Event()
        self._num_open = sum(request.input.params.n for request in requests)

    async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
        """(position of the request, delta), all that came since the last batch, until every sequence has ended."""
        while self._num_open:
            if not self._deltas:
                self._has_deltas.clear()
                await self._has_deltas.wait()
            taken, self._deltas = self._deltas[:MAX_BATCH], self._deltas[MAX_BATCH:]
            self._num_open -= sum([delta.finish_reason is not None for _, delta in taken])
            yield taken

    def put(self, request: RequestState, delta: Delta) -> None:
        """Take a delta in; EngineClient calls it."""
        self._deltas.append((self._positions[request], delta))
        self._has_deltas.set()

    def close(self) -> None:
        """End what is unfinished. Every stream must be closed."""
        self._client.release(self, is_finished=not self._num_open)


class EngineClient:
    """Runs an EngineLoop for the tasks of one event loop.

    Args:
        build: makes the engine, in the loop's thread.
        max_num_waiting: see EngineLoop; step_timeout_s too.
        observe: is told of every step's deltas, also of those that no client waits for any more.

    Attributes:
        loop: the EngineLoop.
    """

    def __init__(
        self, build: Callable[[], Engine], *, max_num_waiting: int, step_timeout_s: float, observe: Observe
    ) -> None:
        self.loop = EngineLoop(build, self._publish, max_num_waiting=max_num_waiting, step_timeout_s=step_timeout_s)
        self._observe = observe
        self._streams: dict[RequestState, DeltaStream] = {}
        self._tasks_loop: asyncio.AbstractEventLoop | None = None

    def start(self) -> None:
        """Start the thread; to be called from the event loop."""
        self._tasks_loop = asyncio.get_running_loop()
        self.loop.start()

    def submit(self, inputs: Sequence[RequestInput]) -> DeltaStream:
        """Admit requests, all or none; from the event loop. Errors as EngineLoop.submit."""
        stream = DeltaStream(self, self.loop.submit(inputs))
        # the deltas of these come through the event loop, after this
        self._streams |= dict.fromkeys(stream.requests, stream)
        return stream

    def release(self, stream: DeltaStream, is_finished: bool) -> None:
        """Forget a stream; DeltaStream.close calls it."""
        for request in stream.requests:
            self._streams.pop(request, None)
        if not is_finished:
            self.loop.abort(stream.requests)

    def _publish(self, deltas: Deltas) -> None:
        assert self._tasks_loop is not None, "the thread was started by start()"
        try:
            self._tasks_loop.call_soon_threadsafe(self._dispatch, deltas)
        except RuntimeError:
            logger.warning("%d deltas came after the event loop was closed", len(deltas))

    def _dispatch(self, deltas: Deltas) -> None:
        self._observe(deltas)
        for request, delta in deltas:
            if stream := self._streams.get(request):
                stream.put(request, delta)
