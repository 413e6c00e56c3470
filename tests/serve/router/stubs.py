"""Replicas that are a few lines of asyncio, and a client that speaks ASGI to the router's app."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

from octavo.serve.http.config import ServerConfig
from octavo.serve.router.app import build_router_app
from octavo.serve.router.balance import Balance
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import Replica

Answer = Callable[[asyncio.StreamReader, asyncio.StreamWriter], Awaitable[None]]

STREAM = b"HTTP/1.1 200 OK\r\nContent-Type: text/event-stream\r\nTransfer-Encoding: chunked\r\n\r\n"
EVENT = b'data: {"n":1}\n\n'


def build_nothing() -> None:
    """For replicas that are never started."""


def chunk(data: bytes) -> bytes:
    return b"%x\r\n%s\r\n" % (len(data), data)


def whole(status: int, content: object) -> Answer:
    """Answers with JSON."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        body = json.dumps(content).encode()
        writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(body), body))

    return answer


def raw(*data: bytes) -> Answer:
    """Sends this and hangs up."""

    async def answer(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"".join(data))

    return answer


@asynccontextmanager
async def listening(answer: Answer) -> AsyncIterator[int]:
    """A port whose connections are answered once their request's head is there, and then closed."""

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        try:
            await reader.readuntil(b"\r\n\r\n")
            await answer(reader, writer)
            await writer.drain()
        finally:
            writer.close()

    server = await asyncio.start_server(serve, "127.0.0.1", 0)
    async with server:
        yield server.sockets[0].getsockname()[1]


def replica_at(port: int, index: int = 0) -> Replica:
    replica = Replica(index, (build_nothing, ServerConfig(("m",))))
    replica.port, replica.state = port, "serving"
    return replica


@asynccontextmanager
async def fleet_of(*answers: Answer | None) -> AsyncIterator[Fleet]:
    """Replicas that are ready; None for one that has just ended."""
    async with AsyncExitStack() as stack:
        replicas = []
        for index, answer in enumerate(answers):
            async with listening(whole(200, {})) as port:
                pass
            if answer is not None:
                port = await stack.enter_async_context(listening(answer))
            replicas.append(replica_at(port, index))
        yield Fleet(replicas, Balance(len(replicas)))


class Client:
    """One request to a router's app.

    Attributes:
        messages: what was sent to it so far.
        may_go_on: cleared, it reads nothing more.
        has_gone: set, it disconnects.
        num_read: how often the app asked for more of the request.
    """

    def __init__(self, fleet: Fleet, **config: Any) -> None:
        self._app = build_router_app(fleet, ServerConfig(("m",), **config))
        self.messages: asyncio.Queue[Any] = asyncio.Queue()
        self.may_go_on, self.has_gone = asyncio.Event(), asyncio.Event()
        self.may_go_on.set()
        self.num_read = 0

    async def request(
        self, method: str = "POST", path: str = "/v1/completions", body: bytes = b'{"prompt": "a"}', **headers: str
    ) -> None:
        """Until the app returns."""
        headers = {"content_type": "application/json", **headers}
        lines = [(name.replace("_", "-").encode(), value.encode()) for name, value in headers.items()]
        scope = {"type": "http", "method": method, "path": path, "raw_path": path.encode(), "query_string": b""}
        scope |= {"headers": lines, "http_version": "1.1", "scheme": "http", "root_path": "", "client": ("1.2.3.4", 5)}
        bodies = [body]

        async def receive() -> dict[str, Any]:
            self.num_read += 1
            if bodies:
                return {"type": "http.request", "body": bodies.pop()}
            await self.has_gone.wait()
            return {"type": "http.disconnect"}

        async def send(message: Any) -> None:
            await self.may_go_on.wait()
            self.messages.put_nowait(message)

        await self._app(scope, receive, send)

    async def answer(self, *arguments: Any, **named: Any) -> tuple[int, dict[str, str], bytes]:
        """Status, headers and body of an answer that must be whole."""
        await self.request(*arguments, **named)
        start, *bodies = [self.messages.get_nowait() for _ in range(self.messages.qsize())]
        assert not bodies[-1].get("more_body", False)
        headers = {name.decode(): value.decode() for name, value in start["headers"]}
        return start["status"], headers, b"".join(each.get("body", b"") for each in bodies)
