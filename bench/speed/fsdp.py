"""FSDP2 over the GPUs of one host: `torchrun --nproc-per-node 2 -m bench.speed.fsdp --out bench/records`.

Six Llama-3-8B layers in plain torch, each compiled and sharded, 2 x 8192 tokens a GPU (or --tokens each): bf16,
torchao and `octavo.convert`, whose weights are gathered in bf16 or as FP8 codes. Memory is the peak of a step on one
GPU; codes held are the bytes of FP8 weights that outlive it.
Where one GPU is all there is, `python -m bench.speed.fsdp --simulate 2` runs as rank 0 of 2 over torch's fake process
group, whose collectives copy the rank's own shard: memory is that of a rank, time is that of a step without the wire.
"""

import dataclasses
import functools
import gc
import os
import sys
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from typing import NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

import octavo
from bench.measure import TIMED_STEPS, WARMUP_STEPS
from bench.program import Program, keeps
from bench.record import Record, summarize
from bench.speed import peers
from bench.speed.stack import PlainLayer, StackShape, draw_input, torch_gated_unit, torch_norm
from bench.speed.step import LLAMA_3_8B, TOY
from bench.speed.variants import attention_backend
from octavo.parallel.fp8_all_gather import gather_codes

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
BASE = "bf16, compiled"
Convert = Callable[[nn.Module], object]


class Variant(NamedTuple):
    """What is done to a layer, to the model after each step, and whether FSDP2 gathers the codes of octavo's."""

    convert: Convert
    after: Convert
    gathers_codes: bool = False


def _nothing(_: nn.Module) -> None:
    pass


def _torchao_gather(layer: nn.Module) -> None:
    float8 = import_module("torchao.float8")
    config = float8.Float8LinearConfig(enable_fsdp_float8_all_gather=True)
    float8.convert_to_float8_training(layer, config=config)


def _torchao_scales(model: nn.Module) -> None:
    """torchao's own advice after each optimizer step: all scales in one reduction."""
    import_module("torchao.float8").precompute_float8_dynamic_scale_for_fsdp(model)


def make_variants(device: str) -> dict[str, Variant]:
    """Variants by name."""
    variants = {BASE: Variant(_nothing, _nothing)}
    if peers.TORCHAO in peers.peer_versions(device):
        variants["torchao tensorwise, FP8 all-gather"] = Variant(_torchao_gather, _torchao_scales)
        variants["torchao rowwise"] = Variant(lambda layer: peers.convert_torchao(layer, "rowwise"), _nothing)
    for recipe in RECIPES:
        # as octavo's own loops have it: scales are agreed on once a step, not linear by linear in the graph
        fields = {"update_every": "step"} if recipe == "delayed" else {}
        convert = functools.partial(octavo.convert, recipe=octavo.get_recipe(recipe, **fields))
        variants[f"octavo.convert {recipe}"] = Variant(convert, _nothing)
        if recipe != "rowwise":  # whose codes would have to be gathered for both directions
            variants[f"octavo.convert {recipe}, FP8 all-gather"] = Variant(convert, _nothing, True)
    return variants


def choose_shape(device: str, num_tokens: int | None) -> StackShape:
    """The layers' sizes, with so many tokens in each of a GPU's sequences."""
    shape = LLAMA_3_8B if device == "cuda" else TOY
    return shape if num_tokens is None else dataclasses.replace(shape, seq_len=num_tokens)


def measure(variant: Variant, shape: StackShape, device: str) -> tuple[list[float], float, int, float]:
    """Milliseconds of each timed step, GiB at the peak, bytes of codes held after it, the last loss."""
    torch.manual_seed(0)
    with torch.device(device):
        layers = [PlainLayer(shape, torch_norm, torch_gated_unit).to(torch.bfloat16) for _ in range(shape.layers)]
    for layer in layers:
        variant.convert(layer)
        if device == "cuda":
            layer.compile()
        fully_shard(layer)
    model = nn.Sequential(*layers)
    fully_shard(model)
    if variant.gathers_codes:
        gather_codes(model, [*layers, model], None)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-5, fused=device == "cuda")
    x, times = draw_input(shape, device), []
    for index in range(WARMUP_STEPS + TIMED_STEPS):
        if index == WARMUP_STEPS and device == "cuda":
            torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began = time.perf_counter()
        with attention_backend(device):
            hidden = model(x)
        loss = hidden.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        variant.after(model)
        if device == "cuda":
            torch.cuda.synchronize()
        times.append((time.perf_counter() - began) * 1e3)
    held = sum(m.source.held_bytes() for m in model.modules() if isinstance(m, octavo.nn.Linear))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    return times[WARMUP_STEPS:], peak, held, float(loss.detach())


def _start(device: str, num_simulated: int) -> str:
    if num_simulated:
        dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=num_simulated, store=FakeStore())
        return f"as rank 0 of {num_simulated} simulated ranks, whose collectives copy its own shard"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    return f"on {dist.get_world_size()} GPUs of one host, NVLink multicast off"


def _wait(device: str) -> None:
    dist.barrier()
    if device == "cuda":
        torch.cuda.synchronize()


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write rank 0's record; 1 where a variant failed."""
    parser = Program("bench.speed.fsdp", __doc__, former={"--only": "--filter"})
    parser.add_filter("variants, beside bf16,")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="torch.compile's activation memory budget")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="one process as rank 0 of N, no wire")
    parser.add_argument("--tokens", type=int, help="in each of a GPU's two sequences (default: 8192)")
    options = parser.parse(arguments)
    torch._functorch.config.activation_memory_budget = options.memory_budget
    warnings.filterwarnings("ignore")
    device = options.device
    where = _start(device, options.simulate)
    shape, is_first, failed = choose_shape(device, options.tokens), dist.get_rank() == 0, False
    what = (
        f"FSDP2 {where}: training step of {shape} a GPU, each layer of plain torch compiled and sharded, torch's fused "
        f"AdamW on bf16 parameters, {TIMED_STEPS} steps after {WARMUP_STEPS}; activation memory budget "
        f"{options.memory_budget}; variants one after the other; {peers.describe_peers(device)}"
    )
    record, base = Record("fsdp_simulated" if options.simulate else "fsdp", what, device=device), None
    for name, variant in make_variants(device).items():
        if name != BASE and not keeps(options, name):
            continue
        gc.collect()
        if device == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        try:
            times, peak, held, loss = measure(variant, shape, device)
        except Exception as error:  # the other variants' figures are worth having; the exit code is 1
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        timing = summarize(times)
        base = timing.median_us if name == BASE else base
        if is_first:
            record.add(name, "time", "ms", timing.median_us, timing.p20_us, timing.p80_us, BASE, base)
            record.add(name, "peak memory", "GiB", peak)
            record.add(name, "FP8 codes held after a step", "bytes", held)
            print(
                f"{name:<36} {timing.median_us:8.1f} ms {peak:6.2f} GiB, {held} bytes held, loss {loss:.5f}", flush=True
            )
            if options.out is not None:
                record.save(options.out, options.commit)
    dist.destroy_process_group()
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
