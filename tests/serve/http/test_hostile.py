"""Requests that want to hold up others are refused at once, or end alone; /health answers meanwhile."""

import asyncio
import json
import threading
import time

import httpx
import pytest

from octavo.serve.http.errors import ApiError
from octavo.serve.http.lanes import Lane
from tests.serve.http.running import Running


def test_a_long_prompt_is_refused_by_its_length(server: Running) -> None:
    answer = server.post("/v1/completions", prompt="tell me " * 4000, max_tokens=1)
    assert answer.status_code == 400
    assert answer.json()["error"]["code"] == "context_length_exceeded"
    assert "characters" in answer.json()["error"]["message"]


@pytest.mark.parametrize(
    ("path", "body", "param"),
    [
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}] * 180_000}, "messages"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1.0 for i in range(200_000)}}, "logit_bias"),
        ("/v1/completions", {"prompt": "a", "logit_bias": {str(i): 1.0 for i in range(1025)}}, "logit_bias"),
        ("/v1/completions", {"prompt": [[1]] + [1] * 1_000_000}, "prompt"),
        ("/v1/completions", {"prompt": [[]] * 1_000_000}, "prompt"),
        ("/v1/completions", {f"f{i}": 1 for i in range(100_000)}, None),
        ("/detokenize", {"tokens": [9] * 2_000_000}, "tokens"),
        ("/detokenize", {"tokens": [9] * 1_000_000 + [-1]}, "tokens"),
    ],
    ids=["messages", "logit_bias", "logit_bias 1025", "mixed ids", "empty lists", "unknown", "tokens", "bad token"],
)
def test_health_answers_while_a_large_body_is_read(
    server: Running, path: str, body: dict[str, object], param: str | None
) -> None:
    server.post("/v1/completions", prompt="a" * 40_000)  # the workers have started
    content = json.dumps(body).encode()
    headers = {"Content-Type": "application/json"}
    answers: list[httpx.Response] = []

    def post() -> None:
        answers.append(httpx.post(server.url + path, content=content, headers=headers, timeout=60))

    longest = [1.0]
    while min(longest) > 0.7 and len(longest) < 4:  # what the server does would repeat, what the machine does need not
        thread = threading.Thread(target=post)
        thread.start()
        longest.append(0.0)
        while thread.is_alive():
            began = time.monotonic()
            assert server.client.get("/health").status_code == 200
            longest[-1] = max(longest[-1], time.monotonic() - began)
        assert answers[-1].status_code == 400, answers[-1].text
        assert param is None or answers[-1].json()["error"]["param"] == param
    assert min(longest) < 0.7, longest


def test_a_full_lane_is_503_with_retry_after() -> None:
    async def use() -> None:
        lane, go_on = Lane("texts", 1, 1), threading.Event()
        waiting = [asyncio.create_task(lane.run(go_on.wait, 30)) for _ in range(2)]
        await asyncio.sleep(0.01)
        with pytest.raises(ApiError) as refusal:
            await lane.run(go_on.wait, 30)
        assert refusal.value.status == 503 and refusal.value.headers == {"Retry-After": "1"}
        go_on.set()
        await asyncio.gather(*waiting)
        assert await lane.run(lambda: 5) == 5
        lane.close()

    asyncio.run(use())
