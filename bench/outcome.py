"""What a benchmark hands back, and how it ends: the record on disk, complaints in print."""

import dataclasses
from pathlib import Path

from bench.options import BenchOptions
from bench.record import Record
from bench.report import format_record


@dataclasses.dataclass(frozen=True)
class Outcome:
    """A record, and what is wrong with the run: variants that failed, results that are off."""

    record: Record
    complaints: list[str] = dataclasses.field(default_factory=list)


def finish_gate(record: Record, complaints: list[str], folder: Path, commit: str | None, *, is_whole: bool) -> int:
    """Print a gate's table and complaints, write the record of a whole run; the exit code."""
    print(f"{record.what}\n{format_record(record)}")
    for complaint in complaints:
        print(f"GATE: {complaint}")
    if not is_whole:
        print("too short or incomplete a run to be a record: nothing was written, the gate does not count")
        return 0
    print(f"record: {record.save(folder, commit)}")
    return 1 if complaints else 0


def finish(outcome: Outcome, options: BenchOptions) -> bool:
    """Print complaints and write the record where the run is to have one; whether all went well.

    A run with complaints is written only where a folder was asked for.
    """
    if options.filters and not outcome.record.rows:
        outcome.complaints.append(f"no case of this benchmark has any of {', '.join(options.filters)} in its name")
    for complaint in outcome.complaints:
        print(f"COMPLAINT: {complaint}")
    if options.device == "cpu":
        print("on a CPU FP8 is emulated and machines are shared: this says that it runs, the times say nothing")
    folder = options.out if outcome.complaints else options.record_folder
    if folder is None:
        why = "complaints" if outcome.complaints else "a partial run"
        print(f"{why}, and no --out: no record was written")
    else:
        print(f"record: {outcome.record.save(folder, options.commit)}")
    return not outcome.complaints
