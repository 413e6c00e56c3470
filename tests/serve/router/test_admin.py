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
    """A replica's server, as far as /admin goes: it sleeps, wakes, and takes weights of four bytes.

    Attributes:
        asked: method and route, in order, the transaction's name left out.
        faults: of a route, the status that it answers with, or 0 where it hangs up after it has done it.
    """

    def __init__(self) -> None:
        self.is_asleep = False
        self.weights, self.version = b"old.", 0
        self.update: bytes | None = None
        self.asked: list[str] = []
        self.faults: dict[str, int] = {}

    async def serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode().lower()
        size = int(head.partition("content-length: ")[2].split()[0])
        body = await reader.readexactly(size)
        assert "authorization: bearer k" in head
        method, target = head.split()[:2]
        route = target.removeprefix("/admin/").partition("?")[0].replace(f"/{id(self)}", "/id")
        self.asked.append(f"{method} {route}")
        status, answer = self.faults.get(route, 200), dict[str, Any]()
        if status in (0, 200):
            made, answer = self.do(method, route, body)
            status = status and made
        if status:
            data = json.dumps(answer).encode()
            writer.write(b"HTTP/1.1 %d X\r\nContent-Length: %d\r\n\r\n%s" % (status, len(data), data))
        writer.close()

    def do(self, method: str, route: str, body: bytes) -> tuple[int, dict[str, Any]]:
        if route in ("sleep", "wake"):
            is_right = self.is_asleep != (route == "sleep")
            self.is_asleep = route == "sleep"
            return 200 if is_right else 503, {}
        if route in ("weight_update", "update_weights"):
            assert json.loads(body)["replace"] is True
            self.update = b"" if route == "weight_update" else json.loads(body)["path"].encode()
            return 200, {"id": str(id(self)), "received": 0}
        if self.update is None:
            return 410, {"error": "it has ended"}
        if route.endswith("/bytes"):
            self.update += body
        elif route.endswith("/verify") and len(self.update) != 4:
            return 409, {"error": "bytes are missing"}
        elif route.endswith("/commit"):
            self.weights, self.update, self.version = self.update, self.weights, self.version + 1
            self.update = self.update if json.loads(body).get("keep_old") else None
            return 200, {"weight_version": self.version}
        elif method == "delete":
            self.update = None
        return 200, {"id": str(id(self)), "received": len(self.update or b"")}


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
    return await Sender(fleet)(route)


class Sender:
    """Sends requests to one router."""

    def __init__(self, fleet: Fleet) -> None:
        self._client = Client(fleet, admin_key="k")

    async def __call__(self, route: str, data: bytes = b"{}", method: str = "POST") -> tuple[int, Any]:
        status, _, body = await self._client.answer(method, f"/admin/{route}", data, **KEY)
        return status, json.loads(body)

    async def upload(self, data: bytes) -> str:
        """Its transaction, before the commit."""
        update = (await self("weight_update", b'{"tensors": {}}'))[1]["id"]
        assert await self(f"weight_update/{update}/bytes", data) == (200, {"id": update, "received": len(data)})
        return f"weight_update/{update}"


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
            assert all(replica.is_ready for replica in fleet.replicas)

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


def test_an_update_comes_to_all_replicas_and_outdates_one_that_starts_again() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            send = Sender(fleet)
            for data, route in ((b"new1", ""), (b"new2", "update_weights")):
                if route:
                    status, body = await send(route, b'{"path": "new2", "running": "keep"}')
                else:
                    update = await send.upload(data)
                    assert (await send(update, b"", "GET"))[1]["received"] == 4
                    status, body = await send(f"{update}/commit")
                version = found[0].version
                assert (status, body["weight_version"]) == (200, version)
                assert body["replicas"] == {str(index): version for index in range(3)}
                assert all((server.weights, server.update) == (data, None) for server in found)
            assert (await send(update, b"", "GET"))[0] == 404
            fleet.replicas[1].num_restarts += 1
            fleet.replicas[1].on_start(1)
            found[1].weights = b"old."
            assert [replica.is_ready for replica in fleet.replicas] == [True, False, True]
            assert (await send("weight_update", b'{"tensors": {}, "partial": ["a"]}'))[0] == 409
            assert (await send("update_weights", b'{"path": "new3"}'))[0] == 200
            assert all(server.weights == b"new3" for server in found)
            assert all(replica.is_ready for replica in fleet.replicas)

    asyncio.run(test())


@pytest.mark.parametrize("status", [500, 0])
@pytest.mark.parametrize("step", ["", "/id/bytes", "/id/verify", "/id/commit"])
def test_where_one_fails_all_have_their_old_weights(step: str, status: int) -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            send = Sender(fleet)
            route = f"weight_update{step}"
            found[1].faults[route] = status
            answers = [await send("weight_update", b'{"tensors": {}}')]
            update = answers[0][1].get("id")
            for what in ("bytes", "commit") if update else ():
                answers.append(await send(f"weight_update/{update}/{what}", b"new." if what == "bytes" else b"{}"))
                if answers[-1][0] != 200:
                    break
            status_given, body = answers[-1]
            assert status_given == 502 and "replica 1" in body["error"]["message"]
            is_unknown = step == "/id/commit" and status == 0  # it has the new weights, and answers no more
            assert [server.weights for server in found] == [b"old.", b"new." if is_unknown else b"old.", b"old."]
            assert [replica.num_ended for replica in fleet.replicas] == [0, int(is_unknown), 0]  # type: ignore[attr-defined]
            assert [server.update for server in (found[0], found[2])] == [None, None]
            found[1].faults.clear()
            assert (await send(f"{await send.upload(b'next')}/commit"))[0] == 200
            assert all(server.weights == b"next" for server in found)

    asyncio.run(test())


def test_what_all_replicas_refuse_is_said_as_by_one_and_ends_nothing() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            send = Sender(fleet)
            update = await send.upload(b"ne")
            assert await send(f"{update}/commit") == (409, {"error": "bytes are missing"})
            assert (await send("weight_update", b'{"tensors": {}}'))[1]["error"]["code"] == "update_open"
            assert (await send(f"{update}/commit", b'{"keep_old": true}'))[0] == 400
            assert (await send(f"{update}/commit", b'{"running": "soon"}'))[0] == 400
            assert (await send("weight_update", b"[" * 100_000))[0] == 400
            await send(f"{update}/bytes", b"w.")
            assert (await send(f"{update}/commit"))[0] == 200
            gone = await send.upload(b"ab")
            assert (await send(gone, b"", "DELETE"))[0] == 200 and (await send(gone, b"", "GET"))[0] == 410
            assert all(server.update is None for server in found)
            for server in found:
                server.faults["weight_update"] = 400
            assert (await send("weight_update", b'{"tensors": 3}')) == (400, {})
            assert all(server.weights == b"new." for server in found)

    asyncio.run(test())


@pytest.mark.parametrize("field", [b'"commit": "false"', b'"commit": 0', b'"running": 1', b'"partial": "a"', b'"x": 1'])
def test_a_field_that_one_server_refuses_commits_nothing(field: bytes) -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            status, body = await Sender(fleet)("update_weights", b'{"path": "new.", %s}' % field)
            assert (status, body["error"]["param"]) == (400, field.split(b'"')[1].decode())
            assert all(server.weights == b"old." and server.update is None for server in found)

    asyncio.run(test())


def test_a_field_that_is_null_is_left_out() -> None:
    async def test() -> None:
        async with servers() as (fleet, found):
            send = Sender(fleet)
            assert (await send("update_weights", b'{"path": "new1", "running": null, "commit": null}'))[0] == 200
            update = await send.upload(b"new2")
            assert (await send(f"{update}/commit", b'{"running": null, "keep_old": false}'))[0] == 200
            assert all((server.weights, server.version) == (b"new2", 2) for server in found)

    asyncio.run(test())
