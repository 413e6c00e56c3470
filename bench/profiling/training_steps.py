"""Profiles of steps that train: a stack of layers, and the reinforcement loop phase by phase."""

import contextlib
import dataclasses
import statistics
import time
from collections.abc import Callable, Iterator

from bench.clocks import sample_clocks
from bench.measure import TIMED_STEPS, WARMUP_STEPS, StackWorkload
from bench.options import FP8_RECIPES
from bench.profiling.kernels import Watched, watch
from bench.profiling.settings import Settings
from bench.profiling.step_profile import Profile
from bench.rl.synthetic import loop_config, model_config
from bench.rl.whole_step import METRICS, REFIT, Loop
from bench.rl.workloads import LOOP_VARIANTS, LOOPS
from bench.speed.step import LLAMA_3_8B, TOY, choose_shape, floor_s
from bench.speed.variants import StackVariant, attention_backend
from bench.timing import synchronize
from octavo.rl.phases import JOULES, SECONDS, PhaseMeter

STEP_VARIANTS = ("fp8-adamw", "torch-adamw", "bf16")
_STEP_RECIPES = ("delayed", "blockwise")  # where --recipe names none
_PROFILED_STEPS, _NUM_LOOP_LAYERS = 2, 9


def profile_step(settings: Settings, _name: str, variant_name: str) -> Iterator[Profile]:
    """Training steps of `octavo bench step`'s stack: one profile a recipe."""
    settings.host.free()
    device, asked = settings.options.device, settings.options.recipes
    shape = choose_shape(TOY if settings.options.quick else LLAMA_3_8B, settings.options)
    recipes = ("bf16",) if variant_name == "bf16" else _STEP_RECIPES if asked == FP8_RECIPES else asked
    for recipe in recipes:
        optimizer = "torch's AdamW" if variant_name == "torch-adamw" else "FP8 AdamW"
        variant = StackVariant(f"octavo {recipe}", "octavo", recipe, fp8_optimizer=variant_name != "torch-adamw")
        step = StackWorkload(shape, device).build(variant)
        with attention_backend(device):
            for _ in range(settings.few(WARMUP_STEPS)):
                step()
            with sample_clocks(device) as clocks:
                times_ms = [_time(step, device)[1] for _ in range(settings.few(TIMED_STEPS))]
            issued_ms = _time(step, device)[0]
            num_steps = settings.options.passes or _PROFILED_STEPS
            with watch(device) as watched:
                for _ in range(num_steps):
                    step()
        floor_ms = floor_s(variant, shape, settings.ceilings) * 1e3
        figures = {"without the profiler, ms a step": statistics.median(times_ms), "floor, ms": floor_ms}
        figures |= clocks.figures() | {"CPU's time to issue it, ms": issued_ms}
        yield Profile(f"training step, {shape}: {variant.name}, {optimizer}", watched, num_steps, figures)
        del step
        settings.host.free()


def _time(step: Callable[[], object], device: str) -> tuple[float, float]:
    """Milliseconds until the call returns, and until the device is done."""
    synchronize(device)
    began = time.perf_counter()
    step()
    issued = time.perf_counter()
    synchronize(device)
    return (issued - began) * 1e3, (time.perf_counter() - began) * 1e3


class WatchingMeter(PhaseMeter):
    """Profiles each phase on its own; its times include what reading the profiles takes."""

    def __init__(self, device: str) -> None:
        super().__init__()
        self.phases: dict[str, Watched] = {}
        self._device = device
        self._running = contextlib.ExitStack()
        self._watched = self._running.enter_context(watch(device))

    def end(self, phase: str) -> None:
        """As PhaseMeter.end; the last phase of a step starts no other."""
        super().end(phase)
        self.phases[phase] = self._watched
        self._running.close()
        if phase != REFIT:
            self._watched = self._running.enter_context(watch(self._device))

    def close(self) -> None:
        """End the profile under way, where a step failed."""
        self._running.close()


class WatchedLoop(Loop):
    """A loop of which a step can be profiled."""

    watching: WatchingMeter | None = None

    def make_meter(self) -> PhaseMeter:
        """Of one step."""
        return self.watching or super().make_meter()


def profile_rl(settings: Settings, _name: str, variant_name: str) -> Iterator[Profile]:
    """A step of the reinforcement loop: one profile a phase."""
    settings.host.free()
    options, variant, sizes = settings.options, LOOP_VARIANTS[variant_name], LOOPS["whole-step"]
    sizes = sizes.shrunk() if options.quick else dataclasses.replace(sizes, num_layers=_NUM_LOOP_LAYERS)
    sizes = dataclasses.replace(sizes, num_layers=options.layers or sizes.num_layers)
    config = loop_config(variant, sizes, settings.host.recipe, options.device)
    with contextlib.closing(WatchedLoop(config, model_config(sizes), sizes, options.device)) as loop:
        loop.step(1)  # warm-up
        with sample_clocks(options.device) as clocks:
            times = loop.step(2).times
        with contextlib.closing(WatchingMeter(options.device)) as loop.watching:
            loop.step(3)
        phases = loop.watching.phases
    for phase, watched in phases.items():
        figures = {"without the profiler, ms": times[SECONDS + phase] * 1e3}
        if JOULES + phase in times:
            figures["energy, J"] = times[JOULES + phase]
        figures |= {f"{name}, of the whole step": value for name, value in clocks.figures().items()}
        title = f"{METRICS[phase]}, {sizes.label}: {variant.label(settings.host.recipe)}"
        yield Profile(title, watched, 1, figures)
    del loop
    settings.host.free()
