"""Proxy: an ASGI app that hands each request to a replica and passes the answer on as it comes."""

import logging
from collections.abc import AsyncIterator

from starlette.requests import ClientDisconnect
from starlette.requests import Request as ClientRequest
from starlette.types import Message, Receive, Scope, Send

from octavo.serve.engine.request import UnavailableError
from octavo.serve.http.answer import event_of, unless_disconnected
from octavo.serve.http.body import check_json, read_bytes
from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import BUSY_RETRY_S, ApiError
from octavo.serve.http.service import check_key
from octavo.serve.router.balance import weight_of
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import Replica
from octavo.serve.router.upstream import Exchange, Headers, LostReplicaError, Request, UnreachableError, exchange

# of a connection, not of what it carries; date and server are said by the router's own
_OF_A_CONNECTION = frozenset(
    (
        *(b"connection", b"keep-alive", b"transfer-encoding", b"te", b"trailer", b"upgrade", b"proxy-connection"),
        *(b"expect", b"date", b"server"),
    )
)
# said by the router alone: upstream.Exchange, and _of_its_client, for a replica believes the router
_OF_A_REQUEST = frozenset((b"content-length", b"x-forwarded-for", b"x-forwarded-proto"))
# other routes have no body, and what is sent to them is not read
_WITH_BODY = frozenset(("/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"))
# the code of a request that was not refused: it was lost with its replica
REPLICA_LOST = "replica_lost"
# what a replica answers, unbegun, that has as many sequences as it takes
_NO_ROOM = 429
_EVENT_END = b"\n\n"

logger = logging.getLogger(__name__)


class Proxy:
    """Routes by load and prefix.

    Args:
        fleet: the replicas.
        config: the keys and limits of each of them.
    """

    def __init__(self, fleet: Fleet, config: ServerConfig) -> None:
        self._fleet, self._config = fleet, config

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer a request.

        Raises:
            ApiError: before anything was sent: 401, 408, 413, 415, or 502 for a replica that ended.
            UnavailableError: no replica takes requests.
            ClientDisconnect: the client has gone, before anything was sent; what a replica did for it is ended.
        """
        client = ClientRequest(scope, receive)
        target = scope["raw_path"] + (b"?" + scope["query_string"] if scope["query_string"] else b"")
        body = b""
        if scope["method"] == "POST" and scope["path"] in _WITH_BODY:
            check_key(client, self._config.api_keys)
            check_json(client)  # a replica refuses it too, unread, and would cut the connection of a large one
            body = await read_bytes(client, self._config)
        headers = [(name, value) for name, value in _passed_on(scope["headers"]) if name not in _OF_A_REQUEST]
        request = Request(scope["method"].encode(), target, headers + _of_its_client(scope), body)
        has_begun = False

        async def send_on(message: Message) -> None:
            nonlocal has_begun
            has_begun = True
            await send(message)

        try:
            await unless_disconnected(client, self._answer(request, send_on))
        except ClientDisconnect:
            if not has_begun:
                raise

    async def _answer(self, request: Request, send: Send) -> None:
        full: Replica | None = None
        while True:  # until no replica is left: one that cannot be reached is not chosen again
            replica = self._fleet.choose(request.body, full)
            try:
                with replica.working(weight_of(request.body)):
                    async with exchange(replica.port) as sent:
                        replica.num_routed += 1
                        await sent.begin(request)
                        if sent.status == _NO_ROOM and full is None and self._fleet.has_others_than(replica):
                            full = replica  # one other alone: asking all would cost most when all are busy
                            continue
                        await _pass_on(replica, sent, send)
                return
            except UnreachableError:  # it has just ended; nothing was sent, so another one can have the request
                if replica.is_ready:  # else it is known meanwhile what became of it
                    replica.state = "silent"
            except LostReplicaError as error:
                raise _lost(replica, error) from error
            except OSError as error:
                raise UnavailableError(f"no connection to a replica can be made: {error}; try again later") from error


async def _pass_on(replica: Replica, sent: Exchange, send: Send) -> None:
    """Send an answer; what is lost of a stream that has begun ends it with an error event."""
    start = {"type": "http.response.start", "status": sent.status, "headers": _passed_on(sent.headers)}
    is_stream = any(name == b"content-type" and value.startswith(b"text/event-stream") for name, value in sent.headers)
    has_begun = False
    try:
        if is_stream:
            await send(start)
            has_begun = True
        async for part in _whole_events(sent.parts()) if is_stream else sent.parts():
            if not has_begun:
                await send(start)
                has_begun = True
            await send({"type": "http.response.body", "body": part, "more_body": True})
    except LostReplicaError as error:
        if not has_begun:
            raise
        lost = _lost(replica, error)
        if is_stream:
            last = event_of(lost.body()) + "data: [DONE]\n\n"
            await send({"type": "http.response.body", "body": last.encode()})
        return  # without a stream the connection is cut: a client must not take a part for the whole
    if not has_begun:
        await send(start)
    await send({"type": "http.response.body"})


async def _whole_events(parts: AsyncIterator[bytes]) -> AsyncIterator[bytes]:
    """The parts, cut behind events, so that an error event can follow any of them."""
    rest = bytearray()
    async for part in parts:
        searched = max(len(rest) - len(_EVENT_END) + 1, 0)
        rest += part
        if (end := rest.rfind(_EVENT_END, searched)) >= 0:
            end += len(_EVENT_END)
            yield bytes(rest[:end])
            del rest[:end]
    if rest:
        yield bytes(rest)


def _passed_on(headers: Headers) -> list[tuple[bytes, bytes]]:
    return [(name, value) for name, value in headers if name not in _OF_A_CONNECTION]


def _of_its_client(scope: Scope) -> list[tuple[bytes, bytes]]:
    """Who asks, and whether over TLS: of the connection, or of a proxy that uvicorn trusts."""
    client = [(b"x-forwarded-for", scope["client"][0].encode())] if scope.get("client") else []
    return [(b"x-forwarded-proto", scope["scheme"].encode()), *client]


def _lost(replica: Replica, error: LostReplicaError) -> ApiError:
    """What a client is told of a replica that ended; counted and logged."""
    replica.num_failures += 1
    logger.error("replica %d was lost at a request: %s", replica.index, error)
    text = f"replica {replica.index} ended while it worked on this request; send it again"
    return ApiError(502, text, code=REPLICA_LOST, headers={"Retry-After": str(BUSY_RETRY_S)})
