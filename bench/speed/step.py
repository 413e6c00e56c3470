"""`octavo bench step`: a training step of six Llama-3-8B layers, every variant from one start on one batch."""

import dataclasses
from collections.abc import Callable

from bench.measure import TIMED_STEPS, WARMUP_STEPS, VariantResult, measure_variants
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import STEP_TIME, format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.peers import describe_peers
from bench.speed.stack import StackShape
from bench.speed.variants import BASE_NAME, StackVariant, make_variants
from octavo.numerics import get_recipe

LLAMA_3_8B = StackShape("Llama-3-8B", 4096, 14336, 32, 8, 128, layers=6, batch=2, seq_len=8192)
TOY = StackShape("a toy", 128, 256, 2, 1, 64, layers=2, batch=1, seq_len=64)
# The residual stream hides much of a variant's error in this loss, and check_variant looks closer; this catches a
# training step that goes wrong later.
MAX_LOSS_DIFFERENCE = 0.01
# Delayed scaling's first step runs under scales of 1, in which most of a gradient underflows: it lags one step behind.
MAX_LOSS_DIFFERENCE_DELAYED = 0.02


def run(options: BenchOptions) -> Outcome:
    """Measure every variant, print the table, make the record."""
    shape = choose_shape(TOY if options.quick else LLAMA_3_8B, options)
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    num_passes = options.passes or 2
    variants = make_variants(options, fp8_optimizer=True)
    results, complaints = measure_variants(variants, shape, options.device, num_passes=num_passes)
    complaints += compare_losses(results)
    what = (
        f"Training step of {shape} (no lm_head, no RoPE, loss = mean of squares, AdamW at 1e-5), each variant built, "
        f"warmed up for {WARMUP_STEPS} steps and timed for {TIMED_STEPS}, {num_passes} passes over the variants; mean "
        f"of the passes' medians. AdamW is torch's fused one on bf16 parameters where nothing else is said. {ceilings}"
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


def find_base(results: list[VariantResult]) -> VariantResult | None:
    """Compiled bf16's result, None where it did not run."""
    return next((r for r in results if r.variant.name == BASE_NAME), None)


def compare_losses(results: list[VariantResult]) -> list[str]:
    """Variants whose loss after the same steps strays from that of bf16 with the same optimizer.

    The two optimizers part: torch's loses small updates of bf16 parameters, octavo's rounds them stochastically.
    """
    bases = {r.variant.fp8_optimizer: r for r in reversed(results) if r.variant.recipe == "bf16"}  # the first of each
    complaints = []
    for r in results:
        base = bases.get(r.variant.fp8_optimizer)
        if base is None:
            complaints.append(
                f"{r.variant.name}: no bf16 variant with its optimizer ran, so its loss was compared with nothing"
            )
        elif not abs(r.loss - base.loss) <= _bound(r.variant) * base.loss:
            complaints.append(
                f"{r.variant.name}: loss {r.loss:.6g} differs from {base.variant.name}'s {base.loss:.6g} by more than "
                f"{_bound(r.variant):.0%}"
            )
    return complaints


def _bound(variant: StackVariant) -> float:
    return MAX_LOSS_DIFFERENCE_DELAYED if get_recipe(variant.recipe).has_state else MAX_LOSS_DIFFERENCE


def floor_s(variant: StackVariant, shape: StackShape, ceilings: Ceilings) -> float:
    """Seconds of a step at the ceilings: linears in the variant's format, attention in bf16, the optimizer's bytes."""
    state_bytes = 4 if variant.fp8_optimizer else 8  # two moments, read and written
    optimizer_bytes = shape.num_params * (2 + 4 + state_bytes)  # gradient read; parameter and moments both ways
    linears = ceilings.product_s(shape.linear_flops, fp8=variant.recipe != "bf16")
    attention = ceilings.product_s(shape.attention_flops, fp8=False)
    return linears + attention + ceilings.moving_s(optimizer_bytes)


def _memory_ratio(result: VariantResult, base: VariantResult | None) -> float | None:
    return None if base is None or not base.peak_bytes else result.peak_bytes / base.peak_bytes


def add_results(record: Record, results: list[VariantResult], shape: StackShape, ceilings: Ceilings) -> None:
    """Rows of every variant, beside compiled bf16's of the same run."""
    base = find_base(results)
    metrics: list[tuple[str, str, Callable[[VariantResult], float | None]]] = [
        ("throughput", "tokens/s", lambda r: shape.num_tokens / r.step_ms * 1e3),
        ("peak memory", "GiB", lambda r: r.peak_bytes / 2**30),
        ("peak memory over bf16's", "x", lambda r: _memory_ratio(r, base)),
        ("speedup", "x", lambda r: None if base is None else base.step_ms / r.step_ms),
        ("energy a step", "J", lambda r: r.joules),
        (f"loss after {WARMUP_STEPS + TIMED_STEPS} steps", "mean square", lambda r: r.loss),
    ]
    for r in results:
        add_step_time(record, r.variant.name, r, base)
        for metric, unit, measure in metrics:
            value = measure(r)
            if value is not None:
                record.add(
                    r.variant.name,
                    metric,
                    unit,
                    value,
                    peer=BASE_NAME,
                    peer_value=None if base is None else measure(base),
                )
        record.add_roofline(r.variant.name, floor_s(r.variant, shape, ceilings) * 1e3 / r.step_ms)


def add_step_time(record: Record, case: str, result: VariantResult, base: VariantResult | None) -> None:
    """The row of a step's time, beside compiled bf16's."""
    peer_value = None if base is None else base.step_ms
    record.add(case, STEP_TIME, "ms", result.step_ms, *result.fifths_ms, peer=BASE_NAME, peer_value=peer_value)
