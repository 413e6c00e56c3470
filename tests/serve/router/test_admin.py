"""What the router asks of all replicas under /admin: all do it or none, whatever becomes of one meanwhile."""

import asyncio
import json
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager
from typing import Any

import pytest

from octavo.serve.http.config import ServerConfig
from octavo.serve.http.errors import ApiError
from octavo.serve.router.admin import Admin
from octavo.serve.router.balance import Balance
from octavo.serve.router.fleet import Fleet
from octavo.serve.router.replica import Replica
from tests.serve.router.stubs import Client, build_nothing

KEY = {"authorization": "Bearer k"}


class Server:
    """A replica's server, as far as /admin goes: it sleeps and wakes.

    Attributes:
        asked: the routes, in order.
        faults: of a route, the status that it answers with, or 0 where it hangs up after it has done it.
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self.asked: list[str] = []
        self.faults: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        route = head.split()[1].removeprefix("/admin/")
        assert "authorization: bearer k" in head.lower()
        self.asked.append(route)
        status = self.faults.get(route, 200)
        if status in (0, 200):
            is_right = self.is_asleep != (route == "sleep")
            status, self.is_asleep = (status if is_right else 503), route == "sleep"
        if status:
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: 2\r\n\r\n{}" % status)
        writer.close()


class FakeReplica(Replica):
    """Without a process."""

    num_ended = 0

    def restart(self) -> None:
        self.num_ended += 1


@asynccontextmanager
async def servers(count: int = 3) -> AsyncIterator[tuple[Fleet, list[Server]]]:
    found = [Server() for _ in range(count)]
    async with AsyncExitStack() as stack:
        replicas = []
        for index, server in enumerate(found):
            listener = await stack.enter_async_context(await asyncio.start_server(server.serve, "127.0.0.1", 0))
            replica = FakeReplica(index, (build_nothing, ServerConfig(("m",), admin_key="k")))
            replica.port, replica.state = listener.sockets[0].getsockname()[1], "serving"
            replicas.append(replica)
        yield Fleet(replicas, Balance(count)), found


async def post(fleet: Fleet, route: str) -> tuple[int, Any]:
    status, _, body = await Client(fleet, admin_key="k").answer("POST", f"/admin/{route}", **KEY)
    return status, json.loads(body)


def test_all_sleep_and_wake_and_none_takes_requests_meanwhile() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            assert await post(fleet, "sleep") == (200, {"status": "asleep"})
            assert all(server.is_asleep for server in found)
            assert (await Client(fleet).answer())[0] == 503
            fleet.replicas[1].state = "serving"  # a process that has started again does not know of it
            assert not fleet.is_ready
            assert (await post(fleet, "wake"))[0] == 503  # it is put to sleep first
            found[1].is_asleep = False
            await fleet.replicas[1]._sleep_again()
            assert found[1].is_asleep and fleet.replicas[1].state == "asleep"
            assert await post(fleet, "wake") == (200, {"status": "serving"})
            assert not any(server.is_asleep for server in found)
            assert not any(replica.should_sleep for replica in fleet.replicas)

    asyncio.run(test())


@pytest.mark.parametrize("status", [500, 0])
def test_where_one_does_not_sleep_all_are_awake(status: int) -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            found[1].faults["sleep"] = status
            answer, body = await post(fleet, "sleep")
            what = "answered 500" if status else "gave no answer"
            assert answer == 502 and f"replica 1 {what}" in body["error"]["message"]
            assert not any(server.is_asleep for server in found) and fleet.is_ready
            assert all(not replica.should_sleep and replica.num_ended == 0 for replica in fleet.replicas)  # type: ignore[attr-defined]
            found[2].faults["wake"] = 500  # one that cannot be brought back is started again
            assert (await post(fleet, "sleep"))[0] == 502
            assert [replica.num_ended for replica in fleet.replicas] == [0, 0, 1]  # type: ignore[attr-defined]

    asyncio.run(test())


def test_where_one_does_not_wake_all_sleep() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            await post(fleet, "sleep")
            found[0].faults["wake"] = 500
            answer, body = await post(fleet, "wake")
            assert answer == 502 and "replica 0 answered 500: {}; the others sleep again" in body["error"]["message"]
            assert all(server.is_asleep for server in found)
            assert all(replica.should_sleep and replica.state == "asleep" for replica in fleet.replicas)

    asyncio.run(test())


def test_nothing_is_asked_while_one_is_missing_or_another_request_is_under_way() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            fleet.replicas[2].state = "starting"
            answer, body = await post(fleet, "sleep")
            assert answer == 503 and "replica 2 is starting" in body["error"]["message"]
            assert not any(server.asked for server in found)
            fleet.replicas[2].state = "serving"
            admin = Admin(fleet, ServerConfig(("m",), admin_key="k"))
            first, second = await asyncio.gather(admin.sleep(), admin.sleep(), return_exceptions=True)
            assert first is None and isinstance(second, ApiError) and second.status == 409

    asyncio.run(test())
