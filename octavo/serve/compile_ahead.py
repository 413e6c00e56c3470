"""Kernels that a checkpoint will need, compiled by a stand-in for it while its weights are read.

A thread runs the steps without their kernels, processes compile those, then threads run the steps. What they make is in
this process and in Triton's cache on disk, where engines find it.
"""

import contextlib
import functools
import gc
import logging
import threading
import time
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

import torch

from octavo.errors import OctavoError
from octavo.models import Decoder
from octavo.ops._runtime.kernel_cache import use_checked_cache
from octavo.serve.engine import EngineConfig
from octavo.serve.engine.config import READY_LEN
from octavo.serve.engine.kv_cache import allocate_kv_cache, run_full_step
from octavo.serve.engine.model_runner import ModelRunner
from octavo.serve.stand_in import build_stand_in, has_room, has_room_beside, stand_in_of
from octavo.serve.tensor_workers import chosen_device

if TYPE_CHECKING:  # a machine without a GPU may have no triton
    from octavo.serve.kernel_list import KernelList
    from octavo.serve.kernel_processes import KernelProcesses

NUM_THREADS = 4  # twelve were no faster on 16 cores: Python's lock holds them up
FIRST_TOKENS = 256  # of the steps whose kernels are waited for without a warm-up

logger = logging.getLogger(__name__)
_forked: list["KernelProcesses"] = []


class Job(NamedTuple):
    """A step: its tokens, what runs it, and whether an engine runs it as it is made, with a warm-up or without."""

    num_tokens: int
    run: Callable[[], object]
    is_of_start: bool = False


class CompilerThreads:
    """Runs the steps that a model's engine will run, in threads, so that their kernels are compiled.

    Args:
        build: makes the model, in a thread.
        config: the engine's.
        device: where the model is.
        max_len: tokens of the longest sequence that is thought of.
        processes: compile what is not on disk before the threads run; closed then. None on a CPU.
        kernels: written once all that they were asked for is on disk.

    Attributes:
        error: what the first of them failed of; the others go on.
        num_done: steps.
        num_compiled: kernels, in processes.
    """

    def __init__(
        self,
        build: Callable[[], Decoder],
        config: EngineConfig,
        device: torch.device,
        max_len: int = READY_LEN,
        processes: "KernelProcesses | None" = None,
        kernels: "KernelList | None" = None,
    ) -> None:
        self.error: Exception | None = None
        self.num_done = self.num_compiled = 0
        self._processes, self._kernels = processes, kernels
        self._build, self._config, self._device, self._max_len = build, config, device, max_len
        self._is_stopped, self._lock = threading.Event(), threading.Lock()
        self._pool = ThreadPoolExecutor(NUM_THREADS, thread_name_prefix="octavo-compile")
        self._all: Future[None] = self._pool.submit(self._begin)

    def finish(self, *, early: bool = False) -> None:
        """Wait for all steps; early: for those that have begun, and for the kernels that are compiled in processes."""
        if early:
            self._is_stopped.set()
        self._all.result()
        self._pool.shutdown()

    def abort(self) -> None:
        """End the processes, and wait for the steps that have begun."""
        if self._processes is not None:
            self._processes.close()
        self.finish(early=True)

    def _begin(self) -> None:
        jobs: list[Job] = []

        def make() -> list[Job]:
            self._try(lambda: jobs.extend(jobs_of(self._build(), self._config, self._max_len)))
            return [j for j in jobs if self._config.warm_up or j.is_of_start or j.num_tokens <= FIRST_TOKENS]

        if self._processes is None:
            make()
        else:
            self.num_compiled = compile_in_processes(make, self._processes, self._device, self._kernels)
        for i, job in enumerate(jobs):
            if i == 0:
                self._count(job)  # alone: what a model makes at its first step is not made by two threads
            else:
                self._pool.submit(self._count, job)

    def _count(self, job: Job) -> None:
        if self._try(job.run):
            with self._lock:
                self.num_done += 1

    def _try(self, run: Callable[[], object]) -> bool:
        if self._is_stopped.is_set():
            return False
        try:
            with torch.no_grad(), _current(self._device):
                run()
        except Exception as error:  # whatever a compiler may raise; the engine itself meets it again
            with self._lock:
                is_first, self.error = self.error is None, self.error or error
            if is_first:
                logger.warning(
                    "compiling ahead failed, kernels are compiled when they are needed: %s: %s",
                    type(error).__name__,
                    error,
                )
            return False
        return True


def jobs_of(model: Decoder, config: EngineConfig, max_len: int) -> list[Job]:
    """Steps of every kind that an engine of this model runs, over dummy tokens, the smallest first."""
    longest = config.resolve_max_model_len(model.config.max_position_embeddings, None)
    runner = ModelRunner(model, allocate_kv_cache(model, 1), config, longest)
    steps = sorted(runner.warm_up_steps, key=lambda step: step.num_tokens)
    where = model, runner.layers, runner.slots, longest
    jobs = [Job(step.num_tokens, functools.partial(step.run, *where)) for step in steps]
    jobs.append(Job(config.max_num_batched_tokens, functools.partial(run_full_step, model, config), is_of_start=True))
    if config.warm_up and (mixed := runner.mixed_graphs) is not None:
        jobs += [Job(key[0], functools.partial(mixed.run_uncaptured, key)) for key in mixed.missing(sparse=True)]
    if config.warm_up and (graphs := runner.graphs) is not None:
        keys = graphs.missing(config.max_num_seqs, min(max_len, longest))
        jobs += [Job(key[0], functools.partial(graphs.run_uncaptured, *key)) for key in keys]
    return jobs


def compile_in_processes(
    make: Callable[[], list[Job]],
    processes: "KernelProcesses",
    device: torch.device,
    kernels: "KernelList | None" = None,
) -> int:
    """Compile the kernels of steps that are not on disk, and close the processes; how many were compiled.

    Args:
        make: the steps; kernels that it launches itself are left out and compiled likewise.
    """
    from octavo.ops._runtime.kernel_requests.triton import requesting_kernels

    began, error = time.perf_counter(), None
    with contextlib.closing(processes):
        with requesting_kernels(processes.compile) as entries, torch.no_grad(), _current(device):
            jobs = make()
            for job in jobs:
                try:
                    job.run()
                except Exception as raised:  # of zeros where kernels were left out: an engine runs it again
                    error = raised
        num_compiled = processes.wait()
    if processes.num_asked:
        seconds = time.perf_counter() - began
        logger.info("%d of %d kernels compiled in processes in %.1f s", num_compiled, processes.num_asked, seconds)
    if error is not None:
        logger.info("a step without its kernels ended early, and may need others: %s: %s", type(error).__name__, error)
    elif kernels is not None and jobs and entries and num_compiled == processes.num_asked:
        kernels.write(entries)
    return num_compiled


def compile_missing(model: Decoder, config: EngineConfig) -> None:
    """Compile what an engine of a model in memory will need at its warm-up and is not on disk.

    Of a stand-in: steps without their kernels would leave zeros in the model's own codes and scales. Nothing on a CPU,
    where memory is tight, or for a model that GPUs share.
    """
    device = model.device
    if device.type != "cuda" or not config.warm_up or model.tensor_group is not None:
        return
    dtype = next(model.parameters()).dtype
    if not has_room_beside(model.config, dtype.itemsize, torch.cuda.mem_get_info(device)[0]):
        return
    use_checked_cache(device)

    def make() -> list[Job]:
        return jobs_of(stand_in_of(model.config, model.numerics, dtype, device), config, READY_LEN)

    compile_in_processes(make, processes_for(device, at_once=False), device)
    _give_back()


@contextlib.contextmanager
def compiling_ahead(path: Path, asked: dict[str, Any], config: EngineConfig) -> Iterator[None]:
    """Compile a checkpoint's kernels beside what is done within; nothing on a CPU, or where memory is tight.

    Without a warm-up no more is waited for than the kernels of small steps.

    Args:
        asked: load_for_inference's arguments.
    """
    threads = _start(path, asked, config)
    if threads is None:
        yield
        return
    try:
        yield
    except BaseException:
        threads.abort()
        raise
    threads.finish(early=not config.warm_up)
    del threads
    _give_back()


def _start(path: Path, asked: dict[str, Any], config: EngineConfig) -> CompilerThreads | None:
    device = chosen_device(asked["device"])
    if device.type != "cuda":
        return None
    from octavo.ops._runtime.kernel_requests.triton import preparing_triton
    from octavo.serve.kernel_list import KernelList

    use_checked_cache(device)
    with contextlib.suppress(OctavoError), contextlib.ExitStack() as unused:  # loading raises it as well
        processes = _forked.pop() if _forked else None
        if processes is not None:
            unused.callback(processes.close)
        kernels = KernelList(path, asked, config, device)
        is_complete = kernels.is_complete()
        if processes is None and not is_complete:
            processes = processes_for(device)  # a fork, before this process has threads and a context on the GPU
            unused.callback(processes.close)
        with preparing_triton():
            free_bytes = torch.cuda.mem_get_info(device)[0]
        if is_complete:
            return None
        if has_room(path, asked, free_bytes):
            unused.pop_all()
            build = functools.partial(build_stand_in, path, asked, device)
            return CompilerThreads(build, config, device, processes=processes, kernels=kernels)
        logger.info("kernels are compiled when the weights are there: both at once would take more memory than is free")
    return None


def fork_ahead(device: torch.device) -> None:
    """Fork now what compiles the next checkpoint's kernels: a server has threads by then, and must not fork."""
    if device.type == "cuda":
        _forked.append(processes_for(device))


def processes_for(device: torch.device, *, at_once: bool = True) -> "KernelProcesses":
    """Those that compile for a GPU; they start at once, or with the first kernel."""
    from octavo.serve.kernel_processes import KernelProcesses

    major, minor = torch.cuda.get_device_capability(device)
    return KernelProcesses(("cuda", 10 * major + minor, 32), at_once=at_once)


def _give_back() -> None:
    """The stand-in's memory, which is the cache's."""
    gc.collect()
    torch.cuda.empty_cache()


def _current(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
