"""What a router asks of all its replicas under /admin: all do it, or none."""

import asyncio
import contextlib
from collections.abc import Iterator, Sequence

from fastapi import Request

from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import UNAVAILABLE_RETRY_S, ApiError
from octavo.serve.http.service import check_key
from octavo.serve.router import upstream
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import Replica
from octavo.serve.router.upstream import Reply

# time for what an admin route asks of a replica, beside the time that running requests take
ADMIN_S = 60.0


class Admin:
    """Asks the replicas.

    Args:
        fleet: the replicas.
        config: of the single server that they stand for, with an admin key.
    """

    def __init__(self, fleet: Fleet, config: ServerConfig) -> None:
        assert config.admin_key is not None, "the routes exist with a key alone"
        self.fleet, self.config, self._key = fleet, config, config.admin_key
        self._is_busy = False

    def check(self, request: Request) -> None:
        """Refuse a request without the admin key."""
        check_key(request, (self._key,))

    @contextlib.contextmanager
    def alone(self) -> Iterator[None]:
        """Within, no other such request is worked on.

        Raises:
            ApiError: 409 where one is.
        """
        if self._is_busy:
            raise ApiError(409, "another request to /admin is under way at the replicas; wait", code="admin_busy")
        self._is_busy = True
        try:
            yield
        finally:
            self._is_busy = False

    def all_in(self, *states: str) -> list[Replica]:
        """All replicas.

        Raises:
            ApiError: 503 where one is in none of these states.
        """
        replicas = self.fleet.replicas
        others = ", ".join(f"replica {each.index} is {each.state}" for each in replicas if each.state not in states)
        if others:
            retry = {"Retry-After": str(UNAVAILABLE_RETRY_S)}
            text = f"{others}, and this is done by all replicas or by none; try again later"
            raise ApiError(503, text, code="replica_missing", headers=retry)
        return [*replicas]

    async def ask(
        self, replicas: Sequence[Replica], *requests: upstream.Request, timeout_s: float = ADMIN_S
    ) -> list[Reply]:
        """Ask replicas at once: all the same, or each its own."""
        several = requests if len(requests) == len(replicas) else [*requests] * len(replicas)
        asking = [
            upstream.ask(replica.port, self._key, request, timeout_s)
            for replica, request in zip(replicas, several, strict=True)
        ]
        return [*await asyncio.gather(*asking)]

    async def sleep(self) -> None:
        """Put all to sleep; requests that run are finished first.

        Raises:
            ApiError: 502 where one does not; the others are awake again.
        """
        with self.alone():
            replicas = self.all_in("serving")
            answers = await self.ask(replicas, _post("sleep"), timeout_s=self.config.drain_timeout_s + ADMIN_S)
            if (error := failure(replicas, answers, "the others are awake again")) is not None:
                woken = await self.ask(replicas, _post("wake"))  # it may be about to sleep itself
                for replica, slept, awake in zip(replicas, answers, woken, strict=True):
                    if awake.status != 200 and slept.status in (0, 200):
                        replica.restart()
                raise error
            for replica in replicas:
                replica.should_sleep, replica.state = True, "asleep"

    async def wake(self) -> None:
        """Wake all.

        Raises:
            ApiError: 502 where one does not; the others sleep again.
        """
        with self.alone():
            replicas = self.all_in("asleep")
            for replica in replicas:
                replica.should_sleep = False
            answers = await self.ask(replicas, _post("wake"))
            error = failure(replicas, answers, "the others sleep again")
            if error is not None:
                for replica in replicas:
                    replica.should_sleep = True
                await self.ask(replicas, _post("sleep"), timeout_s=self.config.drain_timeout_s + ADMIN_S)
                raise error
            for replica in replicas:
                replica.state = "serving"

    async def reset_prefix_cache(self) -> None:
        """Let all that are ready forget their prompts; others begin with an empty cache.

        Raises:
            ApiError: 502 where one did not.
        """
        replicas = [replica for replica in self.fleet.replicas if replica.is_ready]
        for replica in replicas:
            self.fleet.balance.forget(replica.index)
        answers = await self.ask(replicas, _post("reset_prefix_cache"))
        if (error := failure(replicas, answers, "send it again")) is not None:
            raise error


def failure(replicas: Sequence[Replica], answers: Sequence[Reply], rest: str) -> ApiError | None:
    """502 with the first replica that did not do as it was asked, or None.

    Args:
        rest: what becomes of the others, or is to be done.
    """
    for replica, answer in zip(replicas, answers, strict=True):
        if answer.status != 200:
            code = "replica_refused" if answer.status else "replica_lost"
            return ApiError(502, f"replica {replica.index} {answer.what}; {rest}", code=code)
    return None


def _post(what: str) -> upstream.Request:
    return upstream.Request(b"POST", f"/admin/{what}".encode())
