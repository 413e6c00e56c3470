"""Rows of the record of `octavo bench serve`: what each measurement adds."""

from collections.abc import Sequence

from bench.record import Record, summarize
from bench.report import SERVED_THROUGHPUT, THROUGHPUT
from bench.serve.cold_start import ColdStart
from bench.serve.first_batch import FirstBatches
from bench.serve.measure import PERCENTILES, EngineRun, median_run, percentile
from bench.serve.online import OnlineRun


def add_runs(
    record: Record, case: str, runs: Sequence[EngineRun], *, peer: str | None, peer_value: float | None
) -> None:
    """Rows of a workload that ran once or more: throughput with its spread, everything else of the median run."""
    run = median_run(runs)
    spread = summarize([r.output_tokens_per_s for r in runs])
    low, high = (spread.p20_us, spread.p80_us) if len(runs) > 1 else (None, None)
    record.add(case, THROUGHPUT, "tokens/s", spread.median_us, low, high, peer, peer_value)
    record.add(case, "runs", "runs", len(runs))
    record.add(case, "total throughput", "tokens/s", run.total_tokens_per_s)
    add_latency(record, case, run.ttft_s, run.gaps_s)
    record.add(case, "steps", "steps", run.num_steps)
    record.add(case, "preemptions", "sequences", run.num_preemptions)
    if run.joules is not None:
        record.add(case, "energy an output token", "J", run.joules / run.num_output_tokens)


def add_latency(record: Record, case: str, ttft_s: list[float], gaps_s: list[float]) -> None:
    """Percentiles of the time to the first token and of the time between two."""
    for percent in PERCENTILES:
        record.add(case, f"time to first token, p{percent}", "s", percentile(ttft_s, percent))
    for percent in PERCENTILES if gaps_s else ():
        record.add(case, f"inter-token latency, p{percent}", "ms", percentile(gaps_s, percent) * 1e3)


def add_online(record: Record, case: str, run: OnlineRun) -> None:
    """Rows of a run under load; latencies are of the requests that succeeded."""
    record.add(case, "goodput", "requests/s", run.goodput)
    record.add(case, THROUGHPUT, "tokens/s", run.output_tokens_per_s)
    _add_answers(record, case, run)


def add_served(record: Record, case: str, run: OnlineRun) -> None:
    """Rows of a run of requests that all came at once."""
    record.add(case, SERVED_THROUGHPUT, "tokens/s", run.output_tokens_per_s)
    _add_answers(record, case, run)


def _add_answers(record: Record, case: str, run: OnlineRun) -> None:
    record.add(case, "errors", "requests", len(run.errors))
    if run.done:
        add_latency(record, case, [a.ttft_s for a in run.done], [gap for a in run.done for gap in a.gaps_s])
    if run.joules is not None and run.done:
        record.add(case, "energy an output token", "J", run.joules / run.num_output_tokens)


def add_first_batches(record: Record, case: str, first: FirstBatches) -> None:
    """Rows of a fresh process's first two batches."""
    seconds = {"first batch": first.first_s, "second batch": first.second_s, "engine made": first.build_s}
    for what, value in seconds.items():
        record.add(case, f"{what} of a fresh process", "s", value)
    rate = first.num_output_tokens / first.first_s
    second = ("the second batch of the same process", first.num_output_tokens / first.second_s)
    record.add(case, "throughput of the first batch", "tokens/s", rate, None, None, *second)


def add_cold_start(record: Record, case: str, start: ColdStart) -> None:
    """Rows of a process's start."""
    record.add(case, "process start to first token", "s", start.seconds)
    for stage, seconds in (("start and imports", start.start_s), ("load", start.load_s), ("request", start.request_s)):
        record.add(case, f"{stage}, of that", "s", seconds)
    if start.load_peak_bytes:
        peak, weights = start.load_peak_bytes / 2**30, start.bf16_bytes / 2**30
        record.add(case, "peak memory of the load", "GiB", peak, peer="the weights in bf16", peer_value=weights)
