"""Hostile JSON schemas: tried in workers that can be killed, within limits, while all others are served."""

import asyncio
import contextlib
import json
import os
import signal
import statistics
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from bench.serve.hostile_load import limit_s, reference
from octavo import LLM, SamplingParams, save_model
from octavo.serve import ParameterError
from octavo.serve.engine import grammar as grammar_module
from tests.quiet import cores_alone
from tests.serve.http.running import VOCAB, Running, byte_tokenizer, make_engine, make_server_model, running
from tests.serve.http.test_chaos import served
from tests.serve.random_models import make_model

DEEP = 700
PERSON = {"type": "object", "properties": {"name": {"type": "string", "maxLength": 5}}, "required": ["name"]}


def hostile(number: int = 0, count: int = 35) -> dict[str, Any]:
    """A schema of 1.9 KB that compiles for over a minute; each number another one."""
    patterns = [{"type": "string", "pattern": f"^.*[a-z]{{{i}}}.*$"} for i in range(1, count + 1)]
    return {"title": str(number), "allOf": patterns}


def nested() -> dict[str, Any]:
    """Of 28 KB, and deep enough to overflow the stack of a thread."""
    defs: dict[str, Any] = {f"{i}": {"allOf": [{"$ref": f"#/$defs/{i + 1}"}]} for i in range(DEEP)}
    return {"$ref": "#/$defs/0", "$defs": defs | {f"{DEEP}": {"type": "integer"}}}


def fields(schema: dict[str, Any], **others: Any) -> dict[str, Any]:
    form = {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}
    return {"prompt": "a", "max_tokens": 4, "response_format": form} | others


def ask(server: Running, schema: dict[str, Any]) -> httpx.Response:
    return server.post("/v1/completions", **fields(schema))


def refusal(answer: httpx.Response, status: int = 400) -> str:
    assert answer.status_code == status, answer.text
    message: str = answer.json()["error"]["message"]
    assert "\n" not in message and len(message) < 500
    return message


def workers() -> set[int]:
    """The processes in which this process tries schemas: those with llguidance that have no child."""
    parents: dict[int, int] = {}
    for folder in Path("/proc").iterdir():
        with contextlib.suppress(OSError, ValueError):
            stat = (folder / "stat").read_text().rpartition(")")[2].split()
            if stat[0] != "Z":
                parents[int(folder.name)] = int(stat[1])
    ours = {os.getpid()}
    while more := {process for process, parent in parents.items() if parent in ours} - ours:
        ours |= more
    found = set()
    for process in ours - {parents[process] for process in ours}:
        with contextlib.suppress(OSError):
            maps = Path(f"/proc/{process}/maps").read_text()
            if "llguidance" in maps and "libtorch" not in maps and parents[process] != os.getpid():
                found.add(process)
    return found


def is_busy(process: int) -> bool:
    """Whether one of its threads computes, and it has for 0.1 s; none does of one that waits for work."""
    stats = []
    with contextlib.suppress(OSError):  # it has ended
        stats = [file.read_text().rpartition(")")[2].split() for file in Path(f"/proc/{process}/task").glob("*/stat")]
    ticks = sum(int(stat[11]) + int(stat[12]) for stat in stats)
    return any(stat[0] == "R" for stat in stats) and ticks >= os.sysconf("SC_CLK_TCK") / 10


@pytest.fixture(scope="module")
def hasty() -> Iterator[Running]:
    """A server that gives a schema half a second."""
    with running(schema_timeout_s=0.5) as server:
        yield server


def test_workers_start_at_the_first_schema_and_end_with_the_server() -> None:
    others = workers()  # of a server that other tests of this process share
    with running() as server:
        server.complete(prompt="a", max_tokens=2)
        assert workers() == others
        assert ask(server, PERSON).status_code == 200
        (worker,) = workers() - others
        kinds = [os.readlink(f"/proc/{worker}/fd/{fd}").partition(":")[0] for fd in os.listdir(f"/proc/{worker}/fd")]
        assert {*kinds} <= {"pipe", "/dev/null", "socket"}
        assert kinds.count("socket") == 1, "its own; none of the server's"
        maps = Path(f"/proc/{worker}/maps").read_text()
        assert "libtorch" not in maps and "llguidance" in maps
    assert workers() == others


def test_a_schema_beyond_the_time_is_refused_and_the_next_one_taken(hasty: Running) -> None:
    began = time.monotonic()
    assert "must compile within 0.5 s" in refusal(ask(hasty, hostile()))
    assert time.monotonic() - began < 5
    assert ask(hasty, PERSON | {"title": "after"}).status_code == 200


@pytest.mark.slow
def test_a_schema_beyond_the_memory_is_refused() -> None:
    with running(max_schema_memory_bytes=1 << 28) as server:
        assert "within 256 MiB" in refusal(ask(server, hostile()))
        assert ask(server, PERSON).status_code == 200


def test_a_schema_that_overflows_the_stack_ends_no_server(hasty: Running) -> None:
    assert "not nest too deep" in refusal(ask(hasty, nested()))
    assert ask(hasty, {"type": "boolean"}).status_code == 200


def test_a_schema_beyond_the_size_is_refused_before_it_is_tried(server: Running) -> None:
    assert "at most 65536 bytes" in refusal(ask(server, {"enum": ["x" * 1000] * 100}))


@pytest.mark.parametrize(
    "schema",
    [
        {"$ref": "#"},
        {"$ref": ""},
        {"allOf": [{"$ref": "#"}]},
        {"anyOf": [{"$ref": "#"}]},
        {"$ref": "#/$defs/a", "$defs": {"a": {"$ref": "#/$defs/b"}, "b": {"$ref": "#/$defs/a"}}},
        {"$ref": 5},
        {"$ref": "#/nowhere"},
        {"$ref": "http://127.0.0.1:1/schema"},
        {"$ref": "#/$defs/%zz"},
        hostile(count=12),
    ],
)
def test_bad_references_and_patterns_get_one_line(hasty: Running, schema: dict[str, Any]) -> None:
    assert "response_format cannot be kept to: " in refusal(ask(hasty, schema))


def test_a_worker_that_is_killed_is_replaced() -> None:
    ends = [
        (signal.SIGKILL, 503, "killed from outside; try again"),
        (signal.SIGALRM, 400, "must compile within 10 s"),  # a server's own limits, as its clock and kernel keep them
        (signal.SIGSEGV, 400, "must compile within 1024 MiB"),
    ]
    with running() as server:
        for number, status, refused in ends:
            assert ask(server, PERSON | {"title": number.name}).status_code == 200
            answer = server.post_meanwhile("/v1/completions", **fields(hostile(number)))
            server.wait_until(lambda: any(map(is_busy, workers())))
            for worker in filter(is_busy, workers()):  # the end of an idle one would be told to the next schema
                os.kill(worker, number)
            assert refused in refusal(answer.result(30), status)
        assert ask(server, {"type": "integer"}).status_code == 200
        for worker in workers():  # one that waits for work
            os.kill(worker, signal.SIGKILL)
        server.wait_until(lambda: not workers())
        assert ask(server, {"type": "null"}).status_code == 200


def test_a_client_that_goes_frees_its_worker_and_the_queue_is_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.serve.http.schema_trials.MAX_WAITING", 1)

    async def attack(server: Running) -> None:
        trials = server.service.schemas
        async with httpx.AsyncClient(base_url=server.url, timeout=30) as client:
            tasks = [asyncio.create_task(client.post("/v1/completions", json=fields(hostile(i)))) for i in range(3)]
            twin = asyncio.create_task(client.post("/v1/completions", json=fields(hostile(0))))
            while sum(trial.num_requests for trial in trials._trials.values()) < 4:
                await asyncio.sleep(0.01)
            assert len(trials._trials) == 3, "the twin shares a trial"
            full = await client.post("/v1/completions", json=fields(hostile(3)))
            assert "1 wait" in refusal(full, 429) and "Retry-After" in full.headers
            known = await client.post("/v1/completions", json=fields(PERSON))
            assert known.status_code == 200, "a schema that was compiled before waits for none"
            for task in (*tasks, twin):
                task.cancel()
            await asyncio.gather(*tasks, twin, return_exceptions=True)
            began = time.monotonic()
            while trials._trials:
                assert time.monotonic() < began + 5
                await asyncio.sleep(0.01)
            assert (await client.post("/v1/completions", json=fields({"type": "integer"}))).status_code == 200

    with running() as server:
        assert ask(server, PERSON).status_code == 200
        asyncio.run(attack(server))


def test_a_server_that_stops_waits_for_no_schema() -> None:
    with running() as server:
        answer = server.post_meanwhile("/v1/completions", **fields(hostile()))
        server.wait_until(lambda: any(map(is_busy, workers())))
        began = time.monotonic()
        server.stop()
        assert answer.result(30).status_code == 503, answer.result().text
        server.thread.join(30)
        assert time.monotonic() - began < 5


def test_nothing_is_compiled_under_a_lock(monkeypatch: pytest.MonkeyPatch) -> None:
    factory = make_engine().grammars
    factory.compile("{}")
    is_compiling, may_end = threading.Event(), threading.Event()

    def slow(vocabulary: Any, schema: str) -> Any:
        is_compiling.set()
        assert may_end.wait(30)
        return factory.find("{}").matcher  # type: ignore[union-attr]

    monkeypatch.setattr(grammar_module, "compile_schema", slow)
    thread = threading.Thread(target=factory.compile, args=('{"type": "null"}',))
    thread.start()
    assert is_compiling.wait(30)
    others = threading.Thread(target=factory.make, args=("{}",))
    others.start()
    others.join(10)
    assert not others.is_alive(), "a schema that is kept waits for none"
    may_end.set()
    thread.join(30)


def test_compiled_schemas_are_bounded_by_their_memory() -> None:
    factory = make_engine().grammars
    kept = factory.compile('{"type": "null"}', num_bytes=800 << 20)
    factory.compile('{"type": "boolean"}', num_bytes=200 << 20)
    assert factory.has_room(100 << 20) and factory.find('{"type": "boolean"}') is None, "it made way"
    assert not factory.has_room(300 << 20), "the other one is in use"
    assert factory.find('{"type": "null"}') is kept


def test_in_process_a_bad_schema_is_refused_before_anything_runs() -> None:
    llm = LLM(make_server_model(), byte_tokenizer(), num_kv_pages=8)
    with pytest.raises(ParameterError, match="no JSON fits it"):
        llm.generate("a", SamplingParams(json_schema={"$ref": "#"}))
    assert not llm.engine.has_unfinished


@pytest.mark.nightly
def test_a_dozen_hostile_schemas_hold_nobody_up(tmp_path: Path) -> None:
    path = tmp_path / "tiny"
    save_model(make_model("llama", "bf16", "bf16", vocab_size=VOCAB, num_layers=1), path, tokenizer=byte_tokenizer())
    # Another program of this machine may have been what was slow: three tries, as bench.serve.hostile_load has them.
    for _ in range(3):
        with cores_alone(), served(str(path), "--port", "0", "--device", "cpu") as process:
            process.wait_until_ready()
            figures = asyncio.run(siege(process.url))
            process.popen.send_signal(signal.SIGTERM)
            code, log = process.end()
        print(json.dumps(figures))
        assert code == 0, log
        assert figures["refused"] == 12, figures
        limits = {kind: limit_s(figures[f"quiet {kind} p99"], figures["slowdown"]) for kind in ("text", "schema")}
        if all(figures[f"{kind} p99"] <= limit for kind, limit in limits.items()):
            return
    pytest.fail(f"held up in each of three sieges: {figures}")


async def siege(url: str, timeout_s: float = 90) -> dict[str, float]:
    """Seconds that ten clients of text and one of a known schema wait, in quiet and beside a dozen hostile schemas."""
    figures: dict[str, float] = {}
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=timeout_s, limits=limits) as client:
        for _ in range(3):
            assert (await client.post("/v1/completions", json=fields(PERSON))).status_code == 200

        async def honest(body: dict[str, Any], seconds: list[float], end: float) -> None:
            while (began := time.perf_counter()) < end:
                assert (await client.post("/v1/completions", json=body)).status_code == 200
                seconds.append(time.perf_counter() - began)
                await asyncio.sleep(0.05)

        async def measure(name: str, duration_s: float) -> float:
            """The mean time of the reference's work."""
            texts: list[float] = []
            schemas: list[float] = []
            text = {"prompt": "hello world", "max_tokens": 4}
            async with reference() as work:
                end = time.perf_counter() + duration_s
                known = honest(fields(PERSON), schemas, end)
                await asyncio.gather(*(honest(text, texts, end) for _ in range(10)), known)
            for kind, seconds in (("text", texts), ("schema", schemas)):
                figures[f"{name}{kind} first"] = round(max(seconds[: len(seconds) // 10 + 1]), 3)
                figures[f"{name}{kind} p99"] = round(statistics.quantiles(seconds, n=100)[-1], 3)
            return statistics.mean(work)

        quiet = await measure("quiet ", 5)
        attack = [asyncio.create_task(client.post("/v1/completions", json=fields(hostile(i)))) for i in range(12)]
        await asyncio.sleep(1)
        figures["slowdown"] = round(await measure("", 15) / quiet, 2)
        figures["refused"] = sum(answer.status_code == 400 for answer in await asyncio.gather(*attack))
    return figures
