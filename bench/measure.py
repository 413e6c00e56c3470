"""Times training steps of variants that do not fit into memory side by side: build, warm up, time, free, the next.

Another pass over all variants shows drift of the clock. What a variant ran with, its optimizer and its attention, is
read from what ran, so that a comparison can refuse unequal ones.
"""

import dataclasses
import gc
import statistics
import time
import traceback
from collections.abc import Callable
from typing import Protocol

import torch

from bench.clocks import ClockSamples, sample_clocks
from bench.energy import measure_energy
from bench.record import summarize
from bench.speed.check import check_variant
from bench.speed.stack import StackShape, draw_input
from bench.speed.variants import StackVariant, attention_backend, build_layers, build_optimizer, runners
from bench.timing import synchronize

WARMUP_STEPS, TIMED_STEPS = 4, 8


class TrainingStep:
    """Forward, backward, clipping where it is asked for, and the optimizer's step.

    Args:
        make_loss: the forward; returns a scalar with a gradient.
        optimizer: of every parameter that trains.
        max_grad_norm: that all gradients together are clipped to; None for no clipping.

    Attributes:
        grad_norm: of the last step's gradients before clipping; None without clipping.
    """

    def __init__(
        self,
        make_loss: Callable[[], torch.Tensor],
        optimizer: torch.optim.Optimizer,
        max_grad_norm: float | None = None,
    ) -> None:
        self._make_loss, self.optimizer, self._max_grad_norm = make_loss, optimizer, max_grad_norm
        self.grad_norm: torch.Tensor | None = None

    def __call__(self) -> torch.Tensor:
        """One step; its loss."""
        loss = self._make_loss()
        loss.backward()
        if self._max_grad_norm is not None:
            parameters = [p for group in self.optimizer.param_groups for p in group["params"]]
            self.grad_norm = torch.nn.utils.clip_grad_norm_(parameters, self._max_grad_norm)
        self.optimizer.step()
        self.optimizer.zero_grad(set_to_none=True)
        return loss.detach()


class StepWorkload(Protocol):
    """What all variants of a comparison do."""

    def check(self, variant: StackVariant) -> object:
        """Before anything is timed, at a small size.

        Raises:
            BackendError: a result that is off.
        """

    def build(self, variant: StackVariant) -> TrainingStep:
        """Its step on the device, from the same weights and with the same batch as every other variant's."""

    def check_first(self, variant: StackVariant, loss: float, grad_norm: float | None) -> None:
        """Of its first step at full size, which is not timed.

        Raises:
            BackendError: a result that is off.
        """


@dataclasses.dataclass(frozen=True)
class StackWorkload:
    """Layers alone; the loss is the mean square of what they make of the input."""

    shape: StackShape
    device: str

    def check(self, variant: StackVariant) -> object:
        """See StepWorkload."""
        return check_variant(variant, self.shape, self.device)

    def build(self, variant: StackVariant) -> TrainingStep:
        """See StepWorkload."""
        layers = build_layers(variant, self.shape, self.device)
        optimizer = build_optimizer(variant, [p for layer in layers for p in layer.parameters()], self.device)
        calls = runners(variant, layers, self.device)

        def forward(h: torch.Tensor) -> torch.Tensor:
            for call in calls:
                h = call(h)
            return h

        return training_step(forward, optimizer, draw_input(self.shape, self.device))

    def check_first(self, variant: StackVariant, loss: float, grad_norm: float | None) -> None:
        """Nothing: its last loss is compared, and there is no clipping."""


@dataclasses.dataclass(frozen=True)
class Pass:
    """One variant, once.

    Args:
        times_ms: milliseconds of each timed step.
        peak_bytes: of memory; 0 on a CPU.
        joules: a step.
        energy_source: of joules.
        loss: of the last step.
        optimizer: what describe_optimizer says of it after the steps.
        attention: torch's attention kernels that a step called.
        clocks: the GPU's clock and power.
    """

    times_ms: tuple[float, ...]
    peak_bytes: int
    joules: float | None
    energy_source: str
    loss: float
    optimizer: str
    attention: str
    clocks: ClockSamples = dataclasses.field(default_factory=ClockSamples)


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

    @property
    def settings(self) -> str:
        """Optimizer and attention that it ran with."""
        return f"{self.passes[0].optimizer}; attention by {self.passes[0].attention}"


@dataclasses.dataclass(frozen=True)
class Failure:
    """A variant that did not run to the end: which error, and its text."""

    variant: StackVariant
    error: str
    text: str

    @property
    def is_out_of_memory(self) -> bool:
        """Whether it did not fit."""
        return self.error == torch.OutOfMemoryError.__name__

    def __str__(self) -> str:
        return f"{self.variant.name}: {self.error}: {self.text}"


def measure_variants(
    variants: list[StackVariant], workload: StepWorkload, device: str, *, num_passes: int
) -> tuple[list[VariantResult], list[Failure]]:
    """Check and time each variant, `num_passes` times over all of them.

    Returns:
        (results of the variants that ran, in order, failures of those that did not).
    """
    passes: dict[StackVariant, list[Pass]] = {variant: [] for variant in variants}
    failures = []
    for index in range(num_passes):
        for variant in variants:
            if len(passes[variant]) < index:  # it failed before
                continue
            try:
                if index == 0:
                    workload.check(variant)
                done = _measure_variant(variant, workload, device)
            except Exception as error:  # the other variants' figures are worth having
                failures.append(Failure(variant, type(error).__name__, str(error)))
                traceback.print_exc()
                continue
            finally:
                free_variant(device)
            passes[variant].append(done)
            print(f"pass {index + 1}: {variant.name:<34} {statistics.median(done.times_ms):8.1f} ms", flush=True)
    results = [VariantResult(variant, tuple(done)) for variant, done in passes.items() if len(done) == num_passes]
    return results, failures


def _measure_variant(variant: StackVariant, workload: StepWorkload, device: str) -> Pass:
    step = workload.build(variant)
    with attention_backend(device):
        first = float(step())
        workload.check_first(variant, first, None if step.grad_norm is None else float(step.grad_norm))
        for _ in range(WARMUP_STEPS - 2):
            step()
        attention = find_attention(step)
        synchronize(device)
        if device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        times_ms = []
        with sample_clocks(device) as clocks, measure_energy(device) as energy:
            for _ in range(TIMED_STEPS):
                start = time.perf_counter()
                loss = step()
                synchronize(device)
                times_ms.append((time.perf_counter() - start) * 1e3)
    peak = torch.cuda.max_memory_allocated() if device == "cuda" else 0
    joules = None if energy.joules is None else energy.joules / TIMED_STEPS
    settings = describe_optimizer(step.optimizer), attention
    return Pass(tuple(times_ms), peak, joules, energy.source, float(loss), *settings, clocks)


def describe_optimizer(optimizer: torch.optim.Optimizer) -> str:
    """Whose it is, whether torch's is fused, its settings, how many parameters it has and what it keeps of them."""
    group = optimizer.param_groups[0]
    kept = {f"{name} {str(t.dtype).removeprefix('torch.')}" for s in optimizer.state.values() for name, t in s.items()}
    settings = ", ".join(f"{name} {group[name]}" for name in ("lr", "betas", "eps", "weight_decay"))
    num_params = sum(p.numel() for group in optimizer.param_groups for p in group["params"])
    whose = f"{type(optimizer).__module__.partition('.')[0]}'s {type(optimizer).__name__}"
    fused = ", fused" if group.get("fused") else ""
    return f"{whose}{fused} ({settings}) of {num_params:,} parameters, {', '.join(sorted(kept))}"


def find_attention(step: Callable[[], object]) -> str:
    """Names of torch's attention kernels, forward, that a step calls: compiled or not it calls them by these."""
    with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU]) as profile:
        step()
    called = {event.key for event in profile.key_averages()}
    found = sorted(name for name in called if name.startswith("aten::_") and "attention" in name)
    return ", ".join(name.removeprefix("aten::_") for name in found if "backward" not in name)


def training_step(
    forward: Callable[[torch.Tensor], torch.Tensor], optimizer: torch.optim.Optimizer, x: torch.Tensor
) -> TrainingStep:
    """A step over the mean square of what `forward` makes of x."""
    return TrainingStep(lambda: forward(x).float().square().mean(), optimizer)


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
