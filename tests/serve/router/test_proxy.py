"""What a client gets of a replica's answer, and of a replica that ends."""

import asyncio
import contextlib
import json
from collections.abc import Coroutine
from typing import Any

import httpx
import pytest

from octavo.serve.http.errors import BUSY_RETRY_S
from octavo.serve.router import upstream
from octavo.serve.router.balance import Balance
from octavo.serve.router.fleet import Fleet
from tests.serve.http.running import running
from tests.serve.router.stubs import EVENT, STREAM, Answer, Client, chunk, fleet_of, raw, replica_at, whole

LOST = "replica 0 ended while it worked on this request; send it again"


def run(test: Coroutine[Any, Any, None]) -> None:
    async def within_a_time() -> None:
        async with asyncio.timeout(20):
            await test

    asyncio.run(within_a_time())


def test_an_answer_comes_as_the_replica_gave_it() -> None:
    head = b"HTTP/1.1 429 X\r\nRetry-After: 7\r\nDate: now\r\nKeep-Alive: 5\r\nContent-Length: 2\r\n\r\n{}"

    async def test() -> None:
        async with fleet_of(raw(b"HTTP/1.1 100 Continue\r\n\r\n", head)) as fleet:
            answer = await Client(fleet).answer()
            assert answer == (429, {"retry-after": "7", "content-length": "2"}, b"{}")
            assert [fleet.replicas[0].num_routed, fleet.num_in_flight, fleet.replicas[0].load] == [1, 0, 0]

    run(test())


def test_what_the_replica_gets() -> None:
    seen: list[dict[bytes, bytes]] = []

    async def keep(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        _, *lines = (await reader.readuntil(b"\r\n\r\n")).removesuffix(b"\r\n\r\n").split(b"\r\n")
        seen.append(dict(line.lower().split(b": ") for line in lines) | {b"body": await reader.readexactly(15)})
        await whole(200, {})(reader, writer)
        writer.close()

    async def test() -> None:
        async with await asyncio.start_server(keep, "127.0.0.1", 0) as server:
            fleet = Fleet([replica_at(server.sockets[0].getsockname()[1])], Balance(1))
            sent = {"authorization": "bearer k", "te": "trailers", "content_length": "99"}
            forged = {"x_forwarded_for": "6.6.6.6", "x_forwarded_proto": "https"}
            for own, host in (({"host": "me:80"}, b"me:80"), ({}, b"127.0.0.1")):
                await Client(fleet).answer(**sent, **forged, **own)
                assert seen.pop() == {
                    b"content-type": b"application/json",
                    b"authorization": b"bearer k",
                    b"x-forwarded-proto": b"http",
                    b"x-forwarded-for": b"1.2.3.4",  # of the connection to the router
                    b"host": host,
                    b"content-length": b"15",
                    b"connection": b"close",
                    b"body": b'{"prompt": "a"}',
                }

    run(test())


def test_redirects_and_wrong_methods_are_those_of_a_single_server() -> None:
    async def ask(port: int, path: str) -> tuple[int, dict[str, str], bytes]:
        return await Client(Fleet([replica_at(port)], Balance(1))).answer("POST", path, host="octavo.example:8000")

    with running() as server:
        port = httpx.URL(server.url).port or 0
        status, headers, _ = asyncio.run(ask(port, "/v1/completions/"))
        assert (status, headers["location"]) == (307, "http://octavo.example:8000/v1/completions")
        for path in ("/health", "/v1/models"):  # the router's own route, and the replica's
            status, headers, body = asyncio.run(ask(port, path))
            assert (status, headers["allow"], json.loads(body)["error"]["param"]) == (405, "GET", None)


def test_a_target_that_is_no_path_is_an_error_in_the_shape_of_all_others() -> None:
    async def test() -> None:
        async with fleet_of(whole(200, {})) as fleet:
            for target in ("*", "http://host/health"):
                status, _, body = await Client(fleet).answer("GET", target)
                assert status == 404 and json.loads(body)["error"]["type"] == "not_found_error"

    run(test())


def test_events_are_passed_on_as_they_come() -> None:
    gate = asyncio.Event()

    async def stream(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(EVENT[:5]) + chunk(EVENT[5:] + b"data: 2"))
        await gate.wait()
        writer.write(chunk(b"\n\n") + chunk(b""))

    async def test() -> None:
        async with fleet_of(stream) as fleet:
            client = Client(fleet)
            asking = asyncio.create_task(client.request())
            assert (await client.messages.get())["status"] == 200
            assert (await client.messages.get())["body"] == EVENT
            assert fleet.num_in_flight == 1
            gate.set()
            assert (await client.messages.get())["body"] == b"data: 2\n\n"
            assert not (await client.messages.get()).get("more_body")
            await asking

    run(test())


@pytest.mark.parametrize(
    ("sent", "passed_on"),
    [([], b""), ([chunk(EVENT)], EVENT), ([chunk(EVENT), chunk(EVENT[:6])], EVENT), ([b"no chunk\r\n"], b"")],
    ids=["nothing", "one", "one and a half", "no HTTP"],
)
def test_a_stream_that_is_lost_ends_with_an_error_event(sent: list[bytes], passed_on: bytes) -> None:
    async def test() -> None:
        async with fleet_of(raw(STREAM, *sent)) as fleet:
            status, _, body = await Client(fleet).answer()
            assert status == 200 and body.startswith(passed_on + b'data: {"error":')
            error, done, end = body.removeprefix(passed_on).split(b"\n\n")
            assert (done, end) == (b"data: [DONE]", b"")
            content = json.loads(error.removeprefix(b"data: "))["error"]
            assert content == {"message": LOST, "type": "server_error", "param": None, "code": "replica_lost"}
            assert fleet.replicas[0].num_failures == 1 and fleet.num_in_flight == 0

    run(test())


@pytest.mark.parametrize(
    ("answer", "why"),
    [
        (raw(), "it ended the connection"),
        (raw(b"SSH-2.0-x\r\n\r\n"), "its answer is no HTTP"),
        (raw(b"HTTP/1.1 200 OK\r\n"), "it ended the connection within its answer"),
        (raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n"), "it ended the connection within its answer"),
    ],
    ids=["nothing", "no HTTP", "half a head", "a head"],
)
def test_an_answer_that_is_lost_is_a_502(answer: Answer, why: str, caplog: pytest.LogCaptureFixture) -> None:
    async def test() -> None:
        async with fleet_of(answer, whole(200, {})) as fleet:
            fleet.replicas[1].load = 1.0
            status, headers, body = await Client(fleet).answer()
            assert (status, json.loads(body)["error"]["message"]) == (502, LOST)
            assert headers["retry-after"] == str(BUSY_RETRY_S)
            # it may have begun, so no other one does it
            assert [replica.num_routed for replica in fleet.replicas] == [1, 0]
            assert fleet.replicas[0].num_failures == 1
            assert f"replica 0 was lost at a request: {why}" in caplog.text
            fleet.replicas[0].state = "ended"
            lines = (await Client(fleet).answer("GET", "/metrics"))[2].decode().splitlines()
            assert 'octavo:router_requests_lost_total{worker="0"} 1.0' in lines
            assert not any(line.startswith("octavo:router_requests_refused_total{") for line in lines)

    run(test())


@pytest.mark.parametrize("is_stream", [True, False])
def test_an_error_that_the_replica_said_itself_is_passed_on_and_not_counted_as_lost(is_stream: bool) -> None:
    said = {"error": {"message": "a rank was lost", "type": "server_error", "param": None, "code": "engine_failed"}}
    last = b"data: " + json.dumps(said).encode() + b"\n\ndata: [DONE]\n\n"
    stream = raw(STREAM, chunk(EVENT), chunk(last), chunk(b""))

    async def test() -> None:
        async with fleet_of(stream if is_stream else whole(503, said)) as fleet:
            status, _, body = await Client(fleet).answer()
            assert (status, body) == ((200, EVENT + last) if is_stream else (503, json.dumps(said).encode()))
            fleet.replicas[0].state = "ended"
            lines = (await Client(fleet).answer("GET", "/metrics"))[2].decode().splitlines()
            assert 'octavo:router_requests_lost_total{worker="0"} 0.0' in lines

    run(test())


def test_half_a_whole_answer_is_never_ended_as_if_it_were_whole() -> None:
    async def test() -> None:
        async with fleet_of(raw(b"HTTP/1.1 200 OK\r\nContent-Length: 9\r\n\r\n{")) as fleet:
            client = Client(fleet)
            await client.request()
            messages = [client.messages.get_nowait() for _ in range(client.messages.qsize())]
            assert [message.get("more_body") for message in messages] == [None, True]

    run(test())


def test_a_request_that_reached_no_replica_goes_to_another_replica() -> None:
    async def test() -> None:
        async with fleet_of(None, whole(200, {"from": 1})) as fleet:
            assert (await Client(fleet).answer())[2] == b'{"from": 1}'
            assert [replica.is_ready for replica in fleet.replicas] == [False, True]
            assert [replica.num_routed for replica in fleet.replicas] == [0, 1]
        async with fleet_of(None, None) as fleet:
            status, headers, body = await Client(fleet).answer()
            assert status == 503 and "retry-after" in headers
            assert "no replica takes requests (0 is silent, 1 is silent)" in json.loads(body)["error"]["message"]

    run(test())


@pytest.mark.parametrize(("statuses", "asked"), [((429, 200), [1, 1]), ((429, 429, 200), [1, 1, 0]), ((429,), [1])])
def test_where_one_replica_has_no_room_one_other_is_asked(statuses: tuple[int, ...], asked: list[int]) -> None:
    async def test() -> None:
        async with fleet_of(*(whole(status, {"from": status}) for status in statuses)) as fleet:
            status, _, body = await Client(fleet).answer()
            last = statuses[sum(asked) - 1]
            assert (status, json.loads(body)) == (last, {"from": last})
            assert [replica.num_routed for replica in fleet.replicas] == asked
            assert fleet.num_in_flight == 0

    run(test())


def test_a_replica_that_ended_meanwhile_is_not_called_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    async def test() -> None:
        async with fleet_of(None) as fleet:

            async def fail(*_: object, **__: object) -> None:
                fleet.replicas[0].state = "ended"
                raise ConnectionRefusedError

            monkeypatch.setattr(asyncio, "open_connection", fail)
            assert b"(0 is ended)" in (await Client(fleet).answer())[2]

    run(test())


def test_a_connection_that_cannot_be_set_up_is_closed(monkeypatch: pytest.MonkeyPatch) -> None:
    is_over = asyncio.Event()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        with contextlib.suppress(ConnectionError):
            await reader.read()
        is_over.set()
        writer.close()

    async def test() -> None:
        monkeypatch.setattr(upstream, "_NO_LINGER", b"short")  # which the kernel refuses
        async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
            with pytest.raises(OSError, match="Invalid argument"):
                await upstream.fetch(server.sockets[0].getsockname()[1], upstream.Request(b"GET", b"/"), 5)
            await is_over.wait()

    run(test())


def test_a_router_without_sockets_loses_no_replica(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: object, **__: object) -> None:
        raise OSError(24, "Too many open files")

    async def test() -> None:
        async with fleet_of(whole(200, {})) as fleet:
            with monkeypatch.context() as patch:
                patch.setattr(asyncio, "open_connection", fail)
                status, _, body = await Client(fleet).answer()
                assert status == 503 and b"no connection to a replica can be made: [Errno 24]" in body
                assert await fleet.replicas[0]._look() == "serving"
                assert (await Client(fleet).answer("GET", "/metrics"))[0] == 200
            assert (await Client(fleet).answer())[0] == 200

    run(test())


def test_a_client_that_goes_ends_its_request_at_the_replica() -> None:
    is_over = asyncio.Event()

    async def stream(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(STREAM + chunk(EVENT))
        try:
            await reader.readexactly(99)
        except ConnectionResetError:  # at once, not at the next byte that is sent
            is_over.set()

    async def test() -> None:
        async with fleet_of(stream) as fleet:
            client = Client(fleet)
            asking = asyncio.create_task(client.request())
            await client.messages.get()
            client.has_gone.set()
            await asking
            await is_over.wait()
            assert fleet.num_in_flight == 0 and fleet.replicas[0].num_failures == 0

    run(test())


def test_a_client_that_reads_slowly_holds_its_replica_up() -> None:
    sent, part = [], chunk(b"a" * (1 << 16))

    async def stream(_: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        writer.write(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n")
        for _ in range(1024):
            writer.write(part)
            await writer.drain()
            sent.append(1)
        writer.write(chunk(b""))

    async def test() -> None:
        async with fleet_of(stream) as fleet:
            client = Client(fleet)
            client.may_go_on.clear()
            asking = asyncio.create_task(client.answer())
            assert not (await asyncio.wait([asking], timeout=0.5))[0]
            assert len(sent) < 1024 and client.messages.empty()
            client.may_go_on.set()
            assert len((await asking)[2]) == 1 << 26

    run(test())


def test_a_request_without_a_key_is_refused_before_its_body_is_read() -> None:
    async def test() -> None:
        async with fleet_of(whole(200, {})) as fleet:
            client = Client(fleet, api_keys=("k",))
            assert (await client.answer(authorization="Bearer wrong"))[0] == 401 and client.num_read == 0
            assert (await client.answer(authorization="Bearer k"))[0] == 200
            assert (await Client(fleet, max_body_bytes=1024).answer(body=b"a" * 1025))[0] == 413
            client = Client(fleet)  # a replica would cut the connection of a body that it does not read
            status, _, body = await client.answer(content_type="text/plain")
            assert (status, client.num_read) == (415, 0) and b"must be application/json, got 'text/plain'" in body

    run(test())


def test_a_router_that_drains_takes_no_requests() -> None:
    async def test() -> None:
        async with fleet_of(whole(200, {})) as fleet:
            fleet.is_draining = True
            status, headers, body = await Client(fleet).answer()
            assert (status, json.loads(body)["error"]["code"]) == (503, "unavailable") and "retry-after" in headers
            assert (await Client(fleet).answer("GET", "/health"))[0] == 200
            assert (await Client(fleet).answer("GET", "/ready"))[0] == 503

    run(test())


def test_admin_routes() -> None:
    key = {"authorization": "Bearer k"}

    async def test() -> None:
        async with fleet_of(whole(200, {}), whole(500, {"error": "no luck"})) as fleet:
            path = "/admin/reset_prefix_cache"
            assert (await Client(fleet).answer("POST", path))[0] == 200  # no key, no route: the replica's to refuse
            client = Client(fleet, admin_key="k")
            assert (await client.answer("POST", path))[0] == 401
            status, _, body = await client.answer("POST", path, **key)
            assert status == 502 and b"replica 1 answered 500" in body and b"no luck" in body
            fleet.replicas[1].state = "starting"
            assert (await client.answer("POST", path, **key))[0] == 200
            for method, path in (("GET", "/admin/kv_scales"), ("GET", "/admin/a/b")):
                status, _, body = await client.answer(method, path, **key)
                assert status == 501 and b"start one octavo serve a GPU" in body
                assert (await client.answer(method, path))[0] == 401

    run(test())


def test_metrics_of_all_replicas_and_of_the_router() -> None:
    text = '# HELP vllm:x_total X.\n# TYPE vllm:x_total counter\nvllm:x_total{model_name="m"} %d\n'

    def of(number: int) -> Answer:
        body = (text % number).encode()
        return raw(b"HTTP/1.1 200 OK\r\nContent-Length: %d\r\n\r\n%s" % (len(body), body))

    async def test() -> None:
        damaged = raw(b'HTTP/1.1 200 OK\r\nContent-Length: 7\r\n\r\nx{a="b ')
        async with fleet_of(of(3), None, of(4), damaged) as fleet:
            status, _, body = await Client(fleet).answer("GET", "/metrics")
            lines = body.decode().splitlines()
            assert status == 200 and lines.count("# TYPE vllm:x_total counter") == 1
            assert [line for line in lines if line.startswith("vllm:x_total{")] == [
                f'vllm:x_total{{model_name="m",worker="{worker}"}} {value}' for worker, value in ((0, 3.0), (2, 4.0))
            ]
            assert 'octavo:router_replica_ready{worker="1"} 1.0' in lines
            assert 'octavo:router_requests_routed_total{worker="0"} 0.0' in lines

    run(test())
