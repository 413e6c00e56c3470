"""Requests that want to hold up others are refused at once, or end alone; /health answers meanwhile."""

import asyncio
import json
import signal
import threading
import time
from pathlib import Path

import httpx
import pytest

from octavo.errors import DataError
from octavo.serve.engine.request import UnavailableError
from octavo.serve.http.errors import ApiError
from octavo.serve.http.lanes import Lane, TooExpensiveError, WorkerLane
from octavo.serve.nursery import Nursery
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
        ("/v1/completions", {"prompt": [], "user": "a" * 40_000}, "prompt"),
        ("/v1/completions", {f"f{i}": 1 for i in range(100_000)}, None),
        ("/detokenize", {"tokens": [9] * 2_000_000}, "tokens"),
        ("/detokenize", {"tokens": [9] * 1_000_000 + [-1]}, "tokens"),
    ],
    ids=["messages", "logit_bias", "1025 biases", "mixed ids", "empty lists", "none", "unknown", "tokens", "bad token"],
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


PROGRAM = """
import os, time

def prepare(setup):
    if setup == "broken":
        raise ValueError("no vocabulary")
    return 1 << 32

def grow():
    global held
    held = bytearray(70 << 20)
    return os.getpid()

def eat(num_bytes):
    return len(bytearray(num_bytes))

pid, sleep, die, fail = os.getpid, time.sleep, os._exit, int
"""


def test_a_worker_is_ended_with_its_call_and_another_takes_its_place(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    nursery = Nursery(str(program), lambda: None)
    lane = WorkerLane("jobs", 1, 1, nursery=nursery, limit_s=0.7, niceness=0, clock=signal.ITIMER_REAL)
    patient = WorkerLane("jobs", 1, 1, nursery=nursery, limit_s=30, niceness=0)

    async def use() -> None:
        first = await lane.run("pid")
        assert await lane.run("pid") == first, "a worker is kept"
        assert await lane.run("grow") == first
        second = await lane.run("pid")
        assert second != first, "but for one that holds much"
        with pytest.raises(ValueError, match="invalid literal"):
            await lane.run("fail", "x")
        with pytest.raises(DataError, match="too much memory"):
            await lane.run("eat", 1 << 33)
        assert await lane.run("pid") == second
        for job, exit_code in ((("die", 3), 3), (("sleep", 9), -signal.SIGALRM)):
            with pytest.raises(TooExpensiveError) as ended:
                await lane.run(*job)
            assert ended.value.exit_code == exit_code
        sleeper = await patient.run("pid")
        call = asyncio.create_task(patient.run("sleep", 30))
        await asyncio.sleep(0.05)
        call.cancel()
        assert await asyncio.wait_for(patient.run("pid"), 10) != sleeper, "its client has gone"

    asyncio.run(use())
    for each in (lane, patient):
        each.close()
    nursery.close()
    with pytest.raises(UnavailableError, match="did not start: ValueError: no vocabulary"):
        Nursery(str(program), lambda: "broken").fork(0)
    caplog.clear()
    broken = Nursery(str(program), lambda: "broken")
    broken.start()  # ahead of a request, which then says it
    assert "did not start: ValueError: no vocabulary" in caplog.text
    caplog.clear()
    broken.close()
    broken.start()  # one that is closed while it starts has no news
    assert not caplog.text


def test_workers_end_with_a_server_that_is_killed(tmp_path: Path) -> None:
    """Which closes its sockets."""
    (tmp_path / "program.py").write_text(PROGRAM)
    nursery = Nursery(str(tmp_path / "program.py"), lambda: None)
    server = nursery.fork(0)
    for job in (("pid", ()), ("sleep", (99,))):
        server.send((signal.ITIMER_REAL, 99, *job))
    _, worker, _ = server.recv()
    process, control = nursery._process, nursery._control
    assert process is not None and control is not None
    server.close()
    control.close()
    assert process.wait(10) == 0
    began = time.monotonic()
    while Path(f"/proc/{worker}").exists() and time.monotonic() < began + 10:
        time.sleep(0.01)
    assert not Path(f"/proc/{worker}").exists()
