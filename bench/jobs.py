"""The speed records' jobs: one process each, and how the records of those that share a file become one."""

import dataclasses
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.figures import SOURCE
from bench.session import with_ratios
from octavo.errors import DataError
from octavo.run.atomic import write_atomic

# Seconds of each on an H200, the process's start included: the longest begin first, and none that would end late.
SECONDS = {
    "gemm": 25, "quant": 40, "linear": 190, "layer": 80, "step": 480, "sizes": 150, "capacity": 190, "qdq": 60,
    "serve 8b-512x1000 bf16,fp8": 420, "serve 8b-512x1000 fp8-kv,rowwise-kv,exact": 520,
    "serve 8b-mixed": 160, "serve 8b-64x8192": 110, "serve 8b-single": 40,
    "serve 30b-a3b-256x512": 250, "serve gptj-1": 60, "serve gptj-8": 70, "serve gptj-64": 100,
    "serve gptj-largest": 260, "serve attention": 10, "serve exactness": 260, "serve cold-start": 66,
    "serve first-batch": 320, "serve online": 106, "serve server": 90,
    "rl rollout-8b": 210, "rl long-answers": 300, "rl preemptions": 40, "rl rollout-30b": 140, "rl refit": 15,
    "rl learner-step": 90, "rl whole-step": 370, "rl exact-moe": 25,
}  # fmt: skip
_MACHINE = ("device", "torch", "triton")  # the same in records that become one


@dataclasses.dataclass(frozen=True)
class BenchJob:
    """One `octavo bench`.

    Args:
        name: a key of SECONDS: a benchmark, its workload, and its variants where they do not all fit into ten minutes.
    """

    name: str

    @property
    def seconds(self) -> float:
        """That it is expected to take."""
        return SECONDS[self.name]

    @property
    def folder(self) -> str:
        """Of its record and its log, within the command's."""
        return self.name.replace(" ", "-").replace(",", "-")

    def arguments(self, out: Path, commit: str) -> list[str]:
        """Of `octavo bench`."""
        what, *chosen = self.name.split()
        options = ["--workload", chosen[0]] if chosen else []
        for variant in chosen[1].split(",") if len(chosen) > 1 else ():
            options += ["--variant", variant]
        return [what, *options, "--out", str(out / self.folder), "--commit", commit]


def all_jobs() -> list[BenchJob]:
    """Every one, the longest first."""
    return sorted(map(BenchJob, SECONDS), key=lambda job: -job.seconds)


def choose_jobs(parts: Iterable[str]) -> list[BenchJob]:
    """Those that a part names, or whose name contains one that is no name; all where there are no parts.

    Raises:
        DataError: a part that is in no name.
    """
    wanted = list(parts)
    for part in wanted:
        if not any(part in job.name for job in all_jobs()):
            raise DataError(f"no benchmark's name contains {part!r}; they are: {', '.join(SECONDS)}")
    chosen = {name for part in wanted for name in ([part] if part in SECONDS else SECONDS) if part in name}
    return [job for job in all_jobs() if not wanted or job.name in chosen]


def find_parts(out: Path, jobs: Iterable[BenchJob]) -> list[Path]:
    """The records that jobs have left in a folder, in the order of SECONDS."""
    ordered = sorted(jobs, key=lambda job: list(SECONDS).index(job.name))
    return [path for job in ordered for path in sorted((out / job.folder).glob("*.json"))]


def join_records(parts: Sequence[Path], records: Path) -> list[Path]:
    """Write one record for each file name among the parts; of a row that several have, the last one's stays.

    Args:
        parts: files that `octavo bench` has written.
        records: folder of the records.
    Returns:
        The records.
    Raises:
        DataError: two of one name that were not measured on one kind of machine.
    """
    names = dict.fromkeys(part.name for part in parts)
    joined = {name: join({str(p): json.loads(p.read_text()) for p in parts if p.name == name}) for name in names}
    records.mkdir(parents=True, exist_ok=True)
    for name, document in joined.items():
        write_atomic(records / name, json.dumps(document, indent=1) + "\n")
    return [records / name for name in joined]


def join(documents: Mapping[str, dict[str, Any]]) -> dict[str, Any]:
    """One record of several.

    Its commit, its date and its sentence are those of most rows; the other rows carry their own commit and date.
    """
    first_name, first = next(iter(documents.items()))
    rows: dict[tuple[str, str], dict[str, Any]] = {}
    for name, document in documents.items():
        if differing := [key for key in _MACHINE if document[key] != first[key]]:
            key = differing[0]
            raise DataError(
                f"{first_name} and {name} are of different machines: {key} is {first[key]!r} and {document[key]!r}; "
                "measure both on one kind"
            )
        about = {key: document[key] for key in SOURCE}
        rows |= {(row["case"], row["metric"]): row | about | row for row in document["rows"]}
    listed = with_ratios(list(rows.values()))
    most = Counter(map(_source, listed or [first])).most_common(1)[0][0]
    head = next((document for document in documents.values() if _source(document) == most), first)
    listed = [{k: row[k] for k in row if k not in SOURCE} if _source(row) == most else row for row in listed]
    return head | dict(zip(SOURCE, most, strict=True)) | {"rows": listed}


def _source(part: Mapping[str, Any]) -> tuple[str, ...]:
    return tuple(part[key] for key in SOURCE)
