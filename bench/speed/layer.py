"""`octavo bench layer`: forward and backward of one Llama-3-8B layer, variant by variant, and what it saves in between.

Weights are quantized again in each call, as after an optimizer step.
"""

import dataclasses
import traceback
from collections.abc import Callable

import torch
from torch import nn

from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record, Timing, time_calls
from bench.report import format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from bench.speed.check import check_variant
from bench.speed.peers import describe_peers
from bench.speed.stack import StackShape, draw_input
from bench.speed.step import LLAMA_3_8B, TOY, choose_shape
from bench.speed.variants import BASE_NAME, StackVariant, attention_backend, build_layers, make_variants, runners
from octavo.nn import mark_weights_updated

_HEAD_START_CYCLES = 4_000_000  # two milliseconds: an eager layer is many launches
Call = Callable[[], object]


def run(options: BenchOptions) -> Outcome:
    """Check every variant, time them round-robin, make the record."""
    shape = dataclasses.replace(choose_shape(TOY if options.quick else LLAMA_3_8B, options), layers=1)
    print(describe_peers(options.device))
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    calls, saved, complaints = prepare(make_variants(options, fp8_optimizer=False), shape, options.device)
    with attention_backend(options.device):
        timings = time_calls(
            calls,
            repeats=3 if options.quick else 15,
            device=options.device,
            head_start_cycles=_HEAD_START_CYCLES,
        )
    what = f"Forward and backward of {shape}, weights quantized again; round-robin, L2 flushed, CPU ahead. {ceilings}"
    record = Record("layer", what, device=options.device)
    _add_rows(record, timings, saved, shape, ceilings)
    print(format_results(record, "layer"))
    return Outcome(record, complaints)


def prepare(
    variants: list[StackVariant], shape: StackShape, device: str
) -> tuple[dict[str, Call], dict[str, int], list[str]]:
    """Build and check each variant.

    Returns:
        (name -> call, name -> bytes that its forward keeps for its backward, complaints).
    """
    calls: dict[str, Call] = {}
    saved, complaints = {}, []
    x, grad = draw_input(shape, device), torch.randn_like(draw_input(shape, device))
    for variant in variants:
        try:
            check_variant(variant, shape, device)
            layer = build_layers(variant, shape, device)[0]
            run_layer = runners(variant, [layer], device)[0]
            call = _call(variant, layer, run_layer, x.clone().requires_grad_(), grad)
            with attention_backend(device):
                call()
                saved[variant.name] = _saved_bytes(run_layer, x.clone().requires_grad_(), grad, device)
            calls[variant.name] = call
        except Exception as error:  # the other variants' figures are worth having; the exit code is 1
            complaints.append(f"{variant.name}: {type(error).__name__}: {error}")
            traceback.print_exc()
    return calls, saved, complaints


def _call(
    variant: StackVariant,
    layer: nn.Module,
    run_layer: Callable[[torch.Tensor], torch.Tensor],
    leaf: torch.Tensor,
    grad: torch.Tensor,
) -> Call:
    def call() -> None:
        leaf.grad = None
        layer.zero_grad(set_to_none=True)
        if variant.family == "octavo":
            mark_weights_updated(layer)
        run_layer(leaf).backward(grad)

    return call


def _saved_bytes(
    run_layer: Callable[[torch.Tensor], torch.Tensor], leaf: torch.Tensor, grad: torch.Tensor, device: str
) -> int:
    if device != "cuda":
        return 0
    before = torch.cuda.memory_allocated()
    out = run_layer(leaf)
    held = torch.cuda.memory_allocated() - before - out.nbytes
    out.backward(grad)
    return held


def floor_s(variant_name: str, shape: StackShape, ceilings: Ceilings) -> float:
    """Seconds of the layer at the ceilings: linears in the variant's format, attention in bf16."""
    linears = ceilings.product_s(shape.linear_flops, fp8="bf16" not in variant_name)
    return linears + ceilings.product_s(shape.attention_flops, fp8=False)


def _add_rows(
    record: Record, timings: dict[str, Timing], saved: dict[str, int], shape: StackShape, ceilings: Ceilings
) -> None:
    base = timings.get(BASE_NAME)
    for name, timing in timings.items():
        base_ms = None if base is None else base.median_us / 1e3
        record.add_times(name, "time", "ms", timing, 1e-3, BASE_NAME, base_ms)
        if base is not None:
            record.add_ratio(name, "speedup", base.median_us / timing.median_us, BASE_NAME)
        record.add_roofline(name, floor_s(name, shape, ceilings) * 1e6 / timing.median_us)
        if saved[name]:
            kept = saved[name] / 2**20
            peer_value = saved[BASE_NAME] / 2**20 if BASE_NAME in saved else None
            record.add(name, "saved for backward", "MiB", kept, peer=BASE_NAME, peer_value=peer_value)
