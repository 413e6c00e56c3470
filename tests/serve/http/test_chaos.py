"""`octavo serve` as a process of its own among rude clients, and a SIGTERM at the end: exit code 0, nothing lost."""

import asyncio
import json
import random
import re
import signal
import threading
from collections import Counter
from pathlib import Path

import httpx
import pytest

from octavo import save_model
from tests.serve.http.processes import Process, served
from tests.serve.http.running import VOCAB, byte_tokenizer
from tests.serve.random_models import make_model

JSON = {"Content-Type": "application/json"}
BOOKS = re.compile(
    r"(\d+) requests admitted; sequences ended: (\d+) stop, (\d+) length, (\d+) abort, (\d+) error; "
    r"(\d+) open; (\d+) KV pages in use"
)


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_model(make_model("llama", "bf16", "bf16", vocab_size=VOCAB, num_layers=1), path, tokenizer=byte_tokenizer())
    return path


async def rude_request(client: httpx.AsyncClient, rng: random.Random) -> str:
    """One request of many kinds; what became of it."""
    fields: dict[str, object] = {"prompt": "sea " * rng.randrange(1, 40), "max_tokens": rng.randrange(1, 12)}
    fields |= {"n": rng.choice([1, 1, 3]), "stream": rng.random() < 0.5, "ignore_eos": rng.random() < 0.8}
    if rng.random() < 0.2:
        fields |= {"logprobs": 2, "echo": True}
    match rng.choice(["good", "good", "good", "leave", "leave", "malformed", "oversize", "unknown", "chat"]):
        case "malformed":
            body = json.dumps(fields).encode()[: rng.randrange(30)]
            return f"{(await client.post('/v1/completions', content=body, headers=JSON)).status_code} malformed"
        case "oversize":
            answer = await client.post("/v1/completions", json=fields | {"prompt": [1] * rng.choice([600, 60_000])})
            return f"{answer.status_code} oversize"
        case "unknown":
            return f"{(await client.post('/v1/completions', json=fields | {'colour': 1})).status_code} unknown"
        case "chat":
            body_fields = {"messages": [{"role": "user", "content": "hi"}], "max_tokens": 5}
            return finished(await client.post("/v1/chat/completions", json=body_fields))
        case "leave":
            try:
                async with asyncio.timeout(rng.random() * 0.2):
                    return finished(await client.post("/v1/completions", json=fields))
            except TimeoutError:
                return "left"
    return finished(await client.post("/v1/completions", json=fields))


def finished(answer: httpx.Response) -> str:
    """Whether a whole answer came, with an end for every choice."""
    if answer.status_code != 200:
        assert answer.status_code in (429, 503), answer.text
        assert "Retry-After" in answer.headers
        return str(answer.status_code)
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n"), answer.text[-300:]
        assert '"error"' not in answer.text
        assert re.search(r'"finish_reason":"(stop|length)"', answer.text)
    else:
        assert all(choice["finish_reason"] in ("stop", "length") for choice in answer.json()["choices"])
    return "200"


async def besiege(process: Process, count: int, seed: int) -> Counter[str]:
    """Many rude requests, 12 at a time; then long ones, and a SIGTERM in their midst."""
    rng = random.Random(seed)
    outcomes: Counter[str] = Counter()
    gate = asyncio.Semaphore(12)

    async def one(client: httpx.AsyncClient, number: int) -> None:
        async with gate:
            outcomes[await rude_request(client, random.Random(f"{seed} {number}"))] += 1

    async with httpx.AsyncClient(base_url=process.url, timeout=60) as client:
        async with asyncio.TaskGroup() as group:
            for number in range(count):
                group.create_task(one(client, number))
        long = {"prompt": "sea", "max_tokens": 120, "ignore_eos": True}
        tasks = [
            asyncio.create_task(client.post("/v1/completions", json=long | {"stream": rng.random() < 0.5}))
            for _ in range(8)
        ]
        while (await client.get("/health")).json()["sequences_open"] < len(tasks):
            await asyncio.sleep(0.005)
        process.popen.send_signal(signal.SIGTERM)
        while (await client.get("/ready")).status_code == 200:
            await asyncio.sleep(0.005)
        refused = await client.post("/v1/completions", json=long)
        assert refused.status_code == 503
        assert [finished(answer) for answer in await asyncio.gather(*tasks)] == ["200"] * len(tasks)
    return outcomes


def storm(checkpoint: Path, count: int, seed: int) -> None:
    limits = ["--max-num-seqs", "6", "--max-num-waiting", "16", "--num-kv-pages", "24", "--max-model-len", "256"]
    limits += ["--max-num-batched-tokens", "96", "--max-body-bytes", "100000"]
    with served(str(checkpoint), "--port", "0", "--device", "cpu", *limits) as process:
        process.wait_until_ready()
        outcomes = asyncio.run(besiege(process, count, seed))
        code, log = process.end()
    assert code == 0, log
    assert outcomes.total() == count
    assert outcomes["200"] > count / 4 and outcomes["429"] > 0
    assert outcomes["left"] > 0
    assert {key for key in outcomes if " " in key} <= {"400 malformed", "400 oversize", "413 oversize", "400 unknown"}
    books = BOOKS.search(log)
    assert books is not None, log
    admitted, stop, length, abort, error, still_open, pages = map(int, books.groups())
    assert (error, still_open, pages) == (0, 0, 0)
    assert stop + length + abort >= admitted >= outcomes["200"] + 8
    assert admitted <= outcomes["200"] + outcomes["left"] + 8, "who was admitted and stayed has an answer"
    assert "Traceback" not in log, log[log.index("Traceback") :]


@pytest.mark.slow
def test_hundreds_of_rude_requests_and_a_sigterm(checkpoint: Path) -> None:
    storm(checkpoint, 400, seed=1)


@pytest.mark.largest
def test_a_thousand_rude_requests_and_a_sigterm(checkpoint: Path) -> None:
    storm(checkpoint, 1000, seed=1)


@pytest.mark.slow
def test_a_second_signal_ends_what_is_unfinished(checkpoint: Path) -> None:
    with served(str(checkpoint), "--port", "0", "--device", "cpu", "--max-num-seqs", "64") as process:
        process.wait_until_ready()
        fields = {"prompt": "a", "max_tokens": 500, "n": 64, "ignore_eos": True}
        answers: list[httpx.Response] = []
        url = f"{process.url}/v1/completions"
        thread = threading.Thread(target=lambda: answers.append(httpx.post(url, json=fields, timeout=60)))
        thread.start()
        while httpx.get(f"{process.url}/health").json()["sequences_open"] < 64:
            threading.Event().wait(0.01)
        process.popen.send_signal(signal.SIGINT)
        while httpx.get(f"{process.url}/ready").status_code == 200:
            threading.Event().wait(0.01)
        process.popen.send_signal(signal.SIGINT)
        code, log = process.end()
        thread.join(30)
    assert code == 1, log
    assert answers[0].status_code == 503
    assert "64 abort" in log


@pytest.mark.slow
def test_a_model_that_is_none_is_one_line_and_exit_code_2(tmp_path: Path) -> None:
    with served(str(tmp_path), "--port", "0", "--device", "cpu") as process:
        code, log = process.end()
    assert code == 2
    assert "config.json" in log.splitlines()[-1]
