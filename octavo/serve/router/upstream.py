"""HTTP requests to a replica's port on this host, over asyncio's streams: the proxy's, and the router's own."""

import asyncio
import contextlib
import json
import socket
import struct
from collections.abc import AsyncIterator, Sequence
from typing import NamedTuple

import h11

Headers = Sequence[tuple[bytes, bytes]]

_PART_BYTES = 64 << 10
# more than any head that octavo's server sends
_MAX_HEAD_BYTES = 64 << 10
_NO_LINGER = struct.pack("ii", 1, 0)


class UnreachableError(Exception):
    """Nothing listens there: no byte of the request was sent."""


class LostReplicaError(Exception):
    """The replica ended the connection, or what it sent is no HTTP."""


class Request(NamedTuple):
    """A request. target: path and query. headers: without length, and those of a connection."""

    method: bytes
    target: bytes
    headers: Headers = ()
    body: bytes = b""


class Reply(NamedTuple):
    """A whole answer. status: 0 where none came. body: its text, or why none came."""

    status: int
    body: bytes

    @property
    def what(self) -> str:
        """In words, behind who answered."""
        text = self.body.decode(errors="replace")
        with contextlib.suppress(ValueError, TypeError, KeyError):
            text = str(json.loads(text)["error"]["message"])
        return f"answered {self.status}: {text:.400}" if self.status else f"gave no answer: {text}"


class Exchange:
    """A request, and its answer as it comes.

    Attributes:
        status: the answer's.
        headers: the answer's.
    """

    status: int
    headers: Headers

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self._reader, self._writer = reader, writer
        self._connection = h11.Connection(h11.CLIENT, max_incomplete_event_size=_MAX_HEAD_BYTES)

    async def begin(self, request: Request) -> None:
        """Send the request and read the answer's head."""
        own = [(b"content-length", str(len(request.body)).encode()), (b"connection", b"close")]
        if all(name != b"host" for name, _ in request.headers):  # the client's, which redirects are made of
            own.append((b"host", b"127.0.0.1"))
        head = h11.Request(method=request.method, target=request.target, headers=[*request.headers, *own])
        for event in (head, h11.Data(data=request.body), h11.EndOfMessage()):
            self._writer.write(self._connection.send(event) or b"")
        with contextlib.suppress(ConnectionError):  # a refusal may come before the body is read; else the answer lacks
            await self._writer.drain()
        response = await self._next_event()
        while isinstance(response, h11.InformationalResponse):
            response = await self._next_event()
        if not isinstance(response, h11.Response):
            raise LostReplicaError("it ended the connection without an answer")
        self.status, self.headers = response.status_code, [*response.headers]

    async def parts(self) -> AsyncIterator[bytes]:
        """The body as it comes; the end without an error is the whole body's end."""
        while isinstance(event := await self._next_event(), h11.Data):
            yield bytes(event.data)

    async def _next_event(self) -> object:
        data = None
        try:
            while (event := self._connection.next_event()) is h11.NEED_DATA:
                data = await self._reader.read(_PART_BYTES)
                self._connection.receive_data(data)
        except h11.RemoteProtocolError as error:
            what = "it ended the connection within its answer" if data == b"" else f"its answer is no HTTP: {error}"
            raise LostReplicaError(what) from error
        except OSError as error:
            raise LostReplicaError(str(error)) from error
        return event


@contextlib.asynccontextmanager
async def exchange(port: int) -> AsyncIterator[Exchange]:
    """Connect, to begin a request; leaving the block resets the connection, which ends what the replica does for it.

    Raises:
        UnreachableError: no process listens there.
        LostReplicaError: within the block.
        OSError: this process has no socket left.
    """
    try:
        reader, writer = await asyncio.open_connection("127.0.0.1", port, limit=_PART_BYTES)
    except ConnectionError as error:
        raise UnreachableError(str(error)) from error
    try:
        # a close without it tells a replica nothing until it sends something
        writer.get_extra_info("socket").setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, _NO_LINGER)
        yield Exchange(reader, writer)
    finally:
        writer.transport.abort()


async def fetch(port: int, request: Request, timeout_s: float) -> tuple[int, bytes]:
    """Status and body of a whole answer.

    Raises:
        UnreachableError: no process listens there.
        LostReplicaError: no HTTP answer, or none in time.
        OSError: as exchange.
    """
    try:
        async with asyncio.timeout(timeout_s), exchange(port) as sent:
            await sent.begin(request)
            return sent.status, b"".join([part async for part in sent.parts()])
    except TimeoutError as error:
        raise LostReplicaError(f"it did not answer within {timeout_s:g} s") from error


async def ask(port: int, admin_key: str | None, request: Request, timeout_s: float) -> Reply:
    """Ask a replica for something under /admin; what goes wrong is a Reply too."""
    key = (b"authorization", f"Bearer {admin_key}".encode())
    try:
        return Reply(*await fetch(port, request._replace(headers=[*request.headers, key]), timeout_s))
    except (UnreachableError, LostReplicaError, OSError) as error:
        return Reply(0, (str(error) or type(error).__name__).encode())
