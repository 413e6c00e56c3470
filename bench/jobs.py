"""The speed records' jobs: one process each, and how the records of those that share a file become one."""

import dataclasses
import json
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.session import with_ratios
from octavo.errors import DataError
from octavo.run.atomic import write_atomic

# Seconds of each on an H200, the process's start included: the longest begin first, and none that would end late.
SECONDS = {
    "gemm": 25, "quant": 40, "linear": 190, "layer": 75, "step": 190, "sizes": 130, "capacity": 190, "qdq": 60,
    "serve 8b-512x1000 bf16,fp8": 420, "serve 8b-512x1000 fp8-kv,rowwise-kv,exact": 520,
    "serve 8b-mixed": 160, "serve 8b-64x8192": 110, "serve 8b-single": 40,
    "serve 30b-a3b-256x512": 250, "serve gptj-1": 60, "serve gptj-8": 70, "serve gptj-64": 100,
    "serve gptj-largest": 260, "serve attention": 10, "serve exactness": 260, "serve cold-start": 66,
    "serve first-batch": 320, "serve online": 106, "serve server": 90,
    "rl rollout-8b": 210, "rl long-answers": 300, "rl preemptions": 40, "rl rollout-30b": 140, "rl refit": 15,
    "rl learner-step": 90, "rl whole-step": 370, "rl exact-moe": 25,
}  # fmt: skip
_SAME = ("device", "torch", "triton", "commit", "date")  # of records that may become one


@dataclasses.dataclass(frozen=True)
class Job:
    """One `octavo bench`.

    Args:
        name: a key of SECONDS: a benchmark, its workload, and its arms where they do not all fit into ten minutes.
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
        for arm in chosen[1].split(",") if len(chosen) > 1 else ():
            options += ["--arm", arm]
        return [what, *options, "--out", str(out / self.folder), "--commit", commit]


def all_jobs() -> list[Job]:
    """Every one, the longest first."""
    return sorted(map(Job, SECONDS), key=lambda job: -job.seconds)


def choose_jobs(parts: Iterable[str]) -> list[Job]:
    """Those that a part names, or whose name contains one that is no name; all where there are no parts.

    Raises:
        DataError: a part that is in no name.
    """
    wanted = list(parts)
    for part in wanted:
        if not any(part in job.name for job in all_jobs()):
            raise DataError(f"no benchmark's name contains {part!r}; they are: {', '.join(SECONDS)}")
    return [job for job in all_jobs() if not wanted or any(_means(part, job.name) for part in wanted)]


def _means(part: str, name: str) -> bool:
    return part == name if part in SECONDS else part in name


def join_records(out: Path, jobs: Sequence[Job]) -> list[Path]:
    """Write one record for each file name that jobs have left, their rows one after the other.

    Returns:
        The records, in a folder of `out`.
    Raises:
        DataError: two of one name that were not measured on one tree, day and kind of machine.
    """
    found: dict[str, list[tuple[str, dict[str, Any]]]] = {}
    for job in sorted(jobs, key=lambda job: list(SECONDS).index(job.name)):
        for path in sorted((out / job.folder).glob("*.json")):
            found.setdefault(path.name, []).append((job.name, json.loads(path.read_text())))
    written = []
    for name, parts in found.items():
        (_, first), *others = parts
        rows = list(first["rows"])
        for job_name, part in others:
            if differing := [key for key in _SAME if part[key] != first[key]]:
                key = differing[0]
                raise DataError(
                    f"{name} of {parts[0][0]!r} and of {job_name!r} are of different measurements: {key} is "
                    f"{first[key]!r} and {part[key]!r}; run them again together"
                )
            rows += [row for row in part["rows"] if row not in rows]
        written.append(out / "records" / name)
        written[-1].parent.mkdir(parents=True, exist_ok=True)
        document = first | {"rows": with_ratios(rows)}
        write_atomic(written[-1], json.dumps(document, indent=1) + "\n")
    return written
