"""`grpo`: whole steps of exact reinforcement learning, a policy over all GPUs against one GPU, same global batch."""

import contextlib
import dataclasses
import statistics

import torch

from bench.record import summarize
from bench.rl.synthetic import loop_config, model_config
from bench.rl.whole_step import Loop, LoopStep
from bench.rl.workloads import LOOP_VARIANTS, LOOPS, LoopSizes
from bench.speed.scale.session import GIB, Session, Steps
from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.rl.phases import SECONDS

_RECIPE = "blockwise"
_NUM_STEPS = 2  # timed, after one that warms up
_ROOM_GIB = 120  # for the record's 18 layers on one GPU, whose fp32 masters and moments alone take 66 GB
_FEWER_LAYERS = 6


def grpo(session: Session) -> None:
    """One GPU, which each rank tries alone, then all of them."""
    times: list[float] = []
    for mesh in (ONE_PROCESS, session.mesh):
        name = "one GPU alone" if mesh.world_size == 1 else f"{mesh.world_size} GPUs"
        session.attempt(f"grpo {name}", lambda mesh=mesh, name=name: _measure(session, mesh, name, times))  # type: ignore[misc]


def _measure(session: Session, mesh: Mesh, name: str, times: list[float]) -> None:
    sizes, device = _sizes(session), session.device.type
    config = loop_config(LOOP_VARIANTS["exact"], sizes, _RECIPE, device)
    steps: list[LoopStep] = []
    session.mesh.barrier()
    with contextlib.closing(Loop(config, model_config(sizes), sizes, device, mesh)) as loop:
        for number in range(1, _NUM_STEPS + 2):
            if number == 2 and device == "cuda":
                torch.cuda.reset_peak_memory_stats()
            steps.append(loop.step(number))
    seconds = [step.times[SECONDS + "step"] for step in steps[1:]]
    worst = session.largest(max(step.max_delta for step in steps))
    if worst != 0.0:
        session.complain(f"grpo {name}: exact logprobs differ by {worst:.3g}")
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    label = f"exact GRPO step, {sizes.label}"
    timing = summarize([session.largest(1e3 * second) for second in seconds])
    peer = (f"{label}: one GPU alone", times[0]) if times else (None, None)
    session.add_step(f"{label}: {name}", Steps(timing, peak, ()), *peer)
    session.record.add(f"{label}: {name}", "largest difference of logprobs", "nats", worst)
    if times:
        session.record.add_ratio(f"{label}: {name}", "speedup", times[0] / timing.median_us, peer[0])
    times.append(timing.median_us)
    for phase in sorted({key for step in steps[1:] for key in step.times if key.startswith(SECONDS)}):
        found = statistics.median(step.times[phase] for step in steps[1:])
        session.say(f"{phase.removeprefix(SECONDS):>40} {found:8.3f} s")


def _sizes(session: Session) -> LoopSizes:
    sizes = LOOPS["whole-step"]
    if session.is_toy:
        return dataclasses.replace(sizes.shrunk(), micro_batch=1, minibatches=max(1, 4 // session.mesh.world_size))
    total = torch.cuda.get_device_properties(session.device).total_memory / GIB
    return sizes if total >= _ROOM_GIB else dataclasses.replace(sizes, num_layers=_FEWER_LAYERS)
