"""The access log: a line of JSON for every request that ended, without what may be secret."""

import asyncio
import json
import logging
from typing import Any

import httpx
import pytest

from octavo.serve.http.access_log import AccessLog
from tests.serve.http.running import running

LOGGER = "octavo.serve.http.access_log"


def lines(caplog: pytest.LogCaptureFixture) -> list[dict[str, Any]]:
    return [json.loads(record.message) for record in caplog.records if record.name == LOGGER]


def test_every_request_has_a_line(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with running(access_log=True, api_keys=("secret",)) as server:
        headers = {"Authorization": "Bearer secret"}
        whole = server.post("/v1/completions", headers, prompt="hello", max_tokens=3)
        streamed = server.post("/v1/completions", headers, prompt="hello", max_tokens=3, stream=True)
        server.post("/v1/completions", prompt="hello")
        server.client.get("/health?key=secret")
        server.client.get("/nowhere")
        server.wait_until(lambda: len(lines(caplog)) >= 5)
    found = lines(caplog)
    assert [(line["method"], line["path"], line["status"]) for line in found] == [
        ("POST", "/v1/completions", 200), ("POST", "/v1/completions", 200), ("POST", "/v1/completions", 401),
        ("GET", "/health", 200), ("GET", "/nowhere", 404),
    ]  # fmt: skip
    assert [line["bytes"] for line in found[:2]] == [len(whole.content), len(streamed.content)]
    assert all(line["is_whole"] and line["seconds"] > 0 and line["client"] == "127.0.0.1" for line in found)
    assert "secret" not in caplog.text and "hello" not in "".join(map(str, found))


def test_a_client_that_goes_leaves_a_line_too(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with running(access_log=True) as server:
        body = {"prompt": "hello", "max_tokens": 200, "stream": True, "ignore_eos": True}
        with server.client.stream("POST", "/v1/completions", json=body) as streamed:
            next(streamed.iter_bytes())
        server.wait_until(lambda: len(lines(caplog)) == 1)
        server.assert_at_rest()
        assert server.service.engine.loop.num_ended["abort"] == 1
    [line] = lines(caplog)
    assert (line["status"], line["is_whole"]) == (200, False)


def test_there_is_none_unless_asked_for(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, LOGGER)
    with running() as server:
        assert server.client.get("/health").status_code == 200
    assert lines(caplog) == []


def test_an_exception_counts_as_500(caplog: pytest.LogCaptureFixture) -> None:
    async def broken(*_: object) -> None:
        raise RuntimeError("off")

    async def ask() -> None:
        transport = httpx.ASGITransport(AccessLog(broken))
        async with httpx.AsyncClient(transport=transport, base_url="http://x") as client:
            await client.get("/path")

    caplog.set_level(logging.INFO, LOGGER)
    with pytest.raises(RuntimeError, match="off"):
        asyncio.run(ask())
    assert [(line["status"], line["is_whole"]) for line in lines(caplog)] == [(500, False)]
