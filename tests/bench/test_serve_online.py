"""The load generator against octavo's own server in this process, and against servers that do not answer."""

import dataclasses
import itertools
import math
import random
import threading
import time
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import pytest

pytest.importorskip("httpx")
pytest.importorskip("uvicorn")

from bench import run_benchmark
from bench.clocks import ClockSamples
from bench.record import Record
from bench.serve.measure import OutOfTimeError
from bench.serve.online import _WARMUP_REQUESTS, Load, OnlineAnswer, OnlineRun, Target, _schedule, run_load
from bench.serve.rows import add_online
from bench.serve_options import ServeOptions
from octavo.errors import BackendError, ConfigError
from tests.assertions import assert_raises
from tests.bench.quick import options, rows
from tests.serve.http.running import VOCAB, running

LOAD = Load(rate=100.0, num_requests=6, prompt_len=20, output_len=5, vocab_size=VOCAB)


def test_all_tokens_are_timed() -> None:
    with running() as server:
        run = run_load(Target(server.url), LOAD, math.inf)
        server.assert_at_rest()
    assert run.errors == []
    assert [(a.num_tokens, len(a.gaps_s)) for a in run.done] == [(5, 4)] * 6
    assert all(0 < a.ttft_s < run.seconds for a in run.done)
    record = Record("serve", "what", device="cpu")
    add_online(record, "x", [run])
    values = {row["metric"]: row["value"] for row in record.rows}
    assert values["errors"] == 0
    assert values["output throughput"] == pytest.approx(30 / run.seconds, rel=1e-3)


def test_rows_have_the_median_of_several_runs_and_its_spread() -> None:
    def run(gap_s: float, seconds: float) -> OnlineRun:
        answers = [OnlineAnswer(0.1, (gap_s,) * 4, 5) for _ in range(6)]
        clocks = ClockSamples([1000.0 * gap_s], [500.0], [False])
        return OnlineRun(LOAD, [*answers, OnlineAnswer(error="gone")], seconds, 60.0, clocks)

    record = Record("serve", "what", device="cpu")
    add_online(record, "x", [run(0.01, 2.0), run(0.02, 3.0), run(0.03, 4.0)])
    rows = {row["metric"]: (row["value"], row["p20"], row["p80"]) for row in record.rows}
    assert rows["output throughput"] == (10.0, 8.5, 13.0)
    assert rows["inter-token latency, p99"] == (20.0, 14.0, 26.0)
    assert rows["goodput"] == (2.0, 1.7, 2.6)
    assert (rows["runs"][0], rows["errors"][0], rows["SM clock"][0]) == (3, 3, 20.0)


def test_lengths_are_drawn_and_an_answer_may_come_at_once() -> None:
    mixed = dataclasses.replace(LOAD, num_requests=8, min_len=2)
    with running() as server:
        runs = {
            stream: run_load(Target(server.url), dataclasses.replace(mixed, stream=stream), math.inf)
            for stream in (True, False)
        }
    lengths = [a.num_tokens for a in runs[True].done]
    assert lengths == [a.num_tokens for a in runs[False].done]
    assert 2 <= min(lengths) < max(lengths) <= 5 and len(lengths) == 8
    assert [len(a.gaps_s) for a in runs[True].done] == [n - 1 for n in lengths]
    assert all(a.gaps_s == () for a in runs[False].done)


def test_the_command_measures_a_server_that_is_given(tmp_path: Path) -> None:
    with running() as server:
        assert run_benchmark("serve", options(tmp_path, workloads=("online",), url=server.url, rate=50.0))
        server.assert_at_rest()
    found = rows(tmp_path, "serve-url")
    assert {case for case, _ in found} == {f"{server.url} online 50/s, 16 in, 4 out: server given"}
    assert {"goodput", "errors", "time to first token, p99"} < {metric for _, metric in found}


def test_lengths_and_a_key_are_what_the_command_was_given(tmp_path: Path) -> None:
    with running(api_keys=("secret",)) as server:
        given = {"num_requests": 2, "prompt_len": 30, "output_len": 7, "api_key": "secret"}
        asked = options(tmp_path, workloads=("online",), url=server.url, rate=50.0, **given)
        assert run_benchmark("serve", asked)
        assert server.engine.stats.output_tokens == 7 * (2 + _WARMUP_REQUESTS)
        with pytest.raises(BackendError, match=r"wants another key \(401\); see --api-key"):
            run_load(Target(server.url, "wrong"), LOAD, math.inf)
    [case] = {case for case, _ in rows(tmp_path, "serve-url")}
    assert case.endswith("online 50/s, 30 in, 7 out: server given")


def test_options_that_mean_nothing_together_are_refused() -> None:
    for name, asked in {
        "--api-key goes with --url": {"workloads": ("online",), "api_key": "x"},
        "--prompt-len and --output-len are of the workload online": {"workloads": ("cold-start",), "prompt_len": 3},
        "--output-len must be > 0, got 0": {"workloads": ("online",), "output_len": 0},
        "--ready-timeout must be > 0": {"ready_timeout_s": 0.0},
    }.items():
        assert_raises(ConfigError, name, ServeOptions, **asked)


def test_a_server_that_is_never_ready_is_waited_for_as_long_as_asked_or_until_it_is_gone() -> None:
    began, url = time.perf_counter(), "http://127.0.0.1:9"
    said = r"at http://127.0.0.1:9 within 0.1 s \(--ready-timeout\)"
    assert_raises(BackendError, said, run_load, Target(url, ready_timeout_s=0.1), LOAD, math.inf)
    gone = Target(url, is_up=iter([True, False]).__next__)
    assert_raises(BackendError, "ended before it was ready", run_load, gone, LOAD, math.inf)
    assert time.perf_counter() - began < 10


def test_a_load_that_comes_too_late_is_no_result() -> None:
    with running() as server, pytest.raises(OutOfTimeError):
        run_load(Target(server.url), Load(0.001, 3, 20, 5, VOCAB), time.perf_counter() + 0.3)


def test_arrivals_have_the_rate() -> None:
    due = [d for d, _ in _schedule(8.0, [{}] * 4001, random.Random(0))]
    gaps = [later - earlier for earlier, later in itertools.pairwise(due)]
    assert min(gaps) > 0 and sum(gaps) / len(gaps) == pytest.approx(1 / 8, rel=0.05)
    assert due[0] <= time.perf_counter()


def test_refusals_are_counted() -> None:
    with running(max_num_waiting=0) as server:
        loop = server.service.engine.loop
        run = run_load(Target(server.url), Load(1e6, 40, 20, 5, VOCAB), math.inf)
        server.wait_until(lambda: loop.num_open == 0)
    assert run.errors
    assert all(error.startswith("429") for error in run.errors)
    assert len(run.done) + len(run.errors) == 40


def test_good_requests_are_those_within_both_limits() -> None:
    answers = [OnlineAnswer(0.1, (0.01, 0.05), 3), OnlineAnswer(0.7, (0.01,), 2), OnlineAnswer(0.1, (0.09,), 2)]
    run = OnlineRun(LOAD, [*answers, OnlineAnswer(error="x")], seconds=2.0)
    assert (run.goodput, len(run.done), run.errors) == (0.5, 3, ["x"])


class _Foreign(BaseHTTPRequestHandler):
    """Another server: no /ready, several tokens an event, an error in mid-stream for every third request."""

    count = 0

    def do_GET(self) -> None:
        found = self.path == "/v1/models"
        self._answer(200 if found else 404, b'{"data": [{"id": "m"}]}')

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        type(self).count += 1
        end = b'data: {"error": "broken"}\n\n' if self.count % 3 == 0 else b""
        usage = b'data: {"choices": [], "usage": {"completion_tokens": 5}}\n\n'
        chunk = b'data: {"choices": [{"text": "ab"}]}\n\n'
        self._answer(200, b": hello\n\n" + chunk * 3 + end + usage + b"data: [DONE]\n\n")

    def _answer(self, status: int, body: bytes) -> None:
        self.send_response(status)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        pass


def test_another_server_will_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.serve.online._WARMUP_REQUESTS", 2)
    with HTTPServer(("127.0.0.1", 0), _Foreign) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        run = run_load(Target(f"http://127.0.0.1:{server.server_port}/"), LOAD, math.inf)
        server.shutdown()
        thread.join()
    assert run.errors == ["broken"] * 2
    assert [(a.num_tokens, len(a.gaps_s)) for a in run.done] == [(5, 2)] * 4
