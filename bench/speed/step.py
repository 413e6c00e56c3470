"""`octavo bench step`: a training step of six Llama-3-8B layers, every arm from the same weights on the same batch."""

import dataclasses
from collections.abc import Callable

from bench.measure import TIMED_STEPS, WARMUP_STEPS, ArmResult, measure_arms
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import STEP_TIME, format_results
from bench.speed.arms import BASE_NAME, Arm, make_arms
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.peers import describe_peers
from bench.speed.stack import StackShape
from octavo.numerics import get_recipe

LLAMA_3_8B = StackShape("Llama-3-8B", 4096, 14336, 32, 8, 128, layers=6, batch=2, seq_len=8192)
TOY = StackShape("a toy", 128, 256, 2, 1, 64, layers=2, batch=1, seq_len=64)
# The residual stream hides much of an arm's error in this loss, and check_arm looks closer; this catches a training
# step that goes wrong later.
MAX_LOSS_DIFFERENCE = 0.01
# Delayed scaling's first step runs under scales of 1, in which most of a gradient underflows: it lags one step behind.
MAX_LOSS_DIFFERENCE_DELAYED = 0.02


def run(options: BenchOptions) -> Outcome:
    """Measure every arm, print the table, make the record."""
    shape = choose_shape(TOY if options.quick else LLAMA_3_8B, options)
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    num_passes = options.passes or 2
    arms = make_arms(options, fp8_optimizer=True)
    results, complaints = measure_arms(arms, shape, options.device, num_passes=num_passes)
    complaints += compare_losses(results)
    what = (
        f"Training step of {shape} (no lm_head, no RoPE, loss = mean of squares, AdamW at 1e-5), each arm built, "
        f"warmed up for {WARMUP_STEPS} steps and timed for {TIMED_STEPS}, {num_passes} passes over the arms; mean of "
        f"the passes' medians. AdamW is torch's fused one on bf16 parameters where nothing else is said. {ceilings}"
    )
    record = Record("step", what, device=options.device)
    add_results(record, results, shape, ceilings)
    print(format_results(record, "step"))
    print(f"energy: {next((p.energy_source for r in results for p in r.passes), 'not measured')}")
    return Outcome(record, complaints)


def choose_shape(shape: StackShape, options: BenchOptions) -> StackShape:
    """A benchmark's own stack with the sizes that were asked for."""
    return dataclasses.replace(
        shape,
        layers=options.layers or shape.layers,
        batch=options.batch or shape.batch,
        seq_len=options.seq_len or shape.seq_len,
    )


def find_base(results: list[ArmResult]) -> ArmResult | None:
    """Compiled bf16's result, None where it did not run."""
    return next((r for r in results if r.arm.name == BASE_NAME), None)


def compare_losses(results: list[ArmResult]) -> list[str]:
    """Arms whose loss after the same steps strays from that of bf16 with the same optimizer.

    The two optimizers part: torch's loses small updates of bf16 parameters, octavo's rounds them stochastically.
    """
    bases = {r.arm.fp8_optimizer: r for r in reversed(results) if r.arm.recipe == "bf16"}  # the first of each
    complaints = []
    for r in results:
        base = bases.get(r.arm.fp8_optimizer)
        if base is None:
            complaints.append(
                f"{r.arm.name}: no bf16 arm with its optimizer ran, so its loss was compared with nothing"
            )
        elif not abs(r.loss - base.loss) <= _bound(r.arm) * base.loss:
            complaints.append(
                f"{r.arm.name}: loss {r.loss:.6g} differs from {base.arm.name}'s {base.loss:.6g} by more than "
                f"{_bound(r.arm):.0%}"
            )
    return complaints


def _bound(arm: Arm) -> float:
    return MAX_LOSS_DIFFERENCE_DELAYED if get_recipe(arm.recipe).has_state else MAX_LOSS_DIFFERENCE


def floor_s(arm: Arm, shape: StackShape, ceilings: Ceilings) -> float:
    """Seconds of a step at the ceilings: linears in the arm's format, attention in bf16, the optimizer's bytes."""
    state_bytes = 4 if arm.fp8_optimizer else 8  # two moments, read and written
    optimizer_bytes = shape.num_params * (2 + 4 + state_bytes)  # gradient read; parameter and moments both ways
    linears = ceilings.product_s(shape.linear_flops, fp8=arm.recipe != "bf16")
    attention = ceilings.product_s(shape.attention_flops, fp8=False)
    return linears + attention + ceilings.moving_s(optimizer_bytes)


def _memory_ratio(result: ArmResult, base: ArmResult | None) -> float | None:
    return None if base is None or not base.peak_bytes else result.peak_bytes / base.peak_bytes


def add_results(record: Record, results: list[ArmResult], shape: StackShape, ceilings: Ceilings) -> None:
    """Rows of every arm, beside compiled bf16's of the same run."""
    base = find_base(results)
    metrics: list[tuple[str, str, Callable[[ArmResult], float | None]]] = [
        ("throughput", "tokens/s", lambda r: shape.num_tokens / r.step_ms * 1e3),
        ("peak memory", "GiB", lambda r: r.peak_bytes / 2**30),
        ("peak memory over bf16's", "x", lambda r: _memory_ratio(r, base)),
        ("speedup", "x", lambda r: None if base is None else base.step_ms / r.step_ms),
        ("energy a step", "J", lambda r: r.joules),
        (f"loss after {WARMUP_STEPS + TIMED_STEPS} steps", "mean square", lambda r: r.loss),
    ]
    for r in results:
        add_step_time(record, r.arm.name, r, base)
        for metric, unit, measure in metrics:
            value = measure(r)
            if value is not None:
                record.add(
                    r.arm.name, metric, unit, value, peer=BASE_NAME, peer_value=None if base is None else measure(base)
                )
        record.add_roofline(r.arm.name, floor_s(r.arm, shape, ceilings) * 1e3 / r.step_ms)


def add_step_time(record: Record, case: str, result: ArmResult, base: ArmResult | None) -> None:
    """The row of a step's time, beside compiled bf16's."""
    peer_value = None if base is None else base.step_ms
    record.add(case, STEP_TIME, "ms", result.step_ms, *result.fifths_ms, peer=BASE_NAME, peer_value=peer_value)
