"""A client under load: requests arrive at an OpenAI-compatible server by chance, at a given rate, and are streamed."""

import asyncio
import dataclasses
import itertools
import json
import random
import time
from collections.abc import AsyncIterator, Callable, Iterator
from typing import Any, NamedTuple

from bench.clocks import ClockSamples, sample_clocks
from bench.energy import measure_energy
from bench.serve.http_client import HTTP_ERRORS, Answer, Server
from bench.serve.measure import ENERGY_SAMPLE_S, OutOfTimeError
from bench.serve_options import DEFAULT_READY_S
from octavo.errors import BackendError

_POLL_S = 0.2
_FOREVER_S = 1e9
_GET_S, _REQUEST_S = 60.0, 3600.0
_NO_ENTRY = (401, 403)
_WARMUP_REQUESTS = 8


@dataclasses.dataclass(frozen=True)
class Load:
    """Poisson arrivals.

    Args:
        rate: requests a second.
        num_requests: of the timed ones.
        prompt_len: tokens of each, or of the longest.
        output_len: the same.
        vocab_size: prompts are random ids below it.
        max_ttft_s: a request is good if its first token came within it.
        max_gap_s: and if its others came on average within it after each other.
        min_len: tokens of the shortest prompt and the shortest answer, lengths being drawn evenly; None: all alike.
        stream: tokens as they come; else each answer is one event at its end.
    """

    rate: float
    num_requests: int
    prompt_len: int = 1000
    output_len: int = 200
    vocab_size: int = 50_000
    max_ttft_s: float = 0.6
    max_gap_s: float = 0.04
    min_len: int | None = None
    stream: bool = True

    def draw(self, longest: int, rng: random.Random) -> int:
        """Tokens of a prompt or an answer."""
        return longest if self.min_len is None else rng.randint(self.min_len, longest)


class Request(NamedTuple):
    """Its JSON, the tokens that are due, and whether they come as they are made."""

    body: bytes
    num_tokens: int
    is_streamed: bool


@dataclasses.dataclass(frozen=True)
class OnlineAnswer:
    """One request: seconds to the first event with a choice, seconds between these, tokens; error instead of them."""

    ttft_s: float = 0.0
    gaps_s: tuple[float, ...] = ()
    num_tokens: int = 0
    error: str | None = None


@dataclasses.dataclass(frozen=True)
class OnlineRun:
    """All answers, the seconds from the first arrival to the last token; joules, clock and power of the GPU here."""

    load: Load
    answers: list[OnlineAnswer]
    seconds: float
    joules: float | None = None
    clocks: ClockSamples = dataclasses.field(default_factory=ClockSamples)

    @property
    def done(self) -> list[OnlineAnswer]:
        return [a for a in self.answers if a.error is None]

    @property
    def errors(self) -> list[str]:
        return [a.error for a in self.answers if a.error is not None]

    @property
    def num_output_tokens(self) -> int:
        """Of requests that succeeded."""
        return sum(answer.num_tokens for answer in self.done)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def goodput(self) -> float:
        """Good requests a second."""
        return sum(self._is_good(a) for a in self.done) / self.seconds

    def _is_good(self, answer: OnlineAnswer) -> bool:
        mean_gap = sum(answer.gaps_s) / max(1, len(answer.gaps_s))
        return answer.ttft_s <= self.load.max_ttft_s and mean_gap <= self.load.max_gap_s


@dataclasses.dataclass(frozen=True)
class Target:
    """A server: its address, the key that it wants or None, and the seconds that it has to become ready.

    is_up: False once it will never answer.
    """

    url: str
    api_key: str | None = None
    ready_timeout_s: float = DEFAULT_READY_S
    is_up: Callable[[], bool] = lambda: True


def run_load(target: Target, load: Load, deadline: float, device: str = "cpu") -> OnlineRun:
    """Wait until the server is ready, warm it up, then send the load.

    Args:
        device: of this machine, whose energy and clock are read; "cpu" for none.
        deadline: time.perf_counter() at which to give up.
    Raises:
        BackendError: a server that does not become ready or refuses.
        OutOfTimeError: at the deadline.
    """
    return asyncio.run(_run(target, load, deadline, device))


async def _run(target: Target, load: Load, deadline: float, device: str) -> OnlineRun:
    server = Server(target.url, target.api_key)
    model = await _wait_for_model(server, deadline, target)
    rng = random.Random(0)
    requests = [_make_request(model, load, rng) for _ in range(_WARMUP_REQUESTS + load.num_requests)]
    first = await asyncio.gather(*(_ask(server, each) for each in requests[:_WARMUP_REQUESTS]))
    if wrong := [a.error for a in first if a.error is not None]:
        raise BackendError(f"the server at {target.url} does not answer: {wrong[0]}")
    with sample_clocks(device) as clocks, measure_energy(device, sample_s=ENERGY_SAMPLE_S) as energy:
        began = time.perf_counter()
        schedule = _schedule(load.rate, requests[_WARMUP_REQUESTS:], rng)
        arrivals = [asyncio.create_task(_ask_at(server, each, due)) for due, each in schedule]
        _, late = await asyncio.wait(arrivals, timeout=min(_FOREVER_S, max(0.0, deadline - began)))
        seconds = time.perf_counter() - began
    for task in late:
        task.cancel()
    if late:
        raise OutOfTimeError
    return OnlineRun(load, [task.result() for task in arrivals], seconds, energy.joules, clocks)


def _schedule(rate: float, requests: list[Request], rng: random.Random) -> Iterator[tuple[float, Request]]:
    """(time.perf_counter() of its arrival, request), the first at once."""
    due = time.perf_counter()
    for request in requests:
        yield due, request
        due += rng.expovariate(rate)


async def _ask_at(server: Server, request: Request, due: float) -> OnlineAnswer:
    await asyncio.sleep(due - time.perf_counter())
    return await _ask(server, request)


async def _get(server: Server, path: str) -> tuple[int, bytes]:
    async with asyncio.timeout(_GET_S), server.request(path) as answer:
        return answer.status, await answer.read()


async def _wait_for_model(server: Server, deadline: float, target: Target) -> str:
    """The name of the first model that the server has, as soon as it serves one."""
    reason, gives_up = "it was not asked", time.perf_counter() + target.ready_timeout_s
    is_up = True
    while time.perf_counter() < min(deadline, gives_up) and (is_up := target.is_up()):
        try:
            status, models = await _get(server, "/v1/models")
            ready, _ = await _get(server, "/ready")
            if status == 200 and ready in (200, 404):  # other servers have no /ready
                name: str = json.loads(models)["data"][0]["id"]
                return name
            if status in _NO_ENTRY:
                raise BackendError(f"{target.url} wants another key ({status}); see --api-key")
            reason = f"{status} at /v1/models, {ready} at /ready"
        except HTTP_ERRORS as error:
            reason = repr(error)
        await asyncio.sleep(_POLL_S)
    if time.perf_counter() >= deadline:
        raise OutOfTimeError
    if not is_up:
        raise BackendError(
            f"the process that was to serve {target.url} ended before it was ready; its log stands above"
        )
    raise BackendError(
        f"no server became ready at {target.url} within {target.ready_timeout_s:g} s (--ready-timeout): {reason}"
    )


def _make_request(model: str, load: Load, rng: random.Random) -> Request:
    """One request; ignore_eos is vLLM's and SGLang's name too."""
    num_tokens = load.draw(load.output_len, rng)
    fields = {
        "model": model,
        "prompt": rng.choices(range(load.vocab_size), k=load.draw(load.prompt_len, rng)),
        "max_tokens": num_tokens,
        "temperature": 1.0,
        "ignore_eos": True,
    }
    if load.stream:
        fields |= {"stream": True, "stream_options": {"include_usage": True}}
    return Request(json.dumps(fields).encode(), num_tokens, load.stream)


async def _ask(server: Server, request: Request) -> OnlineAnswer:
    """Send one request and note when the events of its answer come."""
    began = time.perf_counter()
    times: list[float] = []
    num_tokens = 0
    try:
        async with asyncio.timeout(_REQUEST_S), server.request("/v1/completions", request.body) as answer:
            if answer.status != 200:
                return OnlineAnswer(error=f"{answer.status}: {(await answer.read()).decode()[:200]}")
            async for event in _events(answer, is_streamed=request.is_streamed):
                if "error" in event:
                    return OnlineAnswer(error=str(event["error"]))
                if event.get("choices"):
                    times.append(time.perf_counter())
                if event.get("usage"):
                    num_tokens = event["usage"]["completion_tokens"]
    except HTTP_ERRORS as error:
        return OnlineAnswer(error=repr(error))
    if num_tokens != request.num_tokens or not times:
        return OnlineAnswer(error=f"{num_tokens} tokens came, {request.num_tokens} were due")
    gaps = tuple(later - earlier for earlier, later in itertools.pairwise(times))
    return OnlineAnswer(times[0] - began, gaps, num_tokens)


async def _events(answer: Answer, *, is_streamed: bool) -> AsyncIterator[dict[str, Any]]:
    """What a stream sends, or the one answer."""
    if not is_streamed:
        yield json.loads(await answer.read())
        return
    async for line in answer.lines():
        if line.startswith(b"data: ") and line != b"data: [DONE]":
            yield json.loads(line.removeprefix(b"data: "))
