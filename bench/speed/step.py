"""`octavo bench step`: a training step of Llama-3-8B's layers, alone and in a whole model, bf16 beside FP8.

Every variant starts from the same weights and sees one batch. Each is compared with the fastest bf16 variant that ran
with the same optimizer, whose name is the row's peer.
"""

import dataclasses
from collections.abc import Callable, Sequence

from bench.clocks import add_clocks
from bench.measure import (
    TIMED_STEPS,
    WARMUP_STEPS,
    Failure,
    StackWorkload,
    StepWorkload,
    VariantResult,
    measure_variants,
)
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import FAILED, STEP_TIME, format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.peers import describe_peers
from bench.speed.stack import StackShape
from bench.speed.variants import StackVariant, make_variants
from bench.speed.whole_model import MAX_GRAD_NORM, MODEL, PREFIX, TOY_MODEL, ModelWorkload, make_model_variants
from octavo.numerics import get_recipe

LLAMA_3_8B = StackShape("Llama-3-8B", 4096, 14336, 32, 8, 128, layers=6, batch=2, seq_len=8192)
TOY = StackShape("a toy", 128, 256, 2, 1, 64, layers=2, batch=1, seq_len=64)
# The residual stream hides much of a variant's error in this loss, and check_variant looks closer; this catches a
# training step that goes wrong later.
MAX_LOSS_DIFFERENCE = 0.01
# Delayed scaling's first step runs under scales of 1, in which most of a gradient underflows: it lags one step behind.
MAX_LOSS_DIFFERENCE_DELAYED = 0.02


def run(options: BenchOptions) -> Outcome:
    """Measure every variant of both workloads, print the table, make the record."""
    shape = choose_shape(TOY if options.quick else LLAMA_3_8B, options)
    model = choose_shape(TOY_MODEL if options.quick else MODEL, options)
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    num_passes = options.passes or 2
    what = (
        f"Training step of {shape} (no lm_head, no RoPE, loss = mean of squares) and of a whole model, {model} "
        f"(vocabulary {model.vocab_size:,}, head, RoPE, cross-entropy, clipped to a norm of {MAX_GRAD_NORM:g}), "
        f"AdamW at 1e-5, each variant built, warmed up for {WARMUP_STEPS} steps and timed for {TIMED_STEPS}, "
        f"{num_passes} passes over the variants; mean of the passes' medians. AdamW is torch's fused one on bf16 "
        f"parameters where nothing else is said. x is over the fastest bf16 of the same optimizer. {ceilings}"
    )
    record, complaints = Record("step", what, device=options.device), []
    parts: tuple[tuple[str, StackShape, StepWorkload, list[StackVariant]], ...] = (
        ("", shape, StackWorkload(shape, options.device), make_variants(options, fp8_optimizer=True)),
        (PREFIX, model, ModelWorkload(model, options.device), make_model_variants(options)),
    )
    energy, attention = "not measured", set[str]()
    for prefix, size, workload, variants in parts:
        results, failures = measure_variants(variants, workload, options.device, num_passes=num_passes)
        complaints += [f"{prefix}{text}" for text in (*find_complaints(failures), *compare_results(results))]
        add_results(record, results, size, ceilings, prefix)
        add_failures(record, failures, prefix)
        attention |= {p.attention for r in results for p in r.passes}
        energy = next((p.energy_source for r in results for p in r.passes), energy)
    record.what += f" Attention: {'; '.join(sorted(attention))}."
    print(format_results(record, "step"))
    print(f"energy: {energy}")
    return Outcome(record, complaints)


def choose_shape(shape: StackShape, options: BenchOptions) -> StackShape:
    """A benchmark's own stack with the sizes that were asked for."""
    return dataclasses.replace(
        shape,
        layers=options.layers or shape.layers,
        batch=options.batch or shape.batch,
        seq_len=options.seq_len or shape.seq_len,
    )


def find_base(results: Sequence[VariantResult], variant: StackVariant) -> VariantResult | None:
    """The fastest bf16 variant that ran with a variant's optimizer, None for none."""
    same = (r for r in results if r.variant.recipe == "bf16" and r.variant.fp8_optimizer == variant.fp8_optimizer)
    return min(same, key=lambda r: r.step_ms, default=None)


def compare_results(results: list[VariantResult]) -> list[str]:
    """Variants that ran with another optimizer or attention than the bf16 they are compared with, or stray in loss.

    Losses of the two optimizers part: torch's loses small updates of bf16 parameters, octavo's rounds them
    stochastically.
    """
    complaints = []
    for r in results:
        base = find_base(results, r.variant)
        if base is None:
            complaints.append(f"{r.variant.name}: no bf16 variant with its optimizer ran, so it was compared with none")
            continue
        if r.settings != base.settings:
            complaints.append(
                f"{r.variant.name} ran with {r.settings}; {base.variant.name}, which it is compared with, "
                f"with {base.settings}"
            )
        if not abs(r.loss - base.loss) <= _bound(r.variant) * base.loss:
            complaints.append(
                f"{r.variant.name}: loss {r.loss:.6g} differs from {base.variant.name}'s {base.loss:.6g} by more than "
                f"{_bound(r.variant):.0%}"
            )
    return complaints


def find_complaints(failures: Sequence[Failure]) -> list[str]:
    """All failures but those of other libraries' models that do not fit: they have a row, and others run."""
    return [str(f) for f in failures if f.variant.family == "octavo" or not f.is_out_of_memory]


def _bound(variant: StackVariant) -> float:
    return MAX_LOSS_DIFFERENCE_DELAYED if get_recipe(variant.recipe).has_state else MAX_LOSS_DIFFERENCE


def floor_s(variant: StackVariant, shape: StackShape, ceilings: Ceilings) -> float:
    """Seconds of a step at the ceilings: linears in the variant's format, attention and head in bf16, AdamW's bytes."""
    state_bytes = 4 if variant.fp8_optimizer else 8  # two moments, read and written
    optimizer_bytes = shape.num_params * (2 + 4 + state_bytes)  # gradient read; parameter and moments both ways
    linears = ceilings.product_s(shape.linear_flops, fp8=variant.recipe != "bf16")
    others = ceilings.product_s(shape.attention_flops + shape.head_flops, fp8=False)
    return linears + others + ceilings.moving_s(optimizer_bytes)


def _memory_ratio(result: VariantResult, base: VariantResult | None) -> float | None:
    return None if base is None or not base.peak_bytes else result.peak_bytes / base.peak_bytes


def add_results(
    record: Record, results: list[VariantResult], shape: StackShape, ceilings: Ceilings, prefix: str = ""
) -> None:
    """Rows of every variant, beside the fastest bf16's of the same run and optimizer.

    Args:
        prefix: of the cases' names.
    """
    loss_unit = "nats" if shape.vocab_size else "mean square"
    for r in results:
        base = find_base(results, r.variant)
        add_step_time(record, prefix, r, base)
        for metric, unit, measure in _metrics(shape, loss_unit, base):
            value = measure(r)
            if value is not None:
                peer, peer_value = (None, None) if base is None else (prefix + base.variant.name, measure(base))
                record.add(prefix + r.variant.name, metric, unit, value, peer=peer, peer_value=peer_value)
        record.add_roofline(prefix + r.variant.name, floor_s(r.variant, shape, ceilings) * 1e3 / r.step_ms)
        add_savings(record, prefix, r, results)
        add_clocks(record, prefix + r.variant.name, [p.clocks for p in r.passes])


def _metrics(
    shape: StackShape, loss_unit: str, base: VariantResult | None
) -> list[tuple[str, str, Callable[[VariantResult], float | None]]]:
    return [
        ("throughput", "tokens/s", lambda r: shape.num_tokens / r.step_ms * 1e3),
        ("peak memory", "GiB", lambda r: r.peak_bytes / 2**30),
        ("peak memory over bf16's", "x", lambda r: _memory_ratio(r, base)),
        ("speedup", "x", lambda r: None if base is None else base.step_ms / r.step_ms),
        ("energy a step", "J", lambda r: r.joules),
        (f"loss after {WARMUP_STEPS + TIMED_STEPS} steps", loss_unit, lambda r: r.loss),
    ]


def add_step_time(record: Record, prefix: str, result: VariantResult, base: VariantResult | None) -> None:
    """The row of a step's time, beside the fastest bf16's."""
    peer, peer_value = (None, None) if base is None else (prefix + base.variant.name, base.step_ms)
    case = prefix + result.variant.name
    record.add(case, STEP_TIME, "ms", result.step_ms, *result.fifths_ms, peer=peer, peer_value=peer_value)


def add_savings(record: Record, prefix: str, result: VariantResult, results: Sequence[VariantResult]) -> None:
    """Of a variant with octavo's FP8 optimizer: its step and memory over those of the same layers with torch's."""
    if not result.variant.fp8_optimizer:
        return
    same = dataclasses.replace(result.variant, fp8_optimizer=False, name="")
    for other in results:
        if dataclasses.replace(other.variant, name="") == same:
            case, peer = prefix + result.variant.name, prefix + other.variant.name
            record.add_ratio(case, "speed over torch's AdamW", other.step_ms / result.step_ms, peer)
            if other.peak_bytes:
                record.add_ratio(case, "peak memory over torch's AdamW", result.peak_bytes / other.peak_bytes, peer)


def add_failures(record: Record, failures: Sequence[Failure], prefix: str = "") -> None:
    """A row for each variant that did not run; its unit is the error's name."""
    for failure in failures:
        record.add(prefix + failure.variant.name, FAILED, failure.error, 1)
