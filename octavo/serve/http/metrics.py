"""Prometheus metrics under vLLM's names, so that dashboards made for vLLM show them; octavo's own begin with octavo."""

import dataclasses
import math
from bisect import bisect_left
from collections.abc import Iterator
from functools import partial
from itertools import accumulate

from prometheus_client import CollectorRegistry, Counter, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily, Metric
from prometheus_client.utils import floatToGoString

from octavo.serve.engine.loop import Deltas, EngineLoop
from octavo.serve.engine.request import Delta, RequestState

CONTENT_TYPE = "text/plain; version=0.0.4; charset=utf-8"

_LATENCY_S = (0.001, 0.005, 0.01, 0.02, 0.04, 0.06, 0.08, 0.1, 0.25, 0.5, 0.75, 1.0, 2.5, 5.0, 7.5, 10, 20, 40, 80, 160)
_TOKEN_S = (0.001, 0.0025, 0.005, 0.01, 0.015, 0.02, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1.0, 2.5)
_REQUEST_S = (0.1, 0.3, 0.5, 0.8, 1.0, 1.5, 2.0, 2.5, 5.0, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960)
_TOKENS = (1, 2, 5, 10, 20, 50, 100, 200, 500, 1000, 2000, 5000, 10000, 20000, 50000, 100000)
_HISTOGRAMS = {
    "time_to_first_token_seconds": ("From a request's arrival to a sequence's first token.", _LATENCY_S),
    "inter_token_latency_seconds": ("Between two tokens of a sequence.", _TOKEN_S),
    "e2e_request_latency_seconds": ("From a request's arrival to its end.", _REQUEST_S),
    "request_queue_time_seconds": ("From a request's arrival to its first step.", _REQUEST_S),
    "request_prefill_time_seconds": ("From a request's first step to its first token.", _REQUEST_S),
    "request_decode_time_seconds": ("From a request's first token to its last.", _REQUEST_S),
    "request_inference_time_seconds": ("From a request's first step to its end.", _REQUEST_S),
    "request_prompt_tokens": ("Prompt tokens of a request.", _TOKENS),
    "request_generation_tokens": ("Tokens generated for a request.", _TOKENS),
}


class Metrics:
    """Counts what the deltas of all requests say, and reads the engine when it is asked.

    Args:
        model_name: the label of every series.

    Attributes:
        weight_updates: how many were committed.
        weight_update_failures: how many came to nothing.
    """

    def __init__(self, model_name: str) -> None:
        self._model_name = model_name
        self._registry = CollectorRegistry()
        self._histograms = {name: _Histogram(name, model_name) for name in _HISTOGRAMS}
        for histogram in self._histograms.values():
            self._registry.register(histogram)  # type: ignore[arg-type]
        self._prompt_tokens = self._counter("vllm:prompt_tokens", "Prompt tokens of requests that began.")
        self._generation_tokens = self._counter("vllm:generation_tokens", "Tokens generated.")
        self.weight_updates = self._counter("octavo:weight_updates", "Weight updates committed.")
        self.weight_update_failures = self._counter("octavo:weight_update_failures", "Weight updates that failed.")
        self._success = Counter(
            "vllm:request_success", "Sequences ended.", ["model_name", "finished_reason"], registry=self._registry
        )
        self._refused = Counter(
            "octavo:requests_refused", "Requests refused.", ["model_name", "status"], registry=self._registry
        )
        self._progress: dict[RequestState, _Progress] = {}

    def watch(self, loop: EngineLoop) -> None:
        """Show an engine's own numbers too."""
        self._registry.register(_EngineNumbers(self._model_name, loop))  # type: ignore[arg-type]

    def observe(self, deltas: Deltas) -> None:
        """Count a step's deltas; all deltas of a request must come here, in order."""
        self._generation_tokens.inc(sum([bool(delta.token_ids) for _, delta in deltas]))
        for request, delta in deltas:
            self._observe_one(request, delta)

    def _observe_one(self, request: RequestState, delta: Delta) -> None:
        progress = self._progress.get(request)
        if progress is None:
            progress = self._progress[request] = _Progress(num_open=request.input.params.n)
        has_run = delta.token_ids or delta.finish_reason == "length"
        if has_run and not progress.has_begun:
            self._observe_start(request)
            progress.has_begun = True
        if delta.token_ids:
            self._observe_token(request, progress, delta)
        if delta.finish_reason is not None:
            self._success.labels(self._model_name, delta.finish_reason).inc()
            progress.num_open -= 1
        if progress.num_open == 0:
            self._observe_end(request, self._progress.pop(request), delta.time_s)

    def refused(self, status: int) -> None:
        """Count a request that was answered with an error."""
        self._refused.labels(self._model_name, str(status)).inc()

    def render(self) -> bytes:
        """The text that Prometheus reads."""
        return generate_latest(self._registry)

    def _observe_start(self, request: RequestState) -> None:
        self._prompt_tokens.inc(len(request.input.prompt_ids))
        if request.started_s is not None:
            self._histograms["request_queue_time_seconds"].observe(request.started_s - request.arrived_s)

    def _observe_token(self, request: RequestState, progress: "_Progress", delta: Delta) -> None:
        progress.num_tokens += 1
        if progress.first_token_s is None:
            progress.first_token_s = delta.time_s
        before = progress.last_token_s.get(delta.index)
        if before is None:
            self._histograms["time_to_first_token_seconds"].observe(delta.time_s - request.arrived_s)
        else:
            self._histograms["inter_token_latency_seconds"].observe(delta.time_s - before)
        progress.last_token_s[delta.index] = delta.time_s

    def _observe_end(self, request: RequestState, progress: "_Progress", time_s: float) -> None:
        self._histograms["e2e_request_latency_seconds"].observe(time_s - request.arrived_s)
        self._histograms["request_prompt_tokens"].observe(len(request.input.prompt_ids))
        self._histograms["request_generation_tokens"].observe(progress.num_tokens)
        if request.started_s is not None and progress.first_token_s is not None:
            last_token_s = max(progress.last_token_s.values())
            self._histograms["request_prefill_time_seconds"].observe(progress.first_token_s - request.started_s)
            self._histograms["request_decode_time_seconds"].observe(last_token_s - progress.first_token_s)
            self._histograms["request_inference_time_seconds"].observe(time_s - request.started_s)

    def _counter(self, name: str, text: str) -> Counter:
        return Counter(name, text, ["model_name"], registry=self._registry).labels(self._model_name)


@dataclasses.dataclass
class _Progress:
    """How far a request has come: its open sequences and tokens, the time of the first one and each sequence's last."""

    num_open: int
    has_begun: bool = False
    num_tokens: int = 0
    first_token_s: float | None = None
    last_token_s: dict[int, float] = dataclasses.field(default_factory=dict)


class _Histogram:
    """A histogram of _HISTOGRAMS for one thread: prometheus_client's takes two locks for each token."""

    def __init__(self, name: str, model_name: str) -> None:
        self._name, self._model_name = name, model_name
        self._text, bounds = _HISTOGRAMS[name]
        self._bounds = [*bounds, math.inf]
        self._counts, self._sum = [0] * len(self._bounds), 0.0

    def observe(self, value: float) -> None:
        self._counts[bisect_left(self._bounds, value)] += 1
        self._sum += value

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        family = HistogramMetricFamily(f"vllm:{self._name}", self._text, labels=["model_name"])
        counts = zip(map(floatToGoString, self._bounds), accumulate(self._counts), strict=True)
        family.add_metric([self._model_name], [*counts], self._sum)
        yield family


class _EngineNumbers:
    """Reads the engine's counters at every scrape."""

    def __init__(self, model_name: str, loop: EngineLoop) -> None:
        self._model_name, self._loop = model_name, loop

    def describe(self) -> list[Metric]:
        return []

    def collect(self) -> Iterator[Metric]:
        loop = self._loop
        gauge, total = partial(self._number, GaugeMetricFamily), partial(self._number, CounterMetricFamily)
        yield gauge("octavo:step_age_seconds", "Age of the step under way.", loop.step_age_s)
        yield gauge("octavo:sequences_open", "Sequences admitted and not ended.", loop.num_open)
        if not loop.is_built:
            return
        engine = loop.engine
        stats, num_running = engine.stats, len(engine.scheduler.running)
        num_waiting = max(0, loop.num_open - num_running)
        usage = stats.num_kv_pages_used / stats.num_kv_pages
        yield gauge("vllm:num_requests_running", "Sequences that run.", num_running)
        yield gauge("vllm:num_requests_waiting", "Sequences that wait.", num_waiting)
        yield gauge("vllm:kv_cache_usage_perc", "Share of the KV cache's pages in use; 1 is all.", usage)
        yield gauge("octavo:weight_version", "Version of the weights.", engine.weight_version)
        yield total("vllm:num_preemptions", "Sequences that lost their pages.", stats.num_preemptions)
        yield total("vllm:prefix_cache_queries", "Tokens looked up.", stats.num_prefix_query_tokens)
        yield total("vllm:prefix_cache_hits", "Tokens found.", stats.num_prefix_hit_tokens)
        yield total("octavo:engine_steps", "Forward passes.", stats.num_steps)

    def _number(
        self, kind: type[GaugeMetricFamily | CounterMetricFamily], name: str, text: str, value: float
    ) -> Metric:
        family = kind(name, text, labels=["model_name"])
        family.add_metric([self._model_name], value)
        return family
