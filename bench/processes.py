"""Runs side by side in processes, and the GPUs and the CPU's cores that each of them may use."""

import multiprocessing
import os
import subprocess
import time
import traceback
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, ThreadPoolExecutor, as_completed, wait
from pathlib import Path
from typing import Protocol, TypeVar

import torch

from octavo.env import child_environment

ROOT = Path(__file__).parent.parent
_LOOK_EVERY_S = 20.0  # seconds between looks at the runs
R = TypeVar("R")


class _Named(Protocol):
    @property
    def name(self) -> str: ...


J = TypeVar("J", bound=_Named)


def map_processes(
    function: Callable[..., R],
    cases: Iterable[Sequence[object]],
    num_processes: int,
    num_threads: int = 1,
    show: Callable[[R], str] | None = None,
) -> Iterator[R]:
    """What function(*case) returns, as it comes, each in one of so many processes.

    Args:
        num_threads: of torch in each process.
        show: what to print of a result, beside the time that is left.
    """
    began = time.monotonic()
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(num_processes, context, torch.set_num_threads, (num_threads,)) as pool:
        futures = [pool.submit(function, *case) for case in cases]
        for num_done, future in enumerate(as_completed(futures), start=1):
            result = future.result()
            if show is not None:
                minutes, num = (time.monotonic() - began) / 60, len(futures)
                left = minutes / num_done * (num - num_done)
                print(f"[{num_done}/{num}] {show(result)}, {minutes:.1f} min, about {left:.1f} left", flush=True)
            yield result


def run_jobs(jobs: Sequence[J], num_jobs: int, run: Callable[[J], str], look: Callable[[list[J]], None]) -> list[str]:
    """Run jobs, so many at a time, each by a thread; one that fails does not stop the others.

    Args:
        run: what does a job and says what became of it.
        look: called whenever a job is done, with an empty list, and every 20 seconds else, with the jobs under way.

    Returns:
        What went wrong, an entry a job.
    """
    failures: list[str] = []
    with ThreadPoolExecutor(num_jobs) as pool:
        pending = {pool.submit(run, job): job for job in jobs}
        while pending:
            done, _ = wait(pending, timeout=_LOOK_EVERY_S, return_when="FIRST_COMPLETED")
            for future in done:
                job = pending.pop(future)
                try:
                    print(f"{job.name}: {future.result()}", flush=True)
                except Exception as error:  # whatever a run dies of
                    failures.append(f"{job.name}: {type(error).__name__}: {error}")
                    print("".join(traceback.format_exception(error)), flush=True)
            look([] if done else list(pending.values()))
    return failures


def run_logged(
    command: Sequence[str], log: Path, timeout_s: float | None, mode: str = "w", **environment: str
) -> tuple[int | None, list[str]]:
    """Run a command in the repository's root, its output in a log.

    Returns:
        (exit code, None where it was stopped after timeout_s; the log's lines).
    """
    with log.open(mode, encoding="utf-8") as stream:
        try:
            code: int | None = subprocess.run(
                command,
                cwd=ROOT,
                env=child_environment(**environment),
                stdout=stream,
                stderr=subprocess.STDOUT,
                timeout=timeout_s,
                check=False,
            ).returncode
        except subprocess.TimeoutExpired:
            code = None
    return code, log.read_text(encoding="utf-8", errors="replace").splitlines()


def visible_gpus() -> list[str]:
    """Those that this process may use, as CUDA_VISIBLE_DEVICES names them."""
    count = torch.cuda.device_count()
    names = [name for name in child_environment().get("CUDA_VISIBLE_DEVICES", "").split(",") if name]
    return names[:count] if names else [str(index) for index in range(count)]


def share_of_cores(cores: Iterable[int], index: int, count: int) -> set[int]:
    """Neighbouring cores for the index-th of `count` processes, as many for each; all of them where they are fewer.

    A step that the CPU issues hands over from thread to thread; between sockets that takes longer than its kernels.
    """
    ordered = sorted(cores)
    size = len(ordered) // count
    return set(ordered[index * size : (index + 1) * size] or ordered)


def usable_cores() -> set[int]:
    """Those that the calling thread may run on; none where the system does not say."""
    return os.sched_getaffinity(0) if hasattr(os, "sched_getaffinity") else set()


def bind_to(cores: set[int]) -> None:
    """Keep the calling thread, and the processes that it starts, on these cores, if there are any."""
    if cores:
        os.sched_setaffinity(0, cores)
