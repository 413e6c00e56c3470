"""Streams: deltas that came together leave together, events keep their bytes, the interpreter is set for them."""

import asyncio
import json
import subprocess
import sys
from collections.abc import AsyncIterator
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Histogram, generate_latest

from octavo.serve.engine.request import Delta, RequestInput, RequestState
from octavo.serve.engine_client import MAX_BATCH, DeltaStream
from octavo.serve.http.answer import ChoiceFormat, EventWriter
from octavo.serve.http.chat import ChatFormat
from octavo.serve.http.completions import CompletionFormat
from octavo.serve.http.deltas import answer_deltas
from octavo.serve.http.errors import ApiError
from octavo.serve.http.metrics import _TOKEN_S, Metrics
from octavo.serve.http.schema import ChatRequest, CompletionRequest
from octavo.serve.http.token_text import TokenTexts
from octavo.serve.outputs import Logprob
from octavo.serve.sampling_params import SamplingParams
from tests.serve.http.running import Running

TEXTS = TokenTexts(None)
FORMS: list[ChoiceFormat] = [
    ChatFormat(ChatRequest(messages=[{"role": "user", "content": "a"}]), TEXTS),  # type: ignore[list-item]
    CompletionFormat(CompletionRequest(prompt="a"), TEXTS),
]


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("rest", [{}, {"usage": None}])
def test_an_event_around_a_text_has_the_bytes_of_any_other(form: ChoiceFormat, rest: dict[str, None]) -> None:
    head = {"id": "x", "model": 'a[null]"\0'}
    writer = EventWriter(head, rest, form)
    for index in (0, 3, 0):
        for text in ("", "a", '"\\\n\t\0\x7f', "\u00e9\u4e2d\U0001f600\u2028", "[null]"):
            delta = Delta(index, text, [5], weight_versions=[0])
            content = head | {"choices": [form.chunk(delta)]} | rest
            event = f"data: {json.dumps(content, ensure_ascii=False, separators=(',', ':'))}\n\n"
            assert writer.text_event(delta) == event == writer.event(form.chunk(delta))


def test_what_shows_more_than_texts_is_written_as_such() -> None:
    messages = [{"role": "user", "content": "a"}]
    for chat, completion in (({"logprobs": True}, {"logprobs": 0}), ({"return_token_ids": True},) * 2):
        assert not ChatFormat(ChatRequest.model_validate({"messages": messages} | chat), TEXTS).is_text_alone
        assert not CompletionFormat(CompletionRequest.model_validate({"prompt": "a"} | completion), TEXTS).is_text_alone
    assert all(form.is_text_alone for form in FORMS)


class _Client:
    """Of a stream's EngineClient, what it calls at its end."""

    is_finished: bool | None = None

    def release(self, stream: DeltaStream, is_finished: bool) -> None:
        self.is_finished = is_finished


def test_deltas_that_wait_are_taken_together_up_to_a_bound() -> None:
    async def read() -> tuple[list[int], bool | None]:
        client, requests = _Client(), [RequestState(RequestInput([1], SamplingParams())) for _ in range(2)]
        stream = DeltaStream(client, requests)  # type: ignore[arg-type]
        for token_id in range(MAX_BATCH + 5):
            stream.put(requests[0], Delta(0, token_ids=[token_id]))
        reading = stream.batches()
        batches = [await anext(reading), await anext(reading)]
        waiting = asyncio.ensure_future(anext(reading))  # type: ignore[arg-type]
        await asyncio.sleep(0)
        assert not waiting.done()
        for request in requests:
            stream.put(request, Delta(0, token_ids=[-1], finish_reason="stop"))
        batches.append(await waiting)
        with pytest.raises(StopAsyncIteration):
            await anext(reading)
        ids = [delta.token_ids[0] for batch in batches for _, delta in batch]
        assert ids == [*range(MAX_BATCH + 5), -1, -1]
        assert [position for position, _ in batches[-1]] == [0, 1]
        stream.close()
        return [len(batch) for batch in batches], client.is_finished

    assert asyncio.run(read()) == ([MAX_BATCH, 5, 2], True)


def test_what_came_before_a_failure_is_sent() -> None:
    class Stream:
        async def batches(self) -> AsyncIterator[list[tuple[int, Delta]]]:
            yield [(0, Delta(0, "a")), (1, Delta(0, "b")), (0, Delta(0, finish_reason="error", stop_reason="it broke"))]

    async def read() -> list[Any]:
        inputs = [RequestInput([1], SamplingParams(n=2)) for _ in range(2)]
        found: list[Any] = []
        try:
            async for batch in answer_deltas(Stream(), inputs, None):  # type: ignore[arg-type]
                found += [(delta.index, delta.text) for delta in batch]
        except ApiError as error:
            found.append(error.message)
        return found

    assert asyncio.run(read()) == [(0, "a"), (2, "b"), "it broke"]


def test_a_request_needs_no_other_thread_before_its_tokens(server: Running, monkeypatch: pytest.MonkeyPatch) -> None:
    """Python's frameworks call what is no coroutine in a pool of threads, three times a request."""
    monkeypatch.setattr("anyio.to_thread.run_sync", None)
    server.complete(prompt=[1, 2], max_tokens=2)
    assert server.client.get("/v1/models").status_code == 200


def test_histograms_are_prometheus_clients() -> None:
    """Its own takes locks at every token; the text that is scraped is the same."""
    mine, registry = Metrics("m"), CollectorRegistry()
    name, text = "vllm:inter_token_latency_seconds", "Between two tokens of a sequence."
    theirs = Histogram(name, text, ["model_name"], registry=registry, buckets=_TOKEN_S).labels("m")
    for gap in (*_TOKEN_S, 0.0, 0.003, 7.0, 7.0):
        request = RequestState(RequestInput([1], SamplingParams()))
        mine.observe([(request, Delta(0, token_ids=[1], time_s=time_s)) for time_s in (0.0, gap)])
        theirs.observe(gap)
    lines = [line for line in generate_latest(registry).decode().splitlines() if "_created" not in line]
    assert [line for line in mine.render().decode().splitlines() if name in line] == lines


_SERVER = """
import gc, os, signal, sys, threading, time
from octavo.serve.http import ServerConfig, run_server
from tests.serve.http.running import make_engine

def state():
    return gc.get_freeze_count() > 50_000, gc.get_threshold()[0], sys.getswitchinterval()

def look_and_end():
    deadline = time.monotonic() + 60
    while sys.getswitchinterval() != 0.001 and time.monotonic() < deadline:
        time.sleep(0.05)
    print(*state())
    os.kill(os.getpid(), signal.SIGTERM)

before = state()
threading.Timer(0.2, look_and_end).start()
print(run_server(make_engine, ServerConfig(model_names=("tiny",)), port=0), state() == before)
"""


def test_a_server_sets_its_interpreter_for_streams_and_then_back() -> None:
    """A collection that looks at all that is loaded stops every stream for a tenth of a second."""
    done = subprocess.run([sys.executable, "-c", _SERVER], capture_output=True, text=True, check=False, timeout=120)
    assert done.stdout.split() == ["True", "10000", "0.001", "0", "True"], done.stderr


def test_no_more_top_logprobs_than_were_asked_for() -> None:
    """A token that is as likely as the last of them is none of them."""
    asked = {"messages": [{"role": "user", "content": "a"}], "logprobs": True, "top_logprobs": 1}
    form = ChatFormat(ChatRequest.model_validate(asked), TEXTS, [RequestInput([1], SamplingParams())])
    delta = Delta(0, "a", [7], [{5: Logprob(-1.0, 1), 7: Logprob(-1.0, 1)}])
    (entry,) = form.chunk(delta)["logprobs"]["content"]
    assert len(entry["top_logprobs"]) == 1
