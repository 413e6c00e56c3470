"""Rows of the record of `octavo bench serve`: what each measurement adds."""

from collections.abc import Sequence

from bench.clocks import add_clocks
from bench.record import Record, summarize
from bench.report import SERVED_THROUGHPUT, THROUGHPUT
from bench.serve.cold_start import ColdStart
from bench.serve.first_batch import FirstBatches
from bench.serve.measure import PERCENTILES, EngineRun, median_run, percentile
from bench.serve.online import OnlineRun


def add_runs(
    record: Record, case: str, runs: Sequence[EngineRun], *, peer: str | None, peer_value: float | None
) -> None:
    """Rows of a workload that ran once or more: throughput and latency with spread, the rest of the median run."""
    run = median_run(runs)
    spread = summarize([r.output_tokens_per_s for r in runs])
    low, high = (spread.p20_us, spread.p80_us) if len(runs) > 1 else (None, None)
    record.add(case, THROUGHPUT, "tokens/s", spread.median_us, low, high, peer, peer_value)
    record.add(case, "runs", "runs", len(runs))
    record.add(case, "total throughput", "tokens/s", run.total_tokens_per_s)
    add_latency(record, case, [(r.ttft_s, r.gaps_s) for r in runs])
    record.add(case, "steps", "steps", run.num_steps)
    record.add(case, "preemptions", "sequences", run.num_preemptions)
    if run.joules is not None:
        record.add(case, "energy an output token", "J", run.joules / run.num_output_tokens)
    add_clocks(record, case, [r.clocks for r in runs])


def add_latency(record: Record, case: str, runs: Sequence[tuple[Sequence[float], Sequence[float]]]) -> None:
    """Percentiles of the time to the first token and of the time between two, the medians of the runs' own.

    Args:
        runs: of each, the seconds to the first token of its requests, and all seconds between two.
    """
    for name, unit, factor, index in (("time to first token", "s", 1.0, 0), ("inter-token latency", "ms", 1e3, 1)):
        found = [run[index] for run in runs if run[index]]
        for percent in PERCENTILES if found else ():
            values = [percentile(each, percent) * factor for each in found]
            _add_spread(record, case, f"{name}, p{percent}", unit, values)


def add_online(record: Record, case: str, runs: Sequence[OnlineRun]) -> None:
    """Rows of runs under load; latencies are of the requests that succeeded."""
    _add_spread(record, case, "goodput", "requests/s", [run.goodput for run in runs])
    _add_answers(record, case, THROUGHPUT, runs)


def add_served(record: Record, case: str, runs: Sequence[OnlineRun]) -> None:
    """Rows of runs of requests that all came at once."""
    _add_answers(record, case, SERVED_THROUGHPUT, runs)


def _add_answers(record: Record, case: str, metric: str, runs: Sequence[OnlineRun]) -> None:
    _add_spread(record, case, metric, "tokens/s", [run.output_tokens_per_s for run in runs])
    record.add(case, "runs", "runs", len(runs))
    record.add(case, "errors", "requests", sum(len(run.errors) for run in runs))
    latencies = [([a.ttft_s for a in run.done], [gap for a in run.done for gap in a.gaps_s]) for run in runs]
    add_latency(record, case, latencies)
    joules = [run.joules / run.num_output_tokens for run in runs if run.joules is not None and run.done]
    if joules:
        _add_spread(record, case, "energy an output token", "J", joules)
    add_clocks(record, case, [run.clocks for run in runs])


def _add_spread(record: Record, case: str, metric: str, unit: str, values: list[float]) -> None:
    """The median over the runs, with its fifths where there are several."""
    spread = summarize(values)
    fifths = (spread.p20_us, spread.p80_us) if len(values) > 1 else ()
    record.add(case, metric, unit, spread.median_us, *fifths)


def add_first_batches(record: Record, case: str, first: FirstBatches) -> None:
    """Rows of a fresh process's first two batches."""
    seconds = {"first batch": first.first_s, "second batch": first.second_s, "engine made": first.build_s}
    for what, value in seconds.items():
        record.add(case, f"{what} of a fresh process", "s", value)
    rate = first.num_output_tokens / first.first_s
    second = ("the second batch of the same process", first.num_output_tokens / first.second_s)
    record.add(case, "throughput of the first batch", "tokens/s", rate, None, None, *second)


def add_cold_start(record: Record, case: str, starts: Sequence[ColdStart]) -> None:
    """Rows of starts of a process: the median of each stage, and the largest peak."""
    _add_spread(record, case, "process start to first token", "s", [start.seconds for start in starts])
    for stage, name in (("start and imports", "start_s"), ("load", "load_s"), ("request", "request_s")):
        _add_spread(record, case, f"{stage}, of that", "s", [getattr(start, name) for start in starts])
    if largest := max(start.load_peak_bytes for start in starts):
        peak, weights = largest / 2**30, starts[0].bf16_bytes / 2**30
        record.add(case, "peak memory of the load", "GiB", peak, peer="the weights in bf16", peer_value=weights)
