"""Pipelined requests: each connection's in their order, and those of all connections one at a time."""

import asyncio
import itertools
import re
import selectors
from collections.abc import Callable
from typing import Any

import pytest
import uvicorn
from uvicorn.server import ServerState

from octavo.serve.http.config import ServerConfig
from octavo.serve.http.connections import ClientConnection, protocol_of


class Pipe(asyncio.Transport):
    """A connection's end without a socket: it takes all that is written."""

    def __init__(self, connection: ClientConnection) -> None:
        super().__init__()
        self.connection, self.written = connection, b""
        self.is_paused = self._is_closing = False
        connection.connection_made(self)

    def write(self, data: Any) -> None:
        self.written += data

    def close(self) -> None:
        if not self._is_closing:
            self._is_closing = True
            asyncio.get_running_loop().call_soon(self.connection.connection_lost, None)

    abort = close

    def is_closing(self) -> bool:
        return self._is_closing

    def pause_reading(self) -> None:
        self.is_paused = True

    def resume_reading(self) -> None:
        self.is_paused = False

    def get_write_buffer_size(self) -> int:
        return 0


class Scene:
    """A server of one class of connections, whose app notes what it begins, and when."""

    def __init__(self) -> None:
        self.begun: list[str] = []
        self.times: list[float] = []
        self._config = uvicorn.Config(
            self._app,
            http=protocol_of(ServerConfig(("tiny",))),
            interface="asgi3",
            timeout_keep_alive=3600,
            log_config=None,
            access_log=False,
        )
        self._config.load()
        self._state = ServerState()

    async def _app(self, scope: Any, receive: Any, send: Any) -> None:
        self.begun.append(scope["path"][1:])
        self.times.append(asyncio.get_running_loop().time())
        await send({"type": "http.response.start", "status": 200, "headers": [(b"content-length", b"2")]})
        await send({"type": "http.response.body", "body": scope["path"][1:].encode()})

    def pipe(self, *paths: str, rest: bytes = b"") -> Pipe:
        """A connection that sends requests, and a piece of another one, all at once."""
        make: Any = self._config.http_protocol_class
        pipe = Pipe(make(config=self._config, server_state=self._state, app_state={}))
        pipe.connection.data_received(b"".join(request(path) for path in paths) + rest)
        return pipe

    async def wait_until(self, condition: Callable[[], object]) -> None:
        for _ in range(10_000):
            if condition():
                return
            await asyncio.sleep(0.001)
        raise AssertionError(f"it did not come about; begun: {self.begun}")


def request(path: str) -> bytes:
    return f"GET /{path} HTTP/1.1\r\nHost: a\r\n\r\n".encode()


class Clock(selectors.DefaultSelector):
    """What a loop waits by: it does not, and its time goes on by as much, so that a busy CPU delays no turn."""

    now = 0.0

    def select(self, timeout: float | None = None) -> Any:
        self.now += timeout or 0.0
        return super().select(timeout if timeout is None else 0)


def loop_without_waiting() -> asyncio.SelectorEventLoop:
    clock = Clock()
    loop = asyncio.SelectorEventLoop(clock)
    loop.time = lambda: clock.now  # type: ignore[method-assign]
    return loop


async def passes(count: int) -> None:
    """Passes of the event loop, in which whatever may begin does."""
    for _ in range(count):
        await asyncio.sleep(0)


def test_one_pipelined_request_begins_at_a_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.connections.TURN_S", 3600.0)

    async def play() -> None:
        scene = Scene()
        pipes = [scene.pipe(f"{name}1", f"{name}2", f"{name}3") for name in "abc"]
        await passes(100)
        assert scene.begun == ["a1", "b1", "c1", "a2"]
        assert [pipe.is_paused for pipe in pipes] == [True] * 3  # a pipe's length is bounded
        scene.pipe("d1")  # who sends one request does not wait
        await passes(100)
        assert scene.begun == ["a1", "b1", "c1", "a2", "d1"]

    asyncio.run(play())


def test_all_pipelined_requests_are_answered_in_turns(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.connections.TURN_S", 0.01)

    async def play() -> None:
        scene = Scene()
        pipes = {name: scene.pipe(f"{name}1", f"{name}2", f"{name}3", rest=request(f"{name}4")[:9]) for name in "abc"}
        await scene.wait_until(lambda: len(scene.begun) == 9 and not any(pipe.is_paused for pipe in pipes.values()))
        assert scene.begun == ["a1", "b1", "c1", "a2", "b2", "c2", "a3", "b3", "c3"]
        assert min(after - before for before, after in itertools.pairwise(scene.times[3:])) > 0.009
        for name, pipe in pipes.items():
            assert re.findall(rb"\r\n\r\n(..)", pipe.written) == [f"{name}{i}".encode() for i in (1, 2, 3)]
            pipe.connection.data_received(request(f"{name}4")[9:])
        await passes(10)
        assert scene.begun[9:] == ["a4", "b4", "c4"]  # whose end came behind the last answer: as any other's

    with asyncio.Runner(loop_factory=loop_without_waiting) as runner:
        runner.run(play())


def test_lost_connections_take_no_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.connections.TURN_S", 0.5)

    async def play() -> None:
        scene = Scene()
        scene.pipe("a1", "a2")
        lost = [scene.pipe("b1", "b2") for _ in range(100)]
        scene.pipe("c1", "c2")
        await passes(10)
        for pipe in lost:
            pipe.close()
        await scene.wait_until(lambda: "c2" in scene.begun)  # or it would take 50 s
        assert "b2" not in scene.begun

    asyncio.run(play())


@pytest.mark.parametrize("num_before", [0, 1])
def test_half_a_request_behind_a_half_close_ends_the_connection(num_before: int) -> None:
    """Whether it has its turn at once or waits for it behind another connection."""

    async def play() -> None:
        scene = Scene()
        for _ in range(num_before):
            scene.pipe("a1", "a2")
        pipe = scene.pipe("b1", "b2", rest=b"GET /b3 HT")
        assert pipe.connection.eof_received()
        await scene.wait_until(lambda: "b2" in scene.begun and pipe.is_closing())
        assert b"b1" in pipe.written and pipe.written.endswith(b"b2")

    asyncio.run(play())
