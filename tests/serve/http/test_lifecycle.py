"""Start, health, metrics, sleep, failing and hanging steps, disconnects, drain: every request gets its end."""

import asyncio
import logging
import threading
import time

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from octavo.errors import ConfigError
from octavo.serve.engine import Engine
from octavo.serve.engine.request import LostRankError, Phase
from octavo.serve.http import ServerConfig, build_app
from octavo.serve.http import server as server_module
from octavo.serve.http.server import bind
from tests.serve.http.running import Running, make_engine, running

LONG = {"prompt": "a", "max_tokens": 50, "ignore_eos": True}


def metrics(server: Running) -> dict[str, float]:
    """Every sample without its labels, those of one name added up."""
    sums: dict[str, float] = {}
    for family in text_string_to_metric_families(server.client.get("/metrics").text):
        for sample in family.samples:
            assert sample.labels["model_name"] == "tiny"
            sums[sample.name] = sums.get(sample.name, 0) + sample.value
    return sums


def test_metrics_count_what_happened() -> None:
    with running() as server:
        server.complete(prompt=["hello", "sea"], n=2, max_tokens=5, ignore_eos=True)
        server.post("/v1/completions", prompt="a", n=-1)
        num_prompt_tokens = sum(server.post("/tokenize", prompt=text).json()["count"] for text in ("hello", "sea"))
        seen = metrics(server)
    assert seen["vllm:generation_tokens_total"] == 20
    assert seen["vllm:prompt_tokens_total"] == num_prompt_tokens
    assert seen["vllm:request_success_total"] == 4
    assert seen["vllm:time_to_first_token_seconds_count"] == 4
    assert seen["vllm:inter_token_latency_seconds_count"] == 16
    assert seen["vllm:e2e_request_latency_seconds_count"] == 2
    assert seen["vllm:request_queue_time_seconds_count"] == 2
    assert seen["vllm:request_generation_tokens_sum"] == 20
    prefill, decode, whole = (f"vllm:request_{name}_time_seconds" for name in ("prefill", "decode", "inference"))
    assert [seen[f"{name}_count"] for name in (prefill, decode, whole)] == [2, 2, 2]
    assert seen[f"{prefill}_sum"] > 0 and seen[f"{decode}_sum"] > 0
    assert seen[f"{whole}_sum"] == pytest.approx(seen[f"{prefill}_sum"] + seen[f"{decode}_sum"])
    ended = seen["vllm:e2e_request_latency_seconds_sum"] - seen["vllm:request_queue_time_seconds_sum"]
    assert seen[f"{whole}_sum"] == pytest.approx(ended)
    assert seen["vllm:e2e_request_latency_seconds_sum"] >= seen["vllm:request_queue_time_seconds_sum"] > 0
    assert seen["vllm:num_requests_running"] == seen["vllm:num_requests_waiting"] == 0
    assert seen["vllm:kv_cache_usage_perc"] == 0
    assert seen["octavo:requests_refused_total"] == 1
    for name in ("vllm:num_preemptions_total", "vllm:prefix_cache_queries_total", "vllm:prefix_cache_hits_total"):
        assert name in seen


def test_the_page_loads_nothing_from_elsewhere(server: Running) -> None:
    answer = server.client.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    assert "default-src 'self'" in answer.headers["content-security-policy"]
    assert "http://" not in answer.text and "https://" not in answer.text
    assert "v1/completions" in answer.text


def test_the_schema_lists_every_route(server: Running) -> None:
    paths = server.client.get("/openapi.json").json()["paths"]
    assert {"/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize", "/health", "/metrics"} <= set(paths)
    assert server.client.get("/version").json().keys() == {"version"}
    (card,) = server.client.get("/v1/models").json()["data"]
    assert server.client.get(f"/v1/models/{card['id']}").json() == card
    assert card["max_model_len"] == server.engine.max_model_len


def test_503_while_starting_and_none_later() -> None:
    go_on = threading.Event()

    def build() -> Engine:
        assert go_on.wait(30)
        return make_engine()

    with running(build, wait=False) as server:
        try:
            assert server.client.get("/health").status_code == 200
            assert server.client.get("/ready").json() == {"status": "starting"}
            assert server.client.get("/metrics").status_code == 200
            assert server.client.get("/v1/models").json()["data"][0]["max_model_len"] is None
            for path in ("/v1/completions", "/tokenize"):
                refused = server.post(path, prompt="a")
                assert refused.status_code == 503
                assert int(refused.headers["Retry-After"]) >= 1
        finally:
            go_on.set()
        server.wait_until(lambda: server.client.get("/ready").status_code == 200)
        server.complete(prompt="a", max_tokens=1)


def test_the_log_says_when_it_is_ready(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO)

    def build() -> Engine:
        assert "ready" not in caplog.text
        return make_engine()

    with server_module._interpreter_restored():
        server_module._built(build)
    assert "ready: the model was loaded in" in caplog.text
    with server_module.bind("127.0.0.1", 0) as listener:
        server_module.announce(listener, "127.0.0.1", ServerConfig(model_names=("tiny",)))
        port = listener.getsockname()[1]
    assert f"http://127.0.0.1:{port} for tiny; requests get 503 until" in caplog.text


def test_an_engine_that_cannot_be_built_ends_the_server() -> None:
    def build() -> Engine:
        raise ConfigError("no such model")

    with running(build, wait=False) as server:
        server.wait_until(lambda: not server.thread.is_alive())
    assert isinstance(server.service.engine.loop.error, ConfigError)


def test_sleep_finishes_what_was_admitted_and_wake_serves_again() -> None:
    admin = {"Authorization": "Bearer admin"}
    with running(admin_key="admin") as server:
        fields = {**LONG, "max_tokens": 40}
        answer = server.post_meanwhile("/v1/completions", **fields)
        server.wait_until(lambda: server.service.engine.loop.num_open == 1)
        assert server.post("/admin/wake", headers=admin).status_code == 503
        assert server.post("/admin/sleep", headers=admin).json() == {"status": "asleep"}
        assert answer.result(30).json()["usage"]["completion_tokens"] == 40
        assert server.engine.model_runner.layers == []
        assert server.post("/v1/completions", prompt="a").status_code == 503
        assert server.post("/admin/sleep", headers=admin).status_code == 503
        assert server.client.get("/ready").json() == {"status": "asleep"}
        assert server.post("/admin/wake", headers=admin).json() == {"status": "serving"}
        again = server.complete(**fields, seed=1)
        assert again["usage"]["completion_tokens"] == 40
        server.assert_at_rest()


def test_reset_prefix_cache() -> None:
    fields = {"prompt": "hello world, tell me a story of the sea " * 8, "max_tokens": 1}
    with running(admin_key="admin") as server:
        server.complete(**fields)
        server.complete(**fields)
        hits = server.engine.stats.num_prefix_hit_tokens
        assert hits > 0
        assert server.post("/admin/reset_prefix_cache", headers={"Authorization": "Bearer admin"}).status_code == 200
        server.complete(**fields)
        assert server.engine.stats.num_prefix_hit_tokens == hits
        server.assert_at_rest()


def test_a_failing_step_ends_its_requests_and_no_others(monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(chunks: object) -> None:
        raise RuntimeError("out of luck")

    with running() as server:
        fields = {"prompt": "hello", "seed": 1, "max_tokens": 4}
        before = server.complete(**fields)["choices"]
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.model_runner, "launch", fail)
            answer = server.post("/v1/completions", n=2, **fields)
            assert answer.status_code == 500
            assert "out of luck" in answer.json()["error"]["message"]
            streamed = server.post("/v1/chat/completions", messages=[{"role": "user", "content": "a"}], stream=True)
            assert '"error":{"message":"the engine failed' in streamed.text
            assert streamed.text.endswith("data: [DONE]\n\n")
        assert server.client.get("/health").status_code == 200
        assert server.complete(**fields)["choices"] == before
        server.assert_at_rest()
        with monkeypatch.context() as patch:
            patch.setattr(server.engine.model_runner, "launch", fail)
            statuses = [server.post("/v1/completions", **fields).status_code for _ in range(4)]
        assert statuses == [500, 500, 500, 503]  # three in a row: the engine is given up
        assert server.client.get("/health").status_code == 503
        assert server.client.get("/ready").status_code == 503
        assert server.client.get("/metrics").status_code == 200


def test_a_replica_ends_with_its_engine_and_answers_before(monkeypatch: pytest.MonkeyPatch) -> None:
    def lose(chunks: object) -> None:
        raise LostRankError("a rank was killed")

    with running(ends_with_engine=True) as server:
        monkeypatch.setattr(server.engine.model_runner, "launch", lose)
        streamed = server.post_meanwhile("/v1/completions", prompt="a", stream=True)
        server.wait_until(lambda: not server.thread.is_alive())
        assert "a rank was killed" in streamed.result(30).text
        assert streamed.result().text.endswith("data: [DONE]\n\n")


def test_a_hanging_step_makes_it_unhealthy(monkeypatch: pytest.MonkeyPatch) -> None:
    go_on = threading.Event()
    with running(step_timeout_s=0.2) as server:
        run = server.engine.model_runner.launch

        def hang(chunks: list) -> object:  # type: ignore[type-arg]
            go_on.wait(30)
            return run(chunks)

        monkeypatch.setattr(server.engine.model_runner, "launch", hang)
        answer = server.post_meanwhile("/v1/completions", prompt="a")
        try:
            server.wait_until(lambda: server.client.get("/health").status_code == 503)
            assert server.client.get("/health").json()["step_age_s"] > 0.2
            assert server.post("/v1/completions", prompt="a").status_code == 503
        finally:
            go_on.set()
        assert answer.result(30).status_code == 200
        monkeypatch.undo()
        assert server.client.get("/health").status_code == 200
        server.complete(prompt="a", max_tokens=2)


def test_a_drain_finishes_what_was_admitted_and_refuses_what_is_new() -> None:
    with running() as server:
        answer = server.post_meanwhile("/v1/completions", **LONG)
        loop = server.service.engine.loop
        server.wait_until(lambda: loop.num_open == 1)
        server.stop()
        server.wait_until(lambda: loop.phase is not Phase.SERVING)
        assert server.post("/v1/completions", prompt="a").status_code == 503
        assert server.client.get("/health").status_code == 200
        assert answer.result(30).json()["usage"]["completion_tokens"] == 50
        assert loop.join(60)
        assert loop.num_ended == {"stop": 0, "length": 1, "abort": 0, "error": 0}


def test_a_drain_that_takes_too_long_ends_requests_with_an_error() -> None:
    with running(drain_timeout_s=0.05) as server:
        posts = ({**LONG, "n": 8}, {**LONG, "stream": True})
        futures = [server.post_meanwhile("/v1/completions", **fields) for fields in posts]
        server.wait_until(lambda: server.service.engine.loop.num_open == 9)
        server.stop()
        answers = [future.result(30) for future in futures]
        assert [answer.status_code for answer in answers] == [503, 200]
        assert all("shut down" in answer.text for answer in answers)
        server.assert_at_rest()
    assert server.server.was_cut_short


def test_an_address_in_use_is_a_clear_error() -> None:
    listener = bind("127.0.0.1", 0)
    listener.listen()
    with listener, pytest.raises(ConfigError, match="choose another host or port"):
        bind("127.0.0.1", listener.getsockname()[1])


def test_in_process_without_a_socket() -> None:
    """The app alone, under httpx's ASGI transport."""
    app = build_app(make_engine, ServerConfig(model_names=("tiny",)))

    async def use() -> tuple[int, int]:
        transport = httpx.ASGITransport(app)
        async with (
            app.router.lifespan_context(app),
            httpx.AsyncClient(transport=transport, base_url="http://octavo") as client,
        ):
            began = time.monotonic()
            while (await client.get("/ready")).status_code != 200 and time.monotonic() < began + 30:
                await asyncio.sleep(0.01)
            answer = await client.post("/v1/completions", json={"prompt": "a", "max_tokens": 3, "ignore_eos": True})
            return answer.status_code, answer.json()["usage"]["completion_tokens"]

    assert asyncio.run(use()) == (200, 3)
