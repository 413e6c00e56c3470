"""Does FP8 reinforcement learn as well as bf16? Small policies from scratch, every variant from one warm start a seed.

Runs go side by side as processes, over all GPUs there are; rows are written as they come. A command that reaches its
time limit leaves checkpoints, and the same command on the same machine goes on from there. Make records, curves,
plots and the sections of docs/rl.md by `python -m bench.rl_matrix.report`.
"""

import argparse
import json
import queue
import sys
import time
from pathlib import Path

from bench.processes import run_jobs, run_logged, visible_gpus
from bench.program import Program
from bench.record import git_commit
from bench.rl_matrix.jobs import JOB_FILE, MatrixJob, make_jobs
from bench.rl_matrix.rows import collect, format_summary, progress_of
from bench.rl_matrix.run import LEAST_S
from bench.rl_matrix.variants import GROUPS
from octavo.errors import BackendError, ConfigError

_GRACE_S = 20.0  # after its time a process is ended


def main(arguments: list[str] | None = None) -> int:
    """Run what is left of the jobs; 0 where all are done, 3 where another command is to go on, 1 where one broke."""
    options = _parse(arguments)
    jobs = make_jobs(
        options.groups,
        options.work,
        options.device,
        variants=options.variants,
        seeds=map(int, options.seeds),
        overrides=options.overrides,
        quick=options.quick,
        tag=options.tag,
        side_by_side=options.jobs,
        commit=options.commit or git_commit(),
    )
    for job in jobs:
        prepare(job)
    options.out.mkdir(parents=True, exist_ok=True)
    devices = visible_gpus() if options.device == "cuda" else []
    print(f"{len(jobs)} jobs, {options.jobs} at a time on {len(devices) or 'no'} GPUs", flush=True)
    slots: queue.SimpleQueue[int] = queue.SimpleQueue()
    for slot in range(options.jobs):
        slots.put(slot)

    def look(under_way: list[MatrixJob]) -> None:
        collect(options.work, options.target, options.tag)
        if under_way:
            print(progress_of(under_way), flush=True)

    def run_all(chosen: list[MatrixJob]) -> list[str]:
        left = [job for job in chosen if not job.end_file.is_file()]
        return run_jobs(left, options.jobs, lambda job: _run_in_process(job, options.end, slots, devices), look)

    broken = run_all([job for job in jobs if job.is_start])
    if not broken:
        broken = run_all([job for job in jobs if not job.is_start and job.start_is_made])
    collect(options.work, options.target, options.tag)
    print(format_summary(jobs))
    for text in broken:
        print(f"BROKEN {text}")
    num_left = sum(not job.end_file.is_file() for job in jobs)
    print(f"{num_left} of {len(jobs)} jobs are not finished" if num_left else f"all {len(jobs)} jobs are finished")
    return 1 if broken else 3 if num_left else 0


def _parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = Program("bench.rl_matrix.matrix", __doc__, out=Path("runs/rl_matrix"), former={"--arms": "--variants"})
    parser.add_argument("--work", type=Path, default=Path("runs/rl_matrix/work"), help="checkpoints and rows; kept")
    parser.add_argument("--jobs", type=int, default=1, help="processes side by side, over all GPUs together")
    parser.add_argument("--minutes", type=float, default=9.0, help="checkpoint and stop after so long")
    parser.add_argument("--groups", type=_listed, default=list(GROUPS), help=f"of {','.join(GROUPS)}; default: all")
    parser.add_argument("--variants", type=_listed, default=[], help="only these variants, with commas")
    parser.add_argument(
        "--seeds",
        type=lambda text: [int(part) for part in _listed(text)],
        default=[],
        help="these seeds, with commas; default: the groups' own",
    )
    parser.add_argument(
        "--steps", type=int, help="rollout steps of each run; default: the group's, else rl_matrix.toml's"
    )
    parser.add_argument("--set", action="append", default=[], dest="overrides", metavar="section.key=value")
    parser.add_argument("--tag", default="", help="name of a trial with other settings, kept apart from the matrix")
    parser.add_argument("--quick", action="store_true", help="a toy, for a CPU: does it run at all?")
    options = parser.parse(arguments)
    options.end = time.time() + 60 * options.minutes
    options.work = options.work.resolve()
    if options.jobs < 1:
        parser.error("--jobs must be at least 1")
    if options.steps is not None:
        options.overrides.append(f"trainer.steps={options.steps}")
    options.target = options.out / (f"rl_matrix@{options.tag}.jsonl" if options.tag else "rl_matrix.jsonl")
    return options


def _listed(text: str) -> list[str]:
    return [part for part in text.split(",") if part]


def prepare(job: MatrixJob) -> None:
    """Make a job's folder, or see that what lies there was begun with the same settings; more steps are none.

    Raises:
        ConfigError: other settings, or a config that octavo.rl refuses.
    """
    job.config  # noqa: B018 - ConfigError before anything runs
    job.folder.mkdir(parents=True, exist_ok=True)
    path = job.folder / JOB_FILE
    if path.is_file():
        earlier = MatrixJob.load(path)
        if earlier.settings != job.settings:
            changed = ", ".join(sorted(earlier.settings ^ job.settings))
            raise ConfigError(
                f"{job.folder} was begun with other settings ({changed} differ); give another --work, or "
                "--tag NAME for a trial"
            )
        if not job.is_start and earlier.num_steps != job.num_steps:
            job.end_file.unlink(missing_ok=True)  # it goes on, or is seen to be done at once
    path.write_text(json.dumps(job.as_dict(), indent=1) + "\n")


def _run_in_process(job: MatrixJob, end: float, slots: "queue.SimpleQueue[int]", devices: list[str]) -> str:
    """What became of a job; BackendError with the end of its log where it broke."""
    seconds = end - time.time()
    if seconds < LEAST_S and job.device != "cpu":  # a process would only find that out after its start
        return "waiting"
    slot = slots.get()
    try:
        changes = {"OMP_NUM_THREADS": "1", "TOKENIZERS_PARALLELISM": "false"}  # a core a process
        if devices:
            changes["CUDA_VISIBLE_DEVICES"] = devices[slot % len(devices)]
        command = [sys.executable, "-m", "bench.rl_matrix.run", str(job.folder / JOB_FILE), f"{seconds:.0f}"]
        timeout_s = max(end + _GRACE_S - time.time(), _GRACE_S)
        code, lines = run_logged(command, job.folder / "run.log", timeout_s, "a", **changes)
    finally:
        slots.put(slot)
    if code is None:
        return "cut off; its last checkpoint stays"
    if code:
        print("\n".join(lines[-25:]), flush=True)
        raise BackendError(f"exit code {code}, see {job.folder / 'run.log'}")
    return lines[-1] if lines else "no word"


if __name__ == "__main__":
    sys.exit(main())
