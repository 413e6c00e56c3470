"""A session of `octavo bench serve` or `octavo bench rl`: its clock, its record, its variants tried one by one.

Rows reach the disk as they come and stay over several commands. What fails or comes too late leaves the rest alone.
"""

import abc
import json
import math
import time
import traceback
from collections.abc import Callable, Sequence
from typing import Any, Concatenate, ParamSpec

from bench.figures import SOURCE
from bench.options import ENGINE_RECIPE, FP8_RECIPES, BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import BATCH, STEP_TIME, THROUGHPUT, format_results
from bench.serve.host import EngineHost
from bench.serve.measure import OutOfTimeError
from bench.speed.ceilings import Ceilings, measure_ceilings
from octavo.errors import ConfigError

P = ParamSpec("P")
_SAME = ("device", "torch", "triton", "commit")  # of a record that another command goes on with
# Rows that follow from two others of one workload: the metric, what it is a ratio of, and the variant below the line
# (None: the same variant without exact mode).
_RATIOS = (
    ("throughput over bf16's", THROUGHPUT, "octavo bf16"),
    ("largest batch over bf16's", BATCH, "octavo bf16"),
    ("throughput over the fast mode's", THROUGHPUT, None),
    ("time over bf16's", STEP_TIME, "octavo bf16"),
    ("time over the inexact loop's", STEP_TIME, None),
)


class Session(abc.ABC):
    """One command.

    Args:
        name: of the benchmark and its record.
        host: whose engine is freed after a failure.

    Attributes:
        recipe: of variants in FP8, of which an engine has one: the first that was asked for, else serving's own.
        deadline: time.perf_counter() at which to be done.
        complaints: what went wrong so far.
        record: rows by case ("WORKLOAD: VARIANT"); a case that is measured again replaces its old rows.
    """

    def __init__(self, options: BenchOptions, name: str, host: type[EngineHost]) -> None:
        if options.filters:
            raise ConfigError(f"{name} chooses by --workload and --variant; leave --filter out")
        self.options, self.asked, self.name = options, options.serve, name
        self._began = time.perf_counter()
        self.deadline = self._began + (self.asked.time_limit_s or math.inf)
        self.recipe = ENGINE_RECIPE if options.recipes == FP8_RECIPES else options.recipes[0]
        self.host = host(options.device, self.recipe, quick=options.quick)
        self.complaints: list[str] = []

    def run(self) -> Outcome:
        """Go through the workloads, print a line at each start and end and a table, make the record."""
        ceilings = measure_ceilings(self.options.device, quick=self.options.quick) if self.asked.url is None else None
        if ceilings is not None:
            print(ceilings)
        self.open_record(self.describe(ceilings))
        self.go_through(ceilings)
        self.flush()
        print(format_results(self.record, self.name))
        return Outcome(self.record, self.complaints)

    @abc.abstractmethod
    def describe(self, ceilings: Ceilings | None) -> str:
        """What is measured and how; see Record."""

    @abc.abstractmethod
    def go_through(self, ceilings: Ceilings | None) -> None:
        """Try every variant that was asked for."""

    def attempt(self, what: str, action: Callable[P, str], *args: P.args, **kwargs: P.kwargs) -> None:
        """Do one thing, say when it starts and ends and how, and write what there is.

        Args:
            what: for people.
            action: returns what to print at its end.
        """
        self._say(f"start: {what}")
        ending = None
        try:
            if time.perf_counter() >= self.deadline:
                raise OutOfTimeError
            ending = action(*args, **kwargs)
        except OutOfTimeError:
            self._say(f"skipped, it does not fit into --time-limit {self.asked.time_limit_s:g}: {what}")
        except Exception as error:  # the other variants' figures are worth having; the exit code is 1
            self.complaints.append(f"{what}: {type(error).__name__}: {error}")
            traceback.print_exc()
        if ending is None:
            self.host.free()  # not while an error's frames hold what is to be freed
            return
        self.flush()
        self._say(f"end: {what}: {ending}")

    def measure(
        self, what: str, action: Callable[Concatenate[Record, P], str], *args: P.args, **kwargs: P.kwargs
    ) -> None:
        """The same for what adds rows to a record, its first argument; of a failure none of them stay."""

        def measured() -> str:
            fresh = self.fresh()
            ending = action(fresh, *args, **kwargs)
            self.take(fresh)
            return ending

        self.attempt(what, measured)

    def open_record(self, what: str) -> None:
        """Begin the record with the rows that lie in --out, if they are of the same tree, card and libraries."""
        is_here = self.asked.url is None
        # another machine's figures have a record of their own, whose device is the one that made the load
        name, device = (self.name, self.options.device) if is_here else (f"{self.name}-url", "cpu")
        self.record = Record(name, what, device=device)
        if self.options.out is None or not (path := self.options.out / f"{name}.json").is_file():
            return
        earlier: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        ours = self.record.document(self.options.commit)
        if others := [key for key in _SAME if earlier[key] != ours[key]]:
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
        if self.options.out is not None:
            self.record.save(self.options.out, self.options.commit)

    def _say(self, text: str) -> None:
        print(f"[{time.perf_counter() - self._began:6.1f} s] {text}", flush=True)


def _workload(row: dict[str, str | float | None]) -> str:
    return str(row["case"]).rpartition(": ")[0]


def with_ratios(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The rows, a workload's together, with those of variants of one commit against each other worked out again."""
    derived = {metric for metric, _, _ in _RATIOS}
    record = Record("", "", rows=[row for row in rows if row["metric"] not in derived])
    known: dict[tuple[str, str], dict[str, Any]] = {(r["case"], r["metric"]): r for r in rows}
    for case in dict.fromkeys(str(row["case"]) for row in record.rows):
        workload, _, variant = case.partition(": ")
        for metric, source, base in _RATIOS:
            other = base or variant.removesuffix(", exact")
            ours, theirs = known.get((case, source)), known.get((f"{workload}: {other}", source))
            if ours and theirs and variant != other and ours.get("commit") == theirs.get("commit"):
                record.add_ratio(case, metric, ours["value"] / theirs["value"], other)
                record.rows[-1] |= {key: ours[key] for key in SOURCE if key in ours}
    workloads = list(dict.fromkeys(map(_workload, record.rows)))
    return sorted(record.rows, key=lambda row: workloads.index(_workload(row)))
