"""The record of `octavo bench serve`: rows of each arm, kept on disk as they come and over several commands."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from bench.options import BenchOptions
from bench.record import Record, summarize
from bench.serve.cold_start import ColdStart
from bench.serve.first_batch import FirstBatches
from bench.serve.measure import PERCENTILES, Run, median_run, percentile
from bench.serve.online import OnlineRun

THROUGHPUT, BATCH = "output throughput", "largest batch"
SERVED_THROUGHPUT = "throughput through the server"
# what follows from other rows of the record
_OVER_BF16 = "throughput over bf16's"
_OVER_FAST = "throughput over the fast mode's"
_BATCH_OVER_BF16 = "largest batch over bf16's"
_RATIOS = (_OVER_BF16, _OVER_FAST, _BATCH_OVER_BF16)
_SAME = ("device", "torch", "triton", "commit")


class ServeResults:
    """Rows by case ("WORKLOAD: ARM"); a case that is measured again replaces its old rows.

    Args:
        options: where the record goes. Rows that lie there already stay if they are of the same tree, card and
            libraries. Every case is written there as soon as it is measured, where --out names the folder.
        what: see Record. name: of the record.
    """

    def __init__(self, options: BenchOptions, what: str, name: str = "serve") -> None:
        is_here = options.serve.url is None
        # another machine's figures have a record of their own, whose device is the one that made the load
        self.record = Record(name if is_here else f"{name}-url", what, device=options.device if is_here else "cpu")
        self._options = options
        if options.out is not None and (path := options.out / f"{self.record.name}.json").is_file():
            self._take_over(path)

    def _take_over(self, path: Path) -> None:
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ours = self.record.document(self._options.commit)
        if others := [name for name in _SAME if earlier[name] != ours[name]]:
            print(f"{path} is of another {' and '.join(others)} and is replaced")
        else:
            self.record.rows = earlier["rows"]
            print(f"{path}: {len(self.record.rows)} rows stay where they are not measured again")

    def fresh(self) -> Record:
        """An empty record to measure into."""
        return Record(self.record.name, self.record.what, device=self.record.device)

    def take(self, fresh: Record) -> None:
        """Add what was measured, in place of the same cases' old rows."""
        cases = {row["case"] for row in fresh.rows}
        self.record.rows = [row for row in self.record.rows if row["case"] not in cases] + fresh.rows

    def flush(self) -> None:
        """Work out what follows from several rows, bring a workload's together, write the record where --out says."""
        self.record.rows = with_ratios(self.record.rows)
        workloads = list(dict.fromkeys(_workload(row) for row in self.record.rows))
        self.record.rows.sort(key=lambda row: workloads.index(_workload(row)))
        if self._options.out is not None:
            self.record.save(self._options.out, self._options.commit)


def add_runs(record: Record, case: str, runs: Sequence[Run], *, peer: str | None, peer_value: float | None) -> None:
    """Rows of a workload that ran once or more: throughput with its spread, everything else of the median run."""
    run = median_run(runs)
    spread = summarize([r.output_tokens_per_s for r in runs])
    low, high = (spread.p20_us, spread.p80_us) if len(runs) > 1 else (None, None)
    record.add(case, THROUGHPUT, "tokens/s", run.output_tokens_per_s, low, high, peer, peer_value)
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
    record.add(case, "throughput of the first batch", "tokens/s", rate, None, None, *_second(first))


def _second(first: FirstBatches) -> tuple[str, float]:
    return "the second batch of the same process", first.num_output_tokens / first.second_s


def add_cold_start(record: Record, case: str, start: ColdStart) -> None:
    """Rows of a process's start."""
    record.add(case, "process start to first token", "s", start.seconds)
    for stage, seconds in (("start and imports", start.start_s), ("load", start.load_s), ("request", start.request_s)):
        record.add(case, f"{stage}, of that", "s", seconds)
    if start.load_peak_bytes:
        peak, weights = start.load_peak_bytes / 2**30, start.bf16_bytes / 2**30
        record.add(case, "peak memory of the load", "GiB", peak, peer="the weights in bf16", peer_value=weights)


def _workload(row: dict[str, str | float | None]) -> str:
    return str(row["case"]).partition(": ")[0]


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows with those of arms of one workload against each other worked out again."""
    record = Record("", "", rows=[row for row in rows if row["metric"] not in _RATIOS])
    values = {(str(r["case"]), str(r["metric"])): r["value"] for r in record.rows}
    for case in dict.fromkeys(str(row["case"]) for row in record.rows):
        workload, _, arm = case.partition(": ")
        pairs = [(_OVER_BF16, THROUGHPUT, "octavo bf16"), (_BATCH_OVER_BF16, BATCH, "octavo bf16")]
        if arm.endswith(", exact"):
            pairs.append((_OVER_FAST, THROUGHPUT, arm.removesuffix(", exact")))
        for metric, source, other in pairs:
            ours, theirs = values.get((case, source)), values.get((f"{workload}: {other}", source))
            if isinstance(ours, float) and isinstance(theirs, float) and arm != other:
                record.add(case, metric, "x", ours / theirs, peer=other, peer_value=1.0)
    return record.rows
