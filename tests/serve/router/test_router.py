"""`octavo serve --data-parallel-size 2` with real replicas: answers, prefixes, a replica that is killed, the drain."""

import asyncio
import os
import re
import signal
import time
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from octavo import LLM, save_model
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.serve.http.server import bind
from octavo.serve.router.replica import Replica
from tests.conftest import RunOctavo
from tests.serve.http.processes import Process, served
from tests.serve.http.running import VOCAB, byte_tokenizer, running
from tests.serve.http.test_weights import as_bytes, manifest_of
from tests.serve.random_models import make_model

STORY = "tell me a story of the sea and the sky " * 9
REQUESTS: list[dict[str, Any]] = [
    {"prompt": STORY, "max_tokens": 12, "seed": 1},
    {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "n": 2, "logprobs": 2},
    {"prompt": "hello", "max_tokens": 5, "stop": "zzz", "echo": True, "seed": 2},
]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("served") / "tiny"
    save_model(make_model("llama", "bf16", "bf16", vocab_size=VOCAB, num_layers=1), path, tokenizer=byte_tokenizer())
    return path


@pytest.fixture
def router(checkpoint: Path) -> Iterator[Process]:
    with two_replicas(checkpoint) as process:
        yield process


def two_replicas(checkpoint: Path, *arguments: str) -> Any:
    given = ("--port", "0", "--device", "cpu", "--data-parallel-size", "2", "--num-kv-pages", "64", *arguments)
    return served(str(checkpoint), *given)


def counted(client: httpx.Client, name: str, url: str = "/metrics") -> dict[str, float]:
    """A metric of each worker."""
    lines = re.findall(rf'^{name}{{.*worker="(\d)"}} (\S+)$', client.get(url).text, re.MULTILINE)
    return {worker: float(value) for worker, value in lines}


async def until_ready(client: httpx.AsyncClient, count: int = 2) -> None:
    """Wait until so many replicas take requests."""
    async with asyncio.timeout(120):
        while [*(await client.get("/ready")).json()["replicas"].values()].count("serving") < count:
            await asyncio.sleep(0.05)


def both_ready(url: str) -> None:
    async def wait() -> None:
        async with httpx.AsyncClient(base_url=url) as client:
            await until_ready(client)

    asyncio.run(wait())


def children(pid: int) -> list[int]:
    """The processes that a process has started; a router's are its replicas."""
    threads = Path(f"/proc/{pid}/task").iterdir()
    return [int(child) for thread in threads for child in (thread / "children").read_text().split()]


def is_rank(pid: int) -> bool:
    return b"octavo.serve.tensor_worker" in Path(f"/proc/{pid}/cmdline").read_bytes()


def is_running(pid: int) -> bool:
    stat = Path(f"/proc/{pid}/stat")
    return stat.exists() and stat.read_text().rpartition(")")[2].split()[0] != "Z"  # whoever adopted it has yet to look


async def drain(router: Process) -> None:
    """SIGTERM while requests are under way: these have their end, and new ones are refused."""
    long = {"prompt": "sea", "max_tokens": 200, "ignore_eos": True}
    async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
        posts = [client.post("/v1/completions", json=long | {"stream": stream}) for stream in (True, False) * 2]
        asking = [asyncio.create_task(post) for post in posts]
        while (await client.get("/health")).json()["requests_in_flight"] < len(asking):
            await asyncio.sleep(0.005)
        router.popen.send_signal(signal.SIGTERM)
        while (await client.get("/health")).json()["status"] != "draining":
            await asyncio.sleep(0.005)
        assert (await client.post("/v1/completions", json=long)).status_code == 503
        for answer in await asyncio.gather(*asking):
            assert answer.status_code == 200 and '"finish_reason":"length"' in answer.text


@pytest.mark.slow
def test_two_replicas_answer_as_one_server_and_drain(checkpoint: Path, router: Process) -> None:
    with running(lambda: LLM(checkpoint, num_kv_pages=64, device="cpu").engine) as single:
        wanted = [single.complete(**fields)["choices"] for fields in REQUESTS]
        refused = single.post("/v1/completions", prompt="a", n=-1)
        streamed = single.post("/v1/completions", **REQUESTS[0], stream=True).text
    router.wait_until_ready()
    both_ready(router.url)
    with httpx.Client(base_url=router.url, timeout=60) as client:
        for _ in range(2):
            answers = [client.post("/v1/completions", json=fields) for fields in REQUESTS]
            assert [answer.json()["choices"] for answer in answers] == wanted
        again = client.post("/v1/completions", json={"prompt": "a", "n": -1})
        assert (again.status_code, again.json()) == (refused.status_code, refused.json())
        text = client.post("/v1/completions", json=REQUESTS[0] | {"stream": True}).text
        assert re.findall(r'"choices":(\[.*?\])', text) == re.findall(r'"choices":(\[.*?\])', streamed)
        assert text.endswith("data: [DONE]\n\n")
        hits = counted(client, "vllm:prefix_cache_hits_total")
        # the story went three times to the replica that had it, and to no other one
        assert sorted(value > 0 for value in hits.values()) == [False, True]
        routed = counted(client, "octavo:router_requests_routed_total")
        assert sum(routed.values()) == 2 * len(REQUESTS) + 2 and min(routed.values()) > 0
        assert client.get("/health").json() == {"status": "alive", "requests_in_flight": 0}

    asyncio.run(drain(router))
    code, log = router.end()
    assert code == 0 and "0 lost with their replica; 0 restarts" in log, log
    assert "Traceback" not in log, log


def test_a_port_that_is_taken_is_said_before_a_replica_is_started(
    checkpoint: Path, monkeypatch: pytest.MonkeyPatch, run_octavo: RunOctavo
) -> None:
    monkeypatch.setattr(Replica, "run", lambda self: pytest.fail("a replica was started"))
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with listener:
        port = listener.getsockname()[1]
        ended = run_octavo("serve", checkpoint, "--port", port, "--device", "cpu", "-dp", "2")
    assert ended.code == 2
    assert ended.err.startswith(f"error: cannot listen at 127.0.0.1, port {port}: ") and ended.err.count("\n") == 1


@pytest.mark.nightly
def test_a_replica_that_is_killed_under_load(router: Process) -> None:
    """Every request has its end, the other replica goes on, and the dead one comes back."""
    router.wait_until_ready()
    both_ready(router.url)
    victim = children(router.popen.pid)[0]
    outcomes: Counter[str] = Counter()
    is_over = asyncio.Event()

    async def ask(client: httpx.AsyncClient, number: int) -> None:
        while not is_over.is_set():
            fields = {"prompt": f"{number} sea", "max_tokens": 40, "ignore_eos": True, "stream": number % 2 == 0}
            answer = await client.post("/v1/completions", json=fields)
            outcomes[outcome_of(answer)] += 1

    async def load() -> None:
        limits = httpx.Limits(max_connections=None)
        async with httpx.AsyncClient(base_url=router.url, timeout=60, limits=limits) as client:
            async with asyncio.TaskGroup() as group:
                for number in range(12):
                    group.create_task(ask(client, number))
                while (await client.get("/health")).json()["requests_in_flight"] < 12:
                    await asyncio.sleep(0.005)
                os.kill(victim, signal.SIGKILL)
                while [*(await client.get("/ready")).json()["replicas"].values()].count("serving") == 2:
                    await asyncio.sleep(0.005)
                during = outcomes["whole"]
                await until_ready(client)
                assert outcomes["whole"] > during  # the other one went on
                is_over.set()
            assert (await client.get("/ready")).status_code == 200

    asyncio.run(load())
    assert outcomes["lost"] >= 1 and outcomes.keys() <= {"whole", "lost"}, outcomes
    with httpx.Client(base_url=router.url, timeout=60) as client:
        assert sorted(counted(client, "octavo:router_restarts_total").values()) == [0, 1]
        assert sum(counted(client, "octavo:router_requests_lost_total").values()) == outcomes["lost"]
    router.popen.send_signal(signal.SIGTERM)
    code, log = router.end()
    assert code == 0 and re.search(r"replica \d was killed by signal 9; it starts again in 1 s", log), log


def outcome_of(answer: httpx.Response) -> str:
    """How a request ended: an answer without any end is an error of the client library."""
    is_lost = '"code":"replica_lost"' in answer.text
    if answer.headers["content-type"].startswith("text/event-stream"):
        assert answer.text.endswith("data: [DONE]\n\n")
        assert is_lost or '"finish_reason":"length"' in answer.text
    else:
        assert answer.status_code == (502 if is_lost else 200), answer.text
    return "lost" if is_lost else "whole"


@pytest.mark.nightly
def test_a_replica_whose_tensor_parallel_rank_is_killed_is_started_again_and_all_drain(checkpoint: Path) -> None:
    with two_replicas(checkpoint, "--tensor-parallel-size", "2") as router:
        router.wait_until_ready()
        both_ready(router.url)
        victim = next(pid for each in children(router.popen.pid) for pid in children(each) if is_rank(pid))
        os.kill(victim, signal.SIGKILL)

        async def ask() -> Counter[int]:
            statuses: Counter[int] = Counter()
            async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
                while 500 not in statuses:  # the replica finds out by its next step
                    answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 4})
                    statuses[answer.status_code] += 1
                while [*(await client.get("/ready")).json()["replicas"].values()].count("serving") == 2:
                    await asyncio.sleep(0.05)
                await until_ready(client)
            return statuses

        assert asyncio.run(ask()).keys() <= {200, 500}
        replicas = children(router.popen.pid)
        ranks = [pid for each in replicas for pid in children(each) if is_rank(pid)]
        assert (len(replicas), len(ranks)) == (2, 2)
        asyncio.run(drain(router))
        code, log = router.end()
        assert code == 0 and re.search(r"replica \d ended with exit code 1; it starts again in 1 s", log), log
        assert "requests routed; 0 lost" in log and not any(map(is_running, (*replicas, *ranks)))


@pytest.mark.nightly
def test_a_second_signal_ends_what_is_unfinished(router: Process) -> None:
    router.wait_until_ready()
    both_ready(router.url)

    async def stop() -> list[httpx.Response]:
        fields = {"prompt": "a", "max_tokens": 500, "n": 64, "ignore_eos": True}
        async with httpx.AsyncClient(base_url=router.url, timeout=60) as client:
            posts = [client.post("/v1/completions", json=fields | {"stream": stream}) for stream in (True, False)]
            asking = [asyncio.create_task(post) for post in posts]
            while (await client.get("/health")).json()["requests_in_flight"] < 2:
                await asyncio.sleep(0.005)
            for _ in range(2):
                router.popen.send_signal(signal.SIGINT)
                while (await client.get("/health")).json()["status"] != "draining":
                    await asyncio.sleep(0.005)
            return await asyncio.gather(*asking)

    streamed, whole = asyncio.run(stop())
    assert streamed.text.endswith("data: [DONE]\n\n") and '"error"' in streamed.text
    assert whole.status_code == 503 and "shut down" in whole.text
    code, log = router.end()
    assert code == 1 and "2 requests are ended by a second signal" in log, log


@pytest.mark.nightly
def test_replicas_end_with_a_router_that_is_killed(router: Process) -> None:
    router.wait_until_ready()
    both_ready(router.url)
    pids = children(router.popen.pid)
    assert len(pids) == 2
    router.popen.kill()
    router.end()  # reads standard error to its end, which the replicas have open too

    async def wait() -> None:
        async with asyncio.timeout(30):
            while any(Path(f"/proc/{pid}").exists() for pid in pids):
                await asyncio.sleep(0.05)

    asyncio.run(wait())


@pytest.mark.slow
def test_two_replicas_sleep_and_take_new_weights_together(checkpoint: Path, tmp_path: Path) -> None:
    """A damaged byte is refused at both; one that is killed afterwards gets no requests before the next update."""
    model = make_model("llama", "bf16", "bf16", vocab_size=VOCAB, num_layers=1, seed=1)
    save_model(model, tmp_path / "new", tokenizer=byte_tokenizer())
    reader = SafetensorsReader(tmp_path / "new")
    tensors = {name: reader.load(name) for name in reader.entries}
    data, key = as_bytes(tensors), {"Authorization": "Bearer admin"}
    options = ("--admin-key", "admin", "--weights-dir", str(tmp_path))

    with two_replicas(checkpoint, *options) as router, httpx.Client(timeout=120) as client:
        router.wait_until_ready()
        both_ready(router.url)

        def post(path: str, status: int = 200, **given: Any) -> Any:
            kind = {"Content-Type": "application/octet-stream"} if "content" in given else {}
            answer = client.post(f"{router.url}/admin/{path}", headers=key | kind, **given)
            assert answer.status_code == status, answer.text
            return answer.json()

        def texts() -> set[str]:
            """Of several requests, which both replicas get."""
            body = {"max_tokens": 8, "temperature": 0, "ignore_eos": True}
            posts = [client.post(f"{router.url}/v1/completions", json=body | {"prompt": "sea"}) for _ in range(4)]
            return {answer.json()["choices"][0]["text"] for answer in posts}

        def upload(content: bytes, status: int) -> str:
            update = post("weight_update", json={"tensors": manifest_of(tensors)})["id"]
            post(f"weight_update/{update}/bytes?offset=0", status, content=content)
            return f"weight_update/{update}"

        (old,) = texts()
        upload(data[:999] + bytes([data[999] ^ 1]) + data[1000:], 400)
        assert texts() == {old}
        update = upload(data, 200)
        assert post("sleep") == {"status": "asleep"}
        assert client.post(f"{router.url}/v1/completions", json={"prompt": "a"}).status_code == 503
        assert post(f"{update}/commit", json={"running": "keep"})["replicas"].keys() == {"0", "1"}
        os.kill(children(router.popen.pid)[0], signal.SIGKILL)
        sleeping = {"asleep"}
        while {*client.get(f"{router.url}/ready").json()["replicas"].values()} == sleeping:
            time.sleep(0.02)
        while {*client.get(f"{router.url}/ready").json()["replicas"].values()} != sleeping:
            time.sleep(0.1)
        assert post("wake") == {"status": "serving"}
        states = client.get(f"{router.url}/ready").json()["replicas"].values()
        assert sorted(states) == ["outdated", "serving"]
        (new,) = texts()
        assert new != old
        post("update_weights", json={"path": "new"})
        both_ready(router.url)
        assert texts() == {new}
        routed = counted(client, "octavo:router_requests_routed_total", f"{router.url}/metrics")
        assert min(routed.values()) > 0
        router.popen.send_signal(signal.SIGTERM)
        code, log = router.end()
        assert code == 0, log
