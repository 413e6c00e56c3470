"""Connections that are slow, silent, too many or half closed: each gets what is due, and the others do not wait."""

import contextlib
import re
import socket
import time

import httpx
import pytest

from octavo.serve.http.config import ServerConfig
from octavo.serve.http.server import bind
from tests.serve.http.running import Running, running


@pytest.fixture(autouse=True)
def _quick_probes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.connections.PROBE_S", 0.05)


JSON_HEAD = "POST /v1/completions HTTP/1.1\r\nHost: a\r\nContent-Type: application/json\r\n"


def connect(server: Running) -> socket.socket:
    client = socket.create_connection(("127.0.0.1", int(server.url.rpartition(":")[2])), timeout=20)
    return client


def read_to_end(client: socket.socket) -> bytes:
    parts = []
    while part := client.recv(65536):
        parts.append(part)
    return b"".join(parts)


def post(fields: str, version: str = "1.1") -> bytes:
    return f"{JSON_HEAD}Content-Length: {len(fields)}\r\n\r\n{fields}".replace("HTTP/1.1", f"HTTP/{version}").encode()


def test_answers_do_not_wait_for_acknowledgements() -> None:
    """asyncio turns Nagle's algorithm off where the protocol is named: else each answer takes 40 ms more."""
    with bind("127.0.0.1", 0) as listener:
        assert listener.proto == socket.IPPROTO_TCP


@pytest.mark.parametrize("stream", ["false", "true"])
def test_a_client_that_half_closes_gets_its_answer(server: Running, stream: str) -> None:
    with connect(server) as client:
        fields = f'{{"prompt": "a", "max_tokens": 40, "ignore_eos": true, "stream": {stream}}}'
        client.sendall(post(fields))
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
    assert re.match(rb"(HTTP/1\.1 100 \r\n\r\n)*HTTP/1\.1 200", answer), answer  # as many 100s as it is slow
    assert b'"finish_reason":"length"' in answer


def test_all_requests_of_a_pipe_are_answered_behind_a_half_close(server: Running) -> None:
    with connect(server) as client:
        client.sendall(post('{"prompt": "a", "max_tokens": 20, "ignore_eos": true}') * 3)
        client.shutdown(socket.SHUT_WR)
        assert read_to_end(client).count(b'"finish_reason":"length"') == 3


def test_a_long_answer_behind_a_half_close_has_signs_of_life(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    slow_down(server, monkeypatch)
    with connect(server) as client:
        client.sendall(post('{"prompt": "a", "max_tokens": 10, "ignore_eos": true}'))
        client.shutdown(socket.SHUT_WR)
        answer = read_to_end(client)
    assert answer.startswith(b"HTTP/1.1 100 ")
    assert b"HTTP/1.1 200 OK" in answer and b'"finish_reason":"length"' in answer


@pytest.mark.parametrize("version", ["1.0", "1.1"])
def test_a_client_that_closes_is_noticed(version: str, monkeypatch: pytest.MonkeyPatch) -> None:
    with running() as server:
        slow_down(server, monkeypatch)
        loop = server.service.engine.loop
        with connect(server) as client:
            client.sendall(post('{"prompt": "a", "max_tokens": 200, "ignore_eos": true, "n": 8}', version))
            server.wait_until(lambda: loop.num_open == 8)
        server.assert_at_rest()
        assert loop.num_ended == {"stop": 0, "length": 0, "abort": 8, "error": 0}


def slow_down(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    launch = server.engine.model_runner.launch

    def later(chunks: list) -> object:  # type: ignore[type-arg]
        time.sleep(0.02)
        return launch(chunks)

    monkeypatch.setattr(server.engine.model_runner, "launch", later)


@pytest.mark.parametrize(
    ("limit", "beginning"),
    [("head_timeout_s", b""), ("body_timeout_s", f"{JSON_HEAD}Content-Length: 1000000\r\n\r\n".encode())],
)
def test_requests_that_trickle_are_ended(limit: str, beginning: bytes) -> None:
    with running(**{limit: 0.2}) as server, connect(server) as client:
        began = time.monotonic()
        client.settimeout(0.1)
        client.sendall(beginning)
        answer = b""
        while not answer and time.monotonic() < began + 5:
            client.sendall(b"G")  # of a method or a body, for ever
            with contextlib.suppress(TimeoutError):
                answer = client.recv(100)
        assert answer.startswith(b"HTTP/1.1 408"), answer


def test_the_limits_of_time_are_those_of_the_docs() -> None:
    config = ServerConfig(("tiny",))
    assert (config.head_timeout_s, config.body_timeout_s, config.write_timeout_s) == (10, 60, 60)
    assert config.max_unfinished == 512


def test_a_body_that_nobody_reads_is_ended() -> None:
    with running(head_timeout_s=0.2) as server, connect(server) as client:
        client.sendall(b"POST /nowhere HTTP/1.1\r\nHost: a\r\nContent-Length: 1000000\r\n\r\n")
        assert client.recv(100).startswith(b"HTTP/1.1 404")
        began = time.monotonic()
        with pytest.raises(OSError):  # noqa: PT011, PT012  (a reset or a broken pipe)
            while time.monotonic() < began + 10:
                client.sendall(b"x")
                time.sleep(0.05)
        assert time.monotonic() - began < 5


def test_of_too_many_unfinished_connections_the_oldest_goes() -> None:
    with running(max_unfinished=3) as server:
        idle = [connect(server) for _ in range(8)]
        try:
            server.wait_until(lambda: len(server.server.server_state.connections) == 3)
            assert httpx.get(f"{server.url}/health").status_code == 200
            assert idle[0].recv(1) == b""
        except ConnectionResetError:
            pass
        finally:
            for client in idle:
                client.close()
        assert httpx.get(f"{server.url}/health").status_code == 200


def test_a_client_that_does_not_read_is_cut_off() -> None:
    with running(write_timeout_s=0.2) as server, connect(server) as client:
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.setblocking(False)
        with pytest.raises(OSError):  # noqa: PT011, PT012
            for _ in range(400):
                with contextlib.suppress(BlockingIOError):
                    client.send(b"GET / HTTP/1.1\r\nHost: a\r\n\r\n" * 50)
                time.sleep(0.02)
        assert httpx.get(f"{server.url}/health").status_code == 200
