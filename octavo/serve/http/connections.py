"""ClientConnection: uvicorn's HTTP connection with time limits, a cap on unfinished requests, and half-closed clients.

uvicorn itself ends idle connections (timeout_keep_alive) and bounds a request's head (h11_max_incomplete_event_size);
its limit_concurrency would let those who only hold connections lock all others out, so the oldest of them goes instead.
"""

import asyncio
from typing import Any

import h11
from uvicorn.protocols.http.h11_impl import H11Protocol

from octavo.serve.http.config import ServerConfig

# pause between two signs of life to a client that has closed its side
PROBE_S = 0.5
# a server begins one request of all that were sent before their connection's last answer, and then this long none
TURN_S = 0.01


class ClientConnection(H11Protocol):
    """One connection.

    - A request's head must come within head_timeout_s, and so must the rest of a body that is not read.
    - A client that reads nothing for write_timeout_s is cut off.
    - Of more than max_unfinished connections without a whole request the one that has waited longest is cut off.
    - Requests that were sent before their connection's last answer (pipelined) take turns with those of all others: else
      each pass of the event loop would begin one of every such connection's.
    - A client that closes its side behind a whole request gets its answer. Whether it is still there shows only when
      something is sent: until the answer begins that is "100 Continue", which HTTP/1.1 lets any client pass over.
      An HTTP/1.0 client cannot, and is taken for gone, as before.

    Attributes:
        limits: the server's.
        unfinished: its connections without a whole request, the oldest first; see protocol_of.
        next_turn: time of the event loop from which on it may begin another pipelined request.
    """

    limits: ServerConfig
    unfinished: "dict[ClientConnection, None]"
    next_turn: float

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._head_timer: asyncio.TimerHandle | None = None
        self._write_timer: asyncio.TimerHandle | None = None
        self._probe_timer: asyncio.TimerHandle | None = None
        self._turn_timer: asyncio.TimerHandle | None = None
        self._is_half_closed = False
        self._is_answered = False

    def connection_made(self, transport: asyncio.Transport) -> None:  # type: ignore[override]
        super().connection_made(transport)
        self._note_progress()

    def data_received(self, data: bytes) -> None:
        super().data_received(data)
        self._note_progress()

    def on_response_complete(self) -> None:
        self._is_answered = True
        super().on_response_complete()
        self._is_answered = False
        self.unfinished.pop(self, None)  # it waits again, and for less long than others
        if self._is_half_closed and self.cycle.response_complete and self._turn_timer is None:  # nothing is in the pipe
            self.transport.close()
        if self.transport.is_closing():
            self.bound_the_rest()
        else:
            self._note_progress()

    def handle_events(self) -> None:
        if not (self._is_answered and self.conn.trailing_data[0]):
            super().handle_events()
            return
        server = type(self)
        begins = max(server.next_turn, self.loop.time())
        server.next_turn = begins + TURN_S
        self.flow.pause_reading()
        self._turn_timer = self.loop.call_at(begins, self._take_turn)

    def _take_turn(self) -> None:
        self._turn_timer = None
        if not self.transport.is_closing():
            self.flow.resume_reading()
            super().handle_events()
            self._note_progress()

    def connection_lost(self, exc: Exception | None) -> None:
        super().connection_lost(exc)
        self.unfinished.pop(self, None)
        for timer in (self._head_timer, self._write_timer, self._probe_timer, self._turn_timer):
            if timer is not None:
                timer.cancel()

    def eof_received(self) -> bool:  # type: ignore[override]
        """Whether the connection stays open for writing."""
        if self._owes_request or self.cycle.scope["http_version"] != "1.1":
            return False
        self._is_half_closed = True
        self._probe_timer = self.loop.call_later(PROBE_S, self._probe)
        return True

    def pause_writing(self) -> None:
        super().pause_writing()
        self._expect_reader()

    def resume_writing(self) -> None:
        super().resume_writing()
        if self._write_timer is not None:
            self._write_timer.cancel()
            self._write_timer = None

    def timeout_keep_alive_handler(self) -> None:
        super().timeout_keep_alive_handler()
        self.bound_the_rest()

    def bound_the_rest(self) -> None:
        """A connection that closes waits for its client to read what is left: not for ever."""
        if self.transport.get_write_buffer_size():
            self._expect_reader()

    @property
    def _owes_request(self) -> bool:
        """The client has not sent the whole of its next request."""
        return self.cycle is None or self.cycle.response_complete or self.cycle.more_body

    def _note_progress(self) -> None:
        """Set or stop the head's timer, and keep the list of the unfinished."""
        if self.transport.is_closing():
            return
        is_heard = self.cycle is not None and not self.cycle.response_complete  # the route has its own time limit
        if is_heard or self.timeout_keep_alive_task is not None:
            if self._head_timer is not None:
                self._head_timer.cancel()
                self._head_timer = None
        elif self._head_timer is None:
            self._head_timer = self.loop.call_later(self.limits.head_timeout_s, self._end_slow_client)
        if not self._owes_request:
            self.unfinished.pop(self, None)
        elif self not in self.unfinished:
            self.unfinished[self] = None
            if len(self.unfinished) > self.limits.max_unfinished:
                next(iter(self.unfinished)).cut_off()

    def cut_off(self) -> None:
        """End the connection at once."""
        self.unfinished.pop(self, None)
        self.transport.abort()

    def _end_slow_client(self) -> None:
        if self.conn.our_state is h11.IDLE and self.conn.their_state is h11.IDLE:
            head = h11.Response(status_code=408, headers=[("Connection", "close")], reason=b"Request Timeout")
            self.transport.write(self.conn.send(head) or b"")
        self.transport.close()
        self.bound_the_rest()

    def _expect_reader(self) -> None:
        if self._write_timer is None:
            self._write_timer = self.loop.call_later(self.limits.write_timeout_s, self.transport.abort)

    def _probe(self) -> None:
        """Send what a client passes over: one that is gone refuses it, which the next one finds."""
        if self.conn.our_state is h11.SEND_RESPONSE and not self.transport.is_closing():
            self.transport.write(self.conn.send(h11.InformationalResponse(status_code=100, headers=[])) or b"")
            self._probe_timer = self.loop.call_later(PROBE_S, self._probe)


def protocol_of(limits: ServerConfig) -> type[ClientConnection]:
    """The connections of one server, for uvicorn.Config(http=...)."""
    return type("ClientConnection", (ClientConnection,), {"limits": limits, "unfinished": {}, "next_turn": 0.0})
