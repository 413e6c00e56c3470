"""A small random model behind a real server on a free port, in a thread of this process."""

import asyncio
import concurrent.futures
import functools
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx

from octavo import LLM
from octavo.models import Decoder, Tokenizer, train_bpe
from octavo.serve.engine import Engine
from octavo.serve.engine.request import Phase
from octavo.serve.engine.sampler import most_logprobs, report
from octavo.serve.http import ServerConfig, build_app
from octavo.serve.http.server import DrainingServer, bind, settings_of
from octavo.serve.http.service import Service
from tests.serve.random_models import make_model

VOCAB = 320  # more ids than the tokenizer has: the rest has no text
NAME = "tiny"


@functools.cache
def byte_tokenizer() -> Tokenizer:
    return train_bpe(["hello world, tell me a story of the sea and the sky and 1234567890"] * 3, 290)


def make_server_model(seed: int = 0) -> Decoder:
    """Of one layer: what a server adds to an engine knows of none."""
    return make_model("llama", "rowwise", seed=seed, vocab_size=VOCAB, num_layers=1)


def make_engine(tokenizer: Tokenizer | None = None, **limits: Any) -> Engine:
    """An exact engine of its own model, with the same weights every time."""
    defaults = {"max_num_seqs": 8, "max_num_batched_tokens": 256, "num_kv_pages": 40, "max_model_len": 256}
    model = make_server_model()
    return LLM(model, tokenizer or byte_tokenizer(), **{**defaults, **limits}).engine


class QuickServer(DrainingServer):
    """One that looks every 5 ms whether to end, instead of every 100."""

    async def main_loop(self) -> None:
        while not await self.on_tick(0):
            await asyncio.sleep(0.005)


class Running:
    """A server that runs, and a client of its."""

    def __init__(self, server: DrainingServer, service: Service, port: int, thread: threading.Thread) -> None:
        self.server, self.service, self.thread = server, service, thread
        self.url = f"http://127.0.0.1:{port}"
        self.client = httpx.Client(base_url=self.url, timeout=60)

    def stop(self) -> None:
        """What SIGTERM does."""
        tasks_loop = self.service.engine._tasks_loop
        assert tasks_loop is not None, "the server has started"
        tasks_loop.call_soon_threadsafe(self.server.stop)

    @property
    def engine(self) -> Engine:
        return self.service.engine.loop.engine

    def post(self, path: str, /, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return self.client.post(path, json=fields, headers=headers)

    def post_meanwhile(
        self, path: str, /, headers: dict[str, str] | None = None, **fields: Any
    ) -> concurrent.futures.Future[httpx.Response]:
        """post from a thread of its own."""
        future: concurrent.futures.Future[httpx.Response] = concurrent.futures.Future()
        threading.Thread(target=lambda: future.set_result(self.post(path, headers, **fields))).start()
        return future

    def complete(self, **fields: Any) -> dict[str, Any]:
        """A completion that must succeed."""
        answer = self.post("/v1/completions", **fields)
        assert answer.status_code == 200, answer.text
        content: dict[str, Any] = answer.json()
        return content

    def wait_until(self, condition: Callable[[], bool], timeout_s: float = 30.0) -> None:
        """Wait for something that another thread does."""
        pause = threading.Event()
        for _ in range(int(timeout_s / 0.01)):
            if condition():
                return
            pause.wait(0.01)
        raise AssertionError("it did not come about in time")

    def assert_at_rest(self) -> None:
        """Nothing is open, and every page came back."""
        loop = self.service.engine.loop
        self.wait_until(lambda: loop.num_open == 0)
        assert not self.engine.has_unfinished
        assert self.engine.page_manager.num_free_pages == self.engine.page_manager.num_pages
        self.engine.check_integrity()


@contextmanager
def script(server: Running, ids: list[int]) -> Iterator[None]:
    """Within, every sequence's tokens are these, whatever the model says; their logprobs are the model's."""
    runner = server.engine.model_runner

    def forced(chunks: Any) -> Any:
        return [ids[min(chunk.end - chunk.sequence.prompt_len, len(ids) - 1)] for chunk in chunks if chunk.is_last]

    def sample_script(logits: Any, chunks: Any, slots: Any, plan: Any) -> Any:
        rows = runner._tensor(slots)
        tokens = runner._tensor(forced(chunks))
        runner.slots.last_token[rows] = tokens
        temperature = runner.slots.controls(rows).temperature
        return report(logits, tokens, temperature, most_logprobs([chunk.sequence for chunk in chunks]))

    runner._sample = sample_script  # type: ignore[method-assign]
    try:
        yield
    finally:
        del runner._sample


@contextmanager
def running(
    build: Callable[[], Engine] = make_engine, wait: bool = True, ends_with_engine: bool = False, **config: Any
) -> Iterator[Running]:
    """Start a server, stop it at the end as SIGTERM would."""
    app = build_app(build, ServerConfig(**{"model_names": (NAME,), "drain_timeout_s": 20.0, **config}))
    service: Service = app.state.service
    settings = settings_of(app, service.config)
    settings.timeout_graceful_shutdown = 5
    loop, drain_timeout_s = service.engine.loop, service.config.drain_timeout_s
    server = QuickServer(settings, loop, drain_timeout_s, service.schemas.stop, ends_with_engine=ends_with_engine)
    listener = bind("127.0.0.1", 0)
    port = listener.getsockname()[1]  # a server that fails at once closes it
    thread = threading.Thread(target=lambda: asyncio.run(server.serve(sockets=[listener])))
    thread.start()
    it = Running(server, service, port, thread)
    try:
        it.wait_until(lambda: server.started or not thread.is_alive())
        if wait:
            it.wait_until(lambda: service.engine.loop.phase is not Phase.STARTING)
        yield it
    finally:
        it.client.close()
        if thread.is_alive():
            it.stop()
        thread.join(30)
        listener.close()
        assert not thread.is_alive(), "the server did not end"
