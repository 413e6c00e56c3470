"""`make bench`: the speed records of docs/performance.md, one `octavo bench` a GPU at a time.

    python -m bench                              # all of them, over all GPUs that there are
    python -m bench --only serve --minutes 20    # those whose name contains "serve", as far as the time goes
    python -m bench --add runs/bench             # measure nothing: add what lies in that folder to bench/records

Each is a process of its own with one GPU and its share of the cores. Rows of those that share a record are joined in
OUT/records. Those may be of several sessions on one kind of machine: rows of another commit or date than most of the
record's carry their own. What is bound by the CPU (linear, layer, step) is best measured alone.
"""

import argparse
import queue
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

from bench.jobs import BenchJob, choose_jobs, find_parts, join_records
from bench.options import RECORDS
from bench.processes import bind_to, run_logged, share_of_cores, usable_cores, visible_gpus
from bench.record import git_commit
from octavo.errors import DataError

_TAIL = 12  # lines of a log that are shown


def main(arguments: list[str] | None = None) -> int:
    """Run them; 2 where this machine has no GPU, whose speed is what they are about, 1 where one failed, 3 where the
    time was too short for some."""
    options = _parse(arguments)
    try:
        jobs = choose_jobs(options.only)
    except DataError as error:
        print(error, file=sys.stderr)
        return 2
    if options.add is not None:
        parts = find_parts(options.add, jobs)
        earlier = [path for name in {part.name for part in parts} if (path := RECORDS / name).is_file()]
        print(*join_records([*earlier, *parts], RECORDS), sep="\n")
        return 0
    if not torch.cuda.is_available():
        print("the speed benchmarks need an NVIDIA GPU, and torch sees none here; see bench/records", file=sys.stderr)
        return 2
    gpus = visible_gpus()
    print(f"{len(jobs)} benchmarks on {len(gpus)} GPUs, about {sum(job.seconds for job in jobs) / 60:.0f} GPU minutes")
    outcomes = run_jobs(jobs, gpus, options.out, options.commit or git_commit(), options.minutes)
    print(*join_records(find_parts(options.out, jobs), options.out / "records"), sep="\n")
    if "failed" in outcomes.values():
        return 1
    return 3 if "left out" in outcomes.values() else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="python -m bench", description=__doc__)
    parser.add_argument("--only", action="append", default=[], help="this, or all whose name contains it; repeatable")
    parser.add_argument("--minutes", type=float, help="begin nothing that would end later")
    parser.add_argument("--out", type=Path, default=Path("runs/bench"), help="folder of records and logs")
    parser.add_argument("--add", type=Path, help="measure nothing, add what this folder holds to bench/records")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    return parser.parse_args(arguments)


def run_jobs(jobs: list[BenchJob], gpus: list[str], out: Path, commit: str, minutes: float | None) -> dict[str, str]:
    """Run jobs, one a GPU at a time; what became of each: "done", "failed" or "left out"."""
    end = None if minutes is None else time.monotonic() + 60 * minutes
    free: queue.SimpleQueue[str] = queue.SimpleQueue()
    for gpu in gpus:
        free.put(gpu)
    cores = usable_cores()

    def run(job: BenchJob) -> str:
        gpu = free.get()
        bind_to(share_of_cores(cores, gpus.index(gpu), len(gpus)))  # a thread's own, which its processes inherit
        try:
            left = None if end is None else end - time.monotonic()
            if left is not None and job.seconds > left:
                outcome = "left out"
            else:
                outcome = _run(job, gpu, out, commit, left)
        finally:
            free.put(gpu)
        print(f"{job.name}: {outcome}", flush=True)
        return outcome

    with ThreadPoolExecutor(len(gpus)) as pool:  # in the order of jobs, as GPUs become free
        return dict(zip([job.name for job in jobs], pool.map(run, jobs), strict=True))


def _run(job: BenchJob, gpu: str, out: Path, commit: str, limit_s: float | None) -> str:
    folder = out / job.folder
    folder.mkdir(parents=True, exist_ok=True)
    log, began = folder / "log.txt", time.monotonic()
    command = [sys.executable, "-m", "octavo", "bench", *job.arguments(out.resolve(), commit)]
    code, lines = run_logged(command, log, limit_s, CUDA_VISIBLE_DEVICES=gpu)
    if code:
        tail = "\n".join(lines[-_TAIL:])
        print(f"{job.name}: exit code {code} after {time.monotonic() - began:.0f} s, see {log}\n{tail}", flush=True)
    return "left out" if code is None else "failed" if code else "done"


if __name__ == "__main__":
    sys.exit(main())
