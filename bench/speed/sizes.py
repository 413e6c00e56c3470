"""`octavo bench sizes`: the step's speedup over bf16 in the layer shapes of 1B, 3B, 7B, 13B and 30B models."""

import dataclasses

from bench.measure import TIMED_STEPS, StackWorkload, VariantResult, measure_variants
from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record
from bench.report import format_results
from bench.speed.ceilings import measure_ceilings
from bench.speed.peers import describe_peers
from bench.speed.stack import StackShape
from bench.speed.step import TOY, add_step_time, choose_shape, compare_results, find_base
from bench.speed.variants import make_variants

# Layers of Llama-3.2-1B, Llama-3.2-3B, Llama-2-7B, Llama-2-13B and the first Llama's 30B, the same tokens a step.
SIZES = (
    StackShape("1B", 2048, 8192, 32, 8, 64, layers=4, batch=2, seq_len=8192),
    StackShape("3B", 3072, 8192, 24, 8, 128, layers=4, batch=2, seq_len=8192),
    StackShape("7B", 4096, 11008, 32, 32, 128, layers=3, batch=2, seq_len=8192),
    StackShape("13B", 5120, 13824, 40, 40, 128, layers=2, batch=2, seq_len=8192),
    StackShape("30B", 6656, 17920, 52, 52, 128, layers=2, batch=2, seq_len=8192),
)
TOY_SIZES = (TOY, dataclasses.replace(TOY, name="a larger toy", hidden_size=256, num_heads=4, num_kv_heads=4))


def run(options: BenchOptions) -> Outcome:
    """Measure each size, print a table each, make the record. `cases` choose among the sizes here, not the variants."""
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    sizes = [
        choose_shape(size, options)
        for size in (TOY_SIZES if options.quick else SIZES)
        if not options.filters or size.name in options.filters
    ]
    what = (
        f"Training step of {'; '.join(map(str, sizes))} (no lm_head, no RoPE, torch's fused AdamW), median of "
        f"{TIMED_STEPS} steps, {options.passes or 1} pass(es) over the variants. {ceilings}"
    )
    record, complaints = Record("sizes", what, device=options.device), []
    variants = [
        variant
        for variant in make_variants(dataclasses.replace(options, filters=()), fp8_optimizer=False)
        if variant.family in ("plain", "octavo")
    ]
    for shape in sizes:
        print(shape)
        workload = StackWorkload(shape, options.device)
        results, failures = measure_variants(variants, workload, options.device, num_passes=options.passes or 1)
        complaints += [f"{shape.name} {complaint}" for complaint in (*failures, *compare_results(results))]
        first_row = len(record.rows)
        _add_size(record, shape, results)
        print(format_results(record, "sizes", first_row), flush=True)
    return Outcome(record, complaints)


def _add_size(record: Record, shape: StackShape, results: list[VariantResult]) -> None:
    prefix = f"{shape.name} "
    for r in results:
        base = find_base(results, r.variant)
        add_step_time(record, prefix, r, base)
        if base is not None:
            record.add_ratio(prefix + r.variant.name, "speedup", base.step_ms / r.step_ms, prefix + base.variant.name)
