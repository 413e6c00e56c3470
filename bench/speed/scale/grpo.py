"""`grpo`: whole steps of exact reinforcement learning, a policy over all GPUs against one GPU, same global batch.

Over all GPUs gradients are added in order, so that the step has the bits of one process, and weights stay whole between
optimizer steps. `grpo_quick` has fewer layers and tokens, for finding out; alone it runs where --only asks for it.
"""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any, TypeVar

import torch
from torch.profiler import ProfilerActivity, profile

from bench.record import summarize
from bench.rl.synthetic import loop_config, model_config
from bench.rl.whole_step import GEN, LEARN, REFIT, SCORE, Loop, LoopStep
from bench.rl.workloads import LOOP_VARIANTS, LOOPS, LoopSizes
from bench.speed.scale.session import GIB, Session, Steps
from bench.timing import synchronize
from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.distributed.symmetric import shared_bytes
from octavo.rl.config import RLConfig
from octavo.rl.phases import SECONDS

_RECIPE = "blockwise"
_NUM_STEPS = 2  # timed, after one that warms up
_ROOM_GIB = 120  # for the record's 18 layers on one GPU, whose fp32 masters and moments alone take 66 GB
_FEWER_LAYERS = 6
_QUICK = {"num_layers": 9, "num_prompts": 8, "max_tokens": 256, "minibatches": 2}  # micro-batches as many a mini-batch
_PARTS = {"generation": GEN, "old logprobs": SCORE, "update": LEARN, "weight sync": REFIT}
_TOP_OPS = 25
Sections = Mapping[str, Mapping[str, Any]]
_SECTIONS: Sections = {"parallel": {"reduction": "ordered"}, "trainer": {"gather_once": True}}
_GATHERS: dict[str, Sections] = {
    "": {},
    ", FP8 codes kept": {"parallel": {"all_gather_dtype": "fp8"}},
    ", gathered for each micro-batch": {"trainer": {"gather_once": False}},
}
T = TypeVar("T")


def grpo(session: Session) -> None:
    """One GPU, which each rank tries alone, then all of them."""
    _compare(session, _sizes(session), {"": {}})


def grpo_quick(session: Session) -> None:
    """grpo with fewer layers and tokens, and other ways to gather weights."""
    sizes = _sizes(session)
    _compare(session, sizes if session.is_toy else dataclasses.replace(sizes, **_QUICK), _GATHERS)  # type: ignore[arg-type]


def _compare(session: Session, sizes: LoopSizes, variants: Mapping[str, Sections]) -> None:
    found: list[tuple[str, float]] = []
    ranks = [(f"{session.mesh.world_size} GPUs{name}", session.mesh, changes) for name, changes in variants.items()]
    for name, mesh, changes in (("one GPU alone", ONE_PROCESS, {}), *ranks):
        session.attempt(f"grpo {name}", partial(_measure, session, name, mesh, changes, sizes, found))


def _measure(
    session: Session, name: str, mesh: Mesh, changes: Sections, sizes: LoopSizes, found: list[tuple[str, float]]
) -> None:
    device = session.device.type
    steps: list[LoopStep] = []
    sampling: list[float] = []  # seconds a step, on this rank
    session.mesh.barrier()
    with contextlib.closing(Loop(_config(sizes, device, changes), model_config(sizes), sizes, device, mesh)) as loop:
        llm: Any = loop.worker.engine.llm  # type: ignore[attr-defined]
        llm.generate = _timed(llm.generate, sampling)
        for number in range(1, _NUM_STEPS + 2):
            if number == 2 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            steps.append(loop.step(number))
        peak = torch.cuda.max_memory_allocated() + shared_bytes() if device == "cuda" else 0
        if session.profiles:
            _profile_step(session, loop, name)
    worst = session.largest(max(step.max_delta for step in steps))
    if worst != 0.0:
        session.complain(f"grpo {name}: exact logprobs differ by {worst:.3g}")
    label = f"exact GRPO step, {sizes.label}"
    case, peer = f"{label}: {name}", found[0] if found else (None, None)
    timing = summarize([session.largest(1e3 * step.times[SECONDS + "step"]) for step in steps[1:]])
    session.add_step(case, Steps(timing, peak, ()), *peer)
    session.record.add(case, "largest difference of logprobs", "nats", worst)
    if found:
        session.record.add_ratio(case, "speedup", found[0][1] / timing.median_us, found[0][0])
    found.append((case, timing.median_us))
    for part, seconds in _parts(session, mesh, steps[1:], sampling[1 : len(steps)]).items():
        session.record.add(case, f"time of {part}", "ms", 1e3 * seconds)
        session.say(f"{part:>40} {1e3 * seconds:9.1f} ms")


def _config(sizes: LoopSizes, device: str, changes: Sections) -> RLConfig:
    config = loop_config(LOOP_VARIANTS["exact"], sizes, _RECIPE, device)
    updates = {name: {**section, **changes.get(name, {})} for name, section in _SECTIONS.items()}
    return config.model_copy(
        update={name: getattr(config, name).model_copy(update=section) for name, section in updates.items()}
    )


def _timed(call: Callable[..., T], seconds: list[float]) -> Callable[..., T]:
    def run(*arguments: Any) -> T:
        began = time.perf_counter()
        found = call(*arguments)
        seconds.append(time.perf_counter() - began)
        return found

    return run


def _parts(session: Session, mesh: Mesh, steps: list[LoopStep], sampling: list[float]) -> dict[str, float]:
    """Median seconds of each part, of the slowest rank."""
    medians = {part: statistics.median(s.times[SECONDS + phase] for s in steps) for part, phase in _PARTS.items()}
    seconds = {part: session.largest(median) for part, median in medians.items()}
    own = statistics.median(sampling)
    slowest, fastest = session.largest(own), -session.largest(-own)
    seconds["generation: decoding"] = slowest
    if mesh.world_size > 1:
        seconds["generation: waiting for the slowest rank"] = slowest - fastest
    seconds["generation: exchange and scores"] = seconds["generation"] - slowest
    return seconds


def _profile_step(session: Session, loop: Loop, name: str) -> None:
    """One more step, of which rank 0 prints what took longest, of sampling and of learning."""
    worker: Any = loop.worker
    learner: Any = loop.learner
    worker.sample = _profiled(session, worker.sample, f"sampling, {name}")
    learner.learn = _profiled(session, learner.learn, f"learning, {name}")
    loop.step(_NUM_STEPS + 2)


def _profiled(session: Session, call: Callable[..., T], what: str) -> Callable[..., T]:
    def run(*arguments: Any) -> T:
        if not session.mesh.is_first:
            return call(*arguments)
        is_cuda = session.device.type == "cuda"
        activities = [ProfilerActivity.CPU, *([ProfilerActivity.CUDA] if is_cuda else [])]
        with profile(activities=activities) as profiler:
            began = time.perf_counter()
            found = call(*arguments)
            synchronize(session.device)
            seconds = time.perf_counter() - began
        ops = profiler.key_averages()
        for key in ("self_device_time_total", "self_cpu_time_total") if is_cuda else ("self_cpu_time_total",):
            table = ops.table(sort_by=key, row_limit=_TOP_OPS, max_name_column_width=80)
            session.say(f"{what}, {seconds:.2f} s, by {key}\n{table}")
        return found

    return run


def _sizes(session: Session) -> LoopSizes:
    sizes = LOOPS["whole-step"]
    if session.is_toy:
        num_ranks = session.mesh.world_size  # each has a sequence of two a prompt in every minibatch
        few = dataclasses.replace(sizes.shrunk(), micro_batch=1, minibatches=max(1, 4 // num_ranks))
        return dataclasses.replace(few, num_prompts=max(2, num_ranks // 2))
    total = torch.cuda.get_device_properties(session.device).total_memory / GIB
    return sizes if total >= _ROOM_GIB else dataclasses.replace(sizes, num_layers=_FEWER_LAYERS)
