"""The HTTP client: what goes wrong on a connection is told apart, and keys go where they belong."""

from collections.abc import Iterator
from typing import Any

import pytest

from octavo.integrations.rollout.http import HttpClient, RefusedError, read_counters
from octavo.models import char_tokenizer
from octavo.rl.engines import EngineAnswerError, EngineError, EngineTimeoutError
from tests.integrations.rollout.stand_in import HttpError, StandIn


class Echo(StandIn):
    def post_echo(self, **fields: Any) -> Any:
        return fields

    get_echo = post_echo

    def post_words(self) -> str:
        return "as you wish"


@pytest.fixture
def echo() -> Iterator[Echo]:
    with Echo(char_tokenizer("ab")) as server:
        yield server


def test_json_both_ways(echo: Echo) -> None:
    client = HttpClient("it", f"{echo.url}/")
    assert client.post("/echo?x=1", {"a": [1.5]}) == {"a": [1.5], "x": "1"}
    assert client.get("/echo") == {}
    client.order("/words")
    with pytest.raises(EngineAnswerError, match=r"no JSON .*as you wish"):
        client.post("/words")


def test_a_refusal_has_its_status_and_words(echo: Echo) -> None:
    def refuse() -> None:
        raise HttpError(429, {"error": {"message": "the queue is full"}})

    echo.before["POST /echo"] = refuse
    with pytest.raises(RefusedError, match=r"it: http://.*/echo answered 429") as caught:
        HttpClient("it", echo.url).post("/echo")
    assert (caught.value.status, caught.value.detail) == (429, "the queue is full")


def test_a_silent_server_a_dead_one_and_none(echo: Echo) -> None:
    client = HttpClient("it", echo.url, timeout_s=0.1)
    echo.before["POST /echo"] = echo.hang
    with pytest.raises(EngineTimeoutError, match=r"within 0\.1 s"):
        client.post("/echo")
    echo.before["POST /echo"] = echo.die
    with pytest.raises(EngineError, match="broke off the connection") as caught:
        client.post("/echo", timeout_s=5.0)
    assert not isinstance(caught.value, EngineTimeoutError)
    echo.stop()
    with pytest.raises(EngineError, match=r"cannot be reached .*engine\.url"):
        client.post("/echo")


def test_counters_are_summed_over_their_labels() -> None:
    text = '# HELP a {x} 9\na_total{x="1 {2}"} 1.5\na_total 2\na_total_created{x="1"} 100\nb 7\n'
    assert read_counters(text, {"a_total": "a"}) == {"a": 3.5}
