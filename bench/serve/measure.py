"""Requests through an engine in this process: when each token came, and what that makes of latency and throughput."""

import dataclasses
import itertools
import time
from collections.abc import Sequence as Values

from bench.clocks import ClockSamples, sample_clocks
from bench.energy import measure_energy
from bench.serve.workloads import Requests
from octavo.serve import SamplingParams
from octavo.serve.engine import Engine
from octavo.serve.engine.request import RequestState

TEMPERATURE = 1.0  # random weights at temperature 0 would say one token for ever
ENERGY_SAMPLE_S = 0.5  # so that sampling takes nothing from the steps
_WARMUP_STEPS, _WARMUP_PROMPT_LEN, _WARMUP_TOKENS = 1.5, 16, 8
PERCENTILES = (50, 90, 99)


class OutOfTimeError(Exception):
    """The time limit came before the end; there is no result."""


@dataclasses.dataclass(frozen=True)
class EngineRun:
    """What came of a workload.

    Attributes:
        seconds: from the first request to the last token.
        ttft_s: seconds to the first token, one a request.
        gaps_s: seconds between two tokens of a request, all of them.
        joules: that the GPU drew; None where it is unknown, and energy_source says why.
        clocks: the GPU's clock and power.
    """

    seconds: float
    ttft_s: list[float]
    gaps_s: list[float]
    num_prompt_tokens: int
    num_output_tokens: int
    num_steps: int
    num_preemptions: int
    joules: float | None
    energy_source: str
    clocks: ClockSamples = dataclasses.field(default_factory=ClockSamples)

    @property
    def output_tokens_per_s(self) -> float:
        return self.num_output_tokens / self.seconds

    @property
    def total_tokens_per_s(self) -> float:
        return (self.num_prompt_tokens + self.num_output_tokens) / self.seconds


def median_run(runs: Values[EngineRun]) -> EngineRun:
    """The one whose throughput is the median, of an even number the slower of the two."""
    return sorted(runs, key=lambda run: run.output_tokens_per_s)[(len(runs) - 1) // 2]


def percentile(values: Values[float], percent: float) -> float:
    """The smallest value that so many percent of all do not exceed; there is at least one."""
    ordered = sorted(values)
    return ordered[max(0, -int(-len(ordered) * percent // 100) - 1)]


def warm_up(engine: Engine, requests: Requests, deadline: float) -> None:
    """Get ready for the workload: its graphs, some of its prompts, then all its sequences with short ones.

    The prompts are ragged and together longer than a step, so that one is cut. The sequences end one after the other:
    the batch shrinks through every size that has kernels of its own.
    """
    engine.warm_up(len(requests), max(len(ids) + num_tokens for ids, num_tokens in requests))
    prompts, left = [], int(_WARMUP_STEPS * engine.config.max_num_batched_tokens)
    for i, (ids, _) in enumerate(requests):
        prompts.append((ids[: max(1, len(ids) - i)], _WARMUP_TOKENS))
        left -= len(ids)
        if left <= 0:
            break
    run_requests(engine, prompts, "cpu", deadline)
    shrinking = [(ids[:_WARMUP_PROMPT_LEN], 2 + i % 32) for i, (ids, _) in enumerate(requests)]
    run_requests(engine, shrinking, "cpu", deadline)


def run_requests(
    engine: Engine, requests: Requests, device: str, deadline: float, logprobs: int | None = None
) -> EngineRun:
    """Hand the engine all requests at once and step it to the end.

    Args:
        device: whose energy and clock are read; "cpu" for none.
        deadline: time.perf_counter() at which to give up.
        logprobs: as in SamplingParams.
    Raises:
        OutOfTimeError: at the deadline; the engine is left without requests.
        AssertionError: a request ended with another number of tokens than it was to have.
    """
    stats = engine.stats
    num_steps, num_preemptions = stats.num_steps, stats.num_preemptions
    params = {
        n: SamplingParams(temperature=TEMPERATURE, max_tokens=n, ignore_eos=True, logprobs=logprobs)
        for n in {n for _, n in requests}
    }
    with sample_clocks(device) as clocks, measure_energy(device, sample_s=ENERGY_SAMPLE_S) as energy:
        began = time.perf_counter()
        admitted = [engine.add_request(ids, params[n]) for ids, n in requests]
        times = _step_to_end(engine, admitted, deadline)
        seconds = time.perf_counter() - began
    got, wanted = [request.num_output_tokens for request in admitted], [n for _, n in requests]
    assert got == wanted == [len(t) for t in times], f"requests were to have {wanted} tokens, have {got}"
    return EngineRun(
        seconds=seconds,
        ttft_s=[t[0] - began for t in times],
        gaps_s=[later - earlier for t in times for earlier, later in itertools.pairwise(t)],
        num_prompt_tokens=sum(len(ids) for ids, _ in requests),
        num_output_tokens=sum(wanted),
        num_steps=stats.num_steps - num_steps,
        num_preemptions=stats.num_preemptions - num_preemptions,
        joules=energy.joules,
        energy_source=energy.source,
        clocks=clocks,
    )


def _step_to_end(engine: Engine, admitted: list[RequestState], deadline: float) -> list[list[float]]:
    times: dict[object, list[float]] = {request.sequences[0]: [] for request in admitted}
    while engine.has_unfinished:
        advanced = engine.step()
        now = time.perf_counter()
        for seq in advanced:
            times[seq].append(now)
        if now > deadline:
            for request in admitted:
                engine.abort(request)
            raise OutOfTimeError
    return list(times.values())
