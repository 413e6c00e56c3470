"""EngineDriver: the one caller of Engine.step, for LLM, reinforcement learning and a server's EngineLoop.

It has no thread of its own: its caller steps the engine, one caller at a time. Requests that it is asked to run
are admitted, stepped to their end and dropped if that fails; a server, whose requests come and go, steps it alone.
"""

import contextlib
import threading
from collections.abc import Callable, Generator, Iterator, Sequence

import torch

from octavo.serve.engine.engine import Engine
from octavo.serve.engine.request import RequestInput, RequestState
from octavo.serve.engine.sequence import Sequence as EngineSequence

Advanced = list[EngineSequence]


class ClosedError(Exception):
    """The driver was closed by another thread: the caller's requests were dropped."""


class EngineDriver:
    """Steps an engine.

    Args:
        stream: that the steps are launched on; None for the caller's.

    Attributes:
        num_restarted: requests that run() dropped and began again.
    """

    def __init__(self, engine: Engine, stream: "torch.cuda.Stream | None" = None) -> None:
        self.engine = engine
        self.num_restarted = 0
        self._stream = stream
        self._turn = threading.Condition(threading.RLock())
        self._num_wanting = 0  # callers of exclusive that wait for the engine to be between two steps
        self._is_closed = False

    def step(self) -> Advanced:
        """Engine.step, when no other thread wants the engine; none where another one has done all that was left."""
        with self._own_turn():
            return self.engine.step() if self.engine.has_unfinished else []

    def drain(self) -> None:
        """Step until nothing is left, also of what other callers asked for."""
        while self.engine.has_unfinished:
            self.step()

    def run(
        self,
        inputs: Sequence[RequestInput],
        on_step: Callable[[Advanced], None] = lambda advanced: None,
        *,
        restart_aborted: bool = False,
    ) -> list[RequestState]:
        """Admit requests and step until all of them have ended.

        Args:
            on_step: is told which sequences each step advanced.
            restart_aborted: begin a request again of which another thread's weight update ended a sample.
        Raises:
            ClosedError: the driver was closed. What a step raises comes too; then the requests were dropped.
        """
        requests: list[RequestState] = []
        try:
            with self._own_turn():
                requests += [self.engine.admit(RequestState(given)) for given in inputs]
            while True:
                with self._own_turn():
                    if restart_aborted:
                        self._restart(requests)
                    if all(request.is_finished for request in requests):
                        return requests
                    advanced = self.engine.step()
                on_step(advanced)
        finally:
            self._abort(requests)

    def stream(self, given: RequestInput) -> Generator[RequestState]:
        """Run one request and yield its state after each token; one that is closed early ends the request."""
        num_shown, is_whole = 0, False
        with self._own_turn():
            request = self.engine.admit(RequestState(given), keep_text=True)
        try:
            while not is_whole:
                if not request.is_finished and num_shown == request.num_output_tokens:
                    self.step()
                # the end is shown once, also without a token: max_tokens=0, or a weight update that aborts
                if request.is_finished or num_shown < request.num_output_tokens:
                    num_shown, is_whole = request.num_output_tokens, request.is_finished
                    yield request
        finally:
            self._abort([request])

    @contextlib.contextmanager
    def exclusive(self) -> Iterator[None]:
        """Within, the engine is between two steps and takes none; other threads' callers wait."""
        self._num_wanting += 1
        with self._turn:
            self._num_wanting -= 1
            if self._stream is not None:  # what it launched reads what is about to change
                torch.cuda.current_stream(self._stream.device).wait_stream(self._stream)
            try:
                yield
            finally:
                if self._stream is not None:
                    self._stream.wait_stream(torch.cuda.current_stream(self._stream.device))
                self._turn.notify_all()

    def close(self) -> None:
        """End what is being run: the thread that runs it gets a ClosedError."""
        self._is_closed = True

    @contextlib.contextmanager
    def _own_turn(self) -> Iterator[None]:
        """One step's turn: callers of exclusive come first."""
        with self._turn:
            if self._num_wanting:
                self._turn.wait_for(lambda: not self._num_wanting, timeout=0.1)
            if self._is_closed:
                raise ClosedError
            if self._stream is None:
                yield
            else:
                with torch.cuda.stream(self._stream):
                    yield

    def _restart(self, requests: list[RequestState]) -> None:
        for i, request in enumerate(requests):
            if any(seq.finish_reason == "abort" for seq in request.sequences):
                self.engine.abort(request)
                requests[i] = self.engine.admit(RequestState(request.input))
                self.num_restarted += 1

    def _abort(self, requests: list[RequestState]) -> None:
        with self._turn:
            for request in requests:
                self.engine.abort(request)
