"""Running the app under uvicorn: the socket, signals, the drain, and the exit code."""

import asyncio
import contextlib
import gc
import logging
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator

import uvicorn
from fastapi import FastAPI

from octavo.errors import ConfigError
from octavo.serve.engine import Engine
from octavo.serve.engine.loop import EngineLoop
from octavo.serve.engine.request import Phase, UnavailableError
from octavo.serve.http.app import JOIN_S, build_app
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.connections import protocol_of
from octavo.serve.http.service import Service

# time that clients have to read what is left of their answers once the engine is done
FLUSH_S = 10
# seconds after which a thread that computes lets another one in; the engine's asks at each of a step's hundred launches
SWITCH_S = 0.001
# objects made until the garbage collector looks at them: a large step's deltas are gone by then
GC_THRESHOLD = 10_000
_TICK_S = 0.02
# time for the step under way after a second signal
HURRIED_JOIN_S = 3.0

logger = logging.getLogger(__name__)


def run_server(
    build_engine: Callable[[], Engine], config: ServerConfig, host: str = "127.0.0.1", port: int = 8000
) -> int:
    """Serve until a signal comes; then finish what was admitted.

    Meanwhile this process's garbage collector and threads are set for streams.

    Args:
        build_engine: called in a thread while the server already answers (503).
        port: 0 for any that is free.
    Returns:
        The exit code: 0 if every admitted request had its due end and all pages came back, else 1.
    Raises:
        ConfigError: the address cannot be had. Whatever build_engine raises.
    """
    listener = bind(host, port)
    announce(listener, host, config)
    return serve_at(listener, build_engine, config)


def serve_at(
    listener: socket.socket,
    build_engine: Callable[[], Engine],
    config: ServerConfig,
    *,
    ends_with_engine: bool = False,
) -> int:
    """run_server at a socket that is bound; see there.

    Args:
        ends_with_engine: end when the engine has failed, instead of saying so at /health from then on.
    """
    app = build_app(lambda: _built(build_engine), config)
    service: Service = app.state.service
    settings, loop = settings_of(app, config), service.engine.loop
    server = DrainingServer(
        settings, loop, config.drain_timeout_s, service.schemas.stop, ends_with_engine=ends_with_engine
    )
    with contextlib.closing(listener), _interpreter_restored():
        asyncio.run(server.serve(sockets=[listener]))
    if loop.error is not None and not loop.is_built:
        raise loop.error
    return _close_the_books(loop, server.was_cut_short)


def _built(build_engine: Callable[[], Engine]) -> Engine:
    """Build the engine; what is loaded with it stays, and no garbage collection need stop all threads to look at it."""
    began = time.perf_counter()
    engine = build_engine()
    gc.collect()
    gc.freeze()
    gc.set_threshold(GC_THRESHOLD, *gc.get_threshold()[1:])
    sys.setswitchinterval(SWITCH_S)
    logger.info("ready: the model was loaded in %.1f s, and requests are answered", time.perf_counter() - began)
    return engine


@contextlib.contextmanager
def _interpreter_restored() -> Iterator[None]:
    """Undo afterwards what _built sets, so that a caller that goes on gets the engine's memory back."""
    thresholds, interval, had_frozen = gc.get_threshold(), sys.getswitchinterval(), gc.get_freeze_count() > 0
    try:
        yield
    finally:
        gc.set_threshold(*thresholds)
        sys.setswitchinterval(interval)
        if not had_frozen:
            gc.unfreeze()


def announce(listener: socket.socket, host: str, config: ServerConfig) -> None:
    """Log where a server listens, and whether anybody can use it."""
    shown = f"[{host}]" if ":" in host else host
    place, names = f"http://{shown}:{listener.getsockname()[1]}", ", ".join(config.model_names)
    logger.info("listening at %s for %s; requests get 503 until the model is loaded", place, names)
    if host not in ("127.0.0.1", "::1", "localhost") and not config.api_keys:
        logger.warning("%s can be reached from other machines and no API key is set; see --api-key", host)


def settings_of(app: FastAPI, config: ServerConfig) -> uvicorn.Config:
    """uvicorn's settings for an app."""
    return uvicorn.Config(
        app,
        http=protocol_of(config),
        log_config=None,
        access_log=False,
        lifespan="on",
        ws="none",
        timeout_graceful_shutdown=FLUSH_S,
    )


def bind(host: str, port: int) -> socket.socket:
    """A listening socket's address, taken before a model is loaded for it.

    Raises:
        ConfigError: it cannot be had.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    # With the protocol named, asyncio sets TCP_NODELAY on its connections: else an answer's body waits 40 ms for the
    # client to acknowledge its head.
    listener = socket.socket(family, socket.SOCK_STREAM, socket.IPPROTO_TCP)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        listener.bind((host, port))
    except (OSError, OverflowError) as error:
        listener.close()
        raise ConfigError(f"cannot listen at {host}, port {port}: {error}; choose another host or port") from None
    return listener


class StoppableServer(uvicorn.Server):
    """A uvicorn server that SIGTERM and SIGINT end by stop()."""

    @contextlib.contextmanager
    def capture_signals(self) -> Iterator[None]:
        """uvicorn's own would close the sockets at once, and end the process by the signal."""
        tasks_loop = asyncio.get_running_loop()
        # in another thread its owner calls stop()
        is_main = threading.current_thread() is threading.main_thread()
        signals = [signal.SIGTERM, signal.SIGINT] if is_main else []
        for number in signals:
            tasks_loop.add_signal_handler(number, self.stop)
        yield
        for number in signals:
            tasks_loop.remove_signal_handler(number)

    def stop(self) -> None:
        """End; from the event loop's thread."""
        raise NotImplementedError


class DrainingServer(StoppableServer):
    """A uvicorn server that stays up while the engine finishes, and answers 503 meanwhile.

    Args:
        loop: the engine's.
        drain_timeout_s: how long it may take.
        on_drain: called when the drain begins.
        ends_with_engine: see serve_at.

    Attributes:
        was_cut_short: requests were ended before their due end.
    """

    def __init__(
        self,
        settings: uvicorn.Config,
        loop: EngineLoop,
        drain_timeout_s: float,
        on_drain: Callable[[], None] = lambda: None,
        *,
        ends_with_engine: bool = False,
    ) -> None:
        super().__init__(settings)
        self.was_cut_short = False
        self._ends_with_engine = ends_with_engine
        self._loop, self._drain_timeout_s, self._on_drain = loop, drain_timeout_s, on_drain
        self._drain: asyncio.Task[None] | None = None
        self._is_hurried = False

    def stop(self) -> None:
        """Drain, then end; called a second time, end what is unfinished. From the event loop's thread."""
        if self._drain is None:
            logger.info("finishing %d sequences; new requests are refused", self._loop.num_open)
            self._drain = asyncio.get_running_loop().create_task(self._finish())
        else:
            self.was_cut_short |= self._loop.num_open > 0
            self._is_hurried = True

    async def on_tick(self, counter: int) -> bool:
        """Whether to end: also if there will never be an engine."""
        has_failed = self._loop.phase is Phase.FAILED and not self._loop.num_open
        is_over = has_failed and (self._ends_with_engine or not self._loop.is_built)
        return await super().on_tick(counter) or is_over

    async def _finish(self) -> None:
        self._loop.drain()
        self._on_drain()
        if self._loop.is_built and not await self._has_ended(self._drain_timeout_s):
            if not self._is_hurried:
                logger.warning("%d sequences are not finished in time and are ended", self._loop.num_open)
                self.was_cut_short = True
            self._loop.abort_all()
            if not await asyncio.to_thread(self._loop.join, HURRIED_JOIN_S if self._is_hurried else JOIN_S):
                self._loop.give_up(UnavailableError("the server ends, and a step does not"), is_stuck=True)
                self._loop.engine.kill_ranks()  # a step that waits for them fails then
                await asyncio.to_thread(self._loop.join, JOIN_S)
        self.should_exit = True

    async def _has_ended(self, limit_s: float) -> bool:
        """Wait for the engine's thread; False where it has not ended in time, or another signal came."""
        deadline = time.monotonic() + limit_s
        while not self._loop.join(0):
            if self._is_hurried or time.monotonic() > deadline:
                return False
            await asyncio.sleep(_TICK_S)
        return True


def _close_the_books(loop: EngineLoop, was_cut_short: bool) -> int:
    """Say what became of all requests; the exit code."""
    num_pages = loop.engine.stats.num_kv_pages_used if loop.is_built else 0
    ends = ", ".join(f"{count} {reason}" for reason, count in loop.num_ended.items())
    logger.info(
        "%d requests admitted; sequences ended: %s; %d open; %d KV pages in use",
        loop.num_admitted,
        ends,
        loop.num_open,
        num_pages,
    )
    is_clean = not was_cut_short and loop.phase is not Phase.FAILED and loop.num_open == 0 and num_pages == 0
    return 0 if is_clean else 1
