"""Times training steps of variants that do not fit into memory side by side: build, warm up, time, free, the next.

Another pass over all variants shows drift of the clock.
"""

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Callable

import torch

from bench.energy import measure_energy
from bench.record import summarize
from bench.speed.check import check_variant
from bench.speed.stack import StackShape, draw_input
from bench.speed.variants import StackVariant, attention_backend, build_layers, build_optimizer, runners
from bench.timing import synchronize

WARMUP_STEPS, TIMED_STEPS = 4, 8


@dataclasses.dataclass(frozen=True)
class Pass:
    """One variant, once: milliseconds of each timed step, bytes at the peak, joules a step, loss of the last step."""

    times_ms: tuple[float, ...]
    peak_bytes: int
    joules: float | None
    energy_source: str
    loss: float


@dataclasses.dataclass(frozen=True)
class VariantResult:
    """A variant over all passes."""

    variant: StackVariant
    passes: tuple[Pass, ...]

    @property
    def step_ms(self) -> float:
        """Mean of the passes' medians."""
        return statistics.fmean(statistics.median(p.times_ms) for p in self.passes)

    @property
    def fifths_ms(self) -> tuple[float, float]:
        """20th and 80th percentile of all timed steps."""
        timing = summarize([t for p in self.passes for t in p.times_ms])
        return timing.p20_us, timing.p80_us

    @property
    def drift(self) -> float:
        """Largest over smallest median of the passes, less one."""
        medians = [statistics.median(p.times_ms) for p in self.passes]
        return max(medians) / min(medians) - 1

    @property
    def peak_bytes(self) -> int:
        """Largest of the passes; 0 on a CPU."""
        return max(p.peak_bytes for p in self.passes)

    @property
    def joules(self) -> float | None:
        """Mean joules a step, None where a pass could not be measured."""
        values = [p.joules for p in self.passes if p.joules is not None]
        return statistics.fmean(values) if len(values) == len(self.passes) else None

    @property
    def loss(self) -> float:
        """After the first pass's steps."""
        return self.passes[0].loss


def measure_variants(
    variants: list[StackVariant], shape: StackShape, device: str, *, num_passes: int
) -> tuple[list[VariantResult], list[str]]:
    """Check and time each variant, `num_passes` times over all of them.

    Returns:
        (results of the variants that ran, in order, complaints about those that did not).
    """
    passes: dict[StackVariant, list[Pass]] = {variant: [] for variant in variants}
    complaints = []
    for index in range(num_passes):
        for variant in variants:
            if len(passes[variant]) < index:  # it failed before
                continue
            try:
                if index == 0:
                    check_variant(variant, shape, device)
                done = _measure_variant(variant, shape, device)
            except Exception as error:  # the other variants' figures are worth having; the exit code is 1
                complaints.append(f"{variant.name}: {type(error).__name__}: {error}")
                traceback.print_exc()
                continue
            finally:
                free_variant(device)
            passes[variant].append(done)
            print(f"pass {index + 1}: {variant.name:<34} {statistics.median(done.times_ms):8.1f} ms", flush=True)
    results = [VariantResult(variant, tuple(done)) for variant, done in passes.items() if len(done) == num_passes]
    return results, complaints


def _measure_variant(variant: StackVariant, shape: StackShape, device: str) -> Pass:
    step = _build_step(variant, shape, device)
    with attention_backend(device):
        for _ in range(WARMUP_STEPS):
            step()
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times_ms = []
        with measure_energy(device) as energy:
            for _ in range(TIMED_STEPS):
                start = time.perf_counter()
                loss = step()
                synchronize(device)
                times_ms.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    joules = None if energy.joules is None else energy.joules / TIMED_STEPS
    return Pass(tuple(times_ms), peak, joules, energy.source, float(loss))


def _build_step(variant: StackVariant, shape: StackShape, device: str) -> Callable[[], torch.Tensor]:
    layers = build_layers(variant, shape, device)
    optimizer = build_optimizer(variant, [p for layer in layers for p in layer.parameters()], device)
    calls = runners(variant, layers, device)
    x = draw_input(shape, device)

    def forward(h: torch.Tensor) -> torch.Tensor:
        for call in calls:
            h = call(h)
        return h

    return training_step(forward, optimizer, x)


def training_step(
    forward: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> Callable[[], torch.Tensor]:
    """A step over the mean square of what `forward` makes of x; it returns the loss."""

    def step() -> torch.Tensor:
        loss = forward(x).float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        return loss.detach()

    return step


def free_variant(device: str) -> None:
    """Give back what a variant left: compiled code holds on to its layers, the allocator to their memory."""
    if device == "cpu":  # nothing was compiled, nothing is short
        return
    torch._dynamo.reset()
    gc.collect()
    # cuBLAS' workspace is in the memory of whichever graph needed it first: the next variant's graphs would name
    # what is gone as soon as torch.compile's graphs have it freed
    torch._C._cuda_clearCublasWorkspaces()
    torch.cuda.empty_cache()
