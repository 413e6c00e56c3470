"""AccessLog: one line of JSON for every HTTP request, once it has ended."""

import json
import logging
import time

from starlette.types import ASGIApp, Message, Receive, Scope, Send

# an exception's answer is written outside of this middleware
FAILED = 500

logger = logging.getLogger(__name__)


class AccessLog:
    """Middleware that logs method, path, status, seconds, bytes, client, and whether the answer was sent as a whole.

    The query, the headers and the body stay out of the log: they may hold keys and prompts. A streamed answer counts to
    its last byte; a client that went before that leaves is_whole false.

    Args:
        app: what answers.
    """

    def __init__(self, app: ASGIApp) -> None:
        self._app = app

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer, then log."""
        if scope["type"] != "http":
            await self._app(scope, receive, send)
            return
        began, status, num_bytes, is_whole = time.perf_counter(), 0, 0, False

        async def watch(message: Message) -> None:
            nonlocal status, num_bytes, is_whole
            await send(message)
            if message["type"] == "http.response.start":
                status = message["status"]
            elif message["type"] == "http.response.body":
                num_bytes += len(message.get("body", b""))
                is_whole = not message.get("more_body", False) and not is_gone

        is_gone = False

        async def listen() -> Message:
            nonlocal is_gone
            message = await receive()
            is_gone |= message["type"] == "http.disconnect" and not is_whole
            return message

        try:
            await self._app(scope, listen, watch)
        finally:
            client = scope.get("client")
            fields = {
                "method": scope["method"],
                "path": scope["path"],
                "status": status or FAILED,
                "seconds": round(time.perf_counter() - began, 6),
                "bytes": num_bytes,
                "client": client[0] if client else None,
                "is_whole": is_whole,
            }
            logger.info("%s", json.dumps(fields))
