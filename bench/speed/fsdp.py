"""FSDP2 over the GPUs of one host: `torchrun --nproc-per-node 2 -m bench.speed.fsdp --out bench/records`.

Six Llama-3-8B layers in plain torch, each compiled and sharded, 2 x 8192 tokens a GPU (or --tokens each): bf16,
torchao and `octavo.convert`, whose weights are gathered in bf16 or as FP8 codes. Memory is the peak of a step on one
GPU; codes held are the bytes of FP8 weights that outlive it. --trace also profiles a step of each on rank 0.
Where one GPU is all there is, `python -m bench.speed.fsdp --simulate 2` runs as rank 0 of 2 over torch's fake process
group, whose collectives copy the rank's own shard: memory is that of a rank, time is that of a step without the wire.
"""

import dataclasses
import functools
import gc
import os
import sys
import tempfile
import time
import warnings
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any, NamedTuple

import torch
import torch._functorch.config
import torch.distributed as dist
from torch import nn
from torch.distributed.fsdp import fully_shard
from torch.testing._internal.distributed.fake_pg import FakeStore  # importing it registers the backend "fake"

import octavo
from bench.measure import TIMED_STEPS, WARMUP_STEPS
from bench.profiling.kernels import read_kernels
from bench.program import Program, keeps, multicast
from bench.record import Record, Timing, summarize
from bench.speed import overlap, peers
from bench.speed.stack import PlainLayer, StackShape, draw_input, torch_gated_unit, torch_norm
from bench.speed.step import LLAMA_3_8B, TOY
from bench.speed.variants import StackVariant, attention_backend, build_optimizer
from bench.timing import synchronize
from octavo.distributed.symmetric import shared_bytes
from octavo.errors import BackendError
from octavo.parallel.copy_engine_gather import gather_by_copy_engines
from octavo.parallel.fp8_all_gather import gather_codes

RECIPES = ("delayed", "tensorwise", "rowwise", "blockwise")
BASE = "bf16, compiled"
FP8_ADAMW = "octavo.convert delayed, FP8 all-gather, FP8 AdamW"
ENGINES = ", copy engines"  # of the GPUs gather the layers, in place of NCCL's kernels
NUM_TRACES = 3
Convert = Callable[[nn.Module], object]


class Variant(NamedTuple):
    """What is done to a layer, to the model after each step, whether FSDP2 gathers the codes of octavo's, and whether
    the optimizer is octavo's AdamW with FP8 moments in place of torch's fused one; copy engines gather, or NCCL."""

    convert: Convert
    after: Convert
    gathers_codes: bool = False
    fp8_optimizer: bool = False
    copy_engines: bool = False


class Measured(NamedTuple):
    """A step in milliseconds, GiB at the peak, bytes of codes held after it, the last loss, and the step itself."""

    timing: Timing
    peak: float
    held: int
    loss: float
    step: Callable[[], torch.Tensor]


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
    has_engines = device == "cuda" and dist.get_backend() == "nccl"
    if has_engines:
        variants[f"bf16{ENGINES}"] = Variant(_nothing, _nothing, copy_engines=True)
    if peers.TORCHAO in peers.peer_versions(device):
        variants["torchao tensorwise, FP8 all-gather"] = Variant(_torchao_gather, _torchao_scales)
        variants["torchao rowwise"] = Variant(lambda layer: peers.convert_torchao(layer, "rowwise"), _nothing)
    for recipe in RECIPES:
        # as octavo's own loops have it: scales are agreed on once a step, not linear by linear in the graph
        fields = {"update_every": "step"} if recipe == "delayed" else {}
        convert = functools.partial(octavo.convert, recipe=octavo.get_recipe(recipe, **fields))
        variants[f"octavo.convert {recipe}"] = Variant(convert, _nothing)
        if has_engines:
            variants[f"octavo.convert {recipe}{ENGINES}"] = Variant(convert, _nothing, copy_engines=True)
        if recipe != "rowwise":  # whose codes would have to be gathered for both directions
            name = f"octavo.convert {recipe}, FP8 all-gather"
            variants[name] = Variant(convert, _nothing, True)
            if has_engines:
                variants[name + ENGINES] = Variant(convert, _nothing, True, copy_engines=True)
        if recipe == "delayed":
            variants[FP8_ADAMW + (ENGINES if has_engines else "")] = Variant(convert, _nothing, True, True, has_engines)
    return variants


def choose_shape(device: str, num_tokens: int | None) -> StackShape:
    """The layers' sizes, with so many tokens in each of a GPU's sequences."""
    shape = LLAMA_3_8B if device == "cuda" else TOY
    return shape if num_tokens is None else dataclasses.replace(shape, seq_len=num_tokens)


def measure(variant: Variant, shape: StackShape, device: str) -> Measured:
    """Build the variant's model and time its steps."""
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
    if variant.copy_engines and (obstacle := gather_by_copy_engines(layers)):
        raise BackendError(f"no copy engines: {obstacle}")
    as_in_stack = StackVariant("", "plain", fp8_optimizer=variant.fp8_optimizer)
    optimizer = build_optimizer(as_in_stack, list(model.parameters()), device)
    x, times = draw_input(shape, device), []

    def step() -> torch.Tensor:
        with attention_backend(device):
            hidden = model(x)
        loss: torch.Tensor = hidden.float().square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad(set_to_none=True)
        variant.after(model)
        return loss.detach()

    for index in range(WARMUP_STEPS + TIMED_STEPS):
        if index == WARMUP_STEPS:
            gc.collect()
            gc.freeze()  # a collection of all that compiling has left would stop one rank, and so both, for long
            if device == "cuda":
                torch.cuda.reset_peak_memory_stats()
        _wait(device)
        began = time.perf_counter()
        loss = step()
        synchronize(device)
        times.append((time.perf_counter() - began) * 1e3)
    held = sum(m.source.held_bytes() for m in model.modules() if isinstance(m, octavo.nn.Linear))
    peak = torch.cuda.max_memory_allocated() / 2**30 if device == "cuda" else 0.0
    peak += shared_bytes() / 2**30
    return Measured(summarize(times[WARMUP_STEPS:]), peak, held, float(loss), step)


def trace(record: Record, name: str, step: Callable[[], torch.Tensor], folder: Path, device: str) -> None:
    """Profile steps on rank 0 while the others take them too; rows, a picture and a trace of the last."""

    def wait() -> None:
        _wait(device)

    def whole_step() -> None:
        step()
        synchronize(device)

    if dist.get_rank() != 0:
        for _ in range(NUM_TRACES + 2):
            wait()
            whole_step()
        return
    stem = name.replace("octavo.convert ", "").replace(", ", "_").replace(" ", "-")
    folder.mkdir(parents=True, exist_ok=True)
    with (
        tempfile.TemporaryDirectory() as scratch
    ):  # all steps first: an error between two would leave the others waiting
        paths = overlap.trace_steps(wait, whole_step, NUM_TRACES, Path(scratch))
        wait()
        table = overlap.trace_host(whole_step, folder / f"{stem}.json.gz")
        found = [overlap.Timeline(read_kernels(path)) for path in paths]
    found[-1].draw(folder / f"{stem}.svg", f"{name}: one step on one GPU")
    print(f"{name}\n{found[-1].describe()}\n{table}", flush=True)
    steps = [one.overlaps() for one in found]
    for kind in [kind for kind in steps[0] if all(kind in one for one in steps)]:
        of_kind = [one[kind] for one in steps]
        record.add_times(name, f"{kind} kernels", "ms", summarize([one.ms for one in of_kind]))
        record.add_times(name, f"{kind} beside compute", "share", summarize([one.share for one in of_kind]))
        record.add_times(name, f"{kind} exposed", "ms", summarize([one.exposed_ms for one in of_kind]))
    record.add_times(name, "compute stream idle in a step", "ms", summarize([one.idle_ms for one in found]))
    record.add_times(name, "no stream busy in a step", "ms", summarize([one.empty_ms for one in found]))


def _start(device: str, num_simulated: int) -> str:
    if num_simulated:
        dist.init_process_group(dist.Backend.FAKE, rank=0, world_size=num_simulated, store=FakeStore())
        return f"as rank 0 of {num_simulated} simulated ranks, whose collectives copy its own shard"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    dist.init_process_group("nccl" if device == "cuda" else "gloo")
    num, kind = dist.get_world_size(), "GPUs" if device == "cuda" else "gloo ranks"
    return f"on {num} {kind} of one host{multicast()}"


def _wait(device: str) -> None:
    dist.barrier()
    synchronize(device)


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write rank 0's record; 1 where a variant failed."""
    parser = Program("bench.speed.fsdp", __doc__, former={"--only": "--filter"})
    parser.add_filter("variants, beside bf16,")
    parser.add_argument("--memory-budget", type=float, default=1.0, help="torch.compile's activation memory budget")
    parser.add_argument("--simulate", type=int, default=0, metavar="N", help="one process as rank 0 of N, no wire")
    parser.add_argument(
        "--tokens", type=int, nargs="+", help="in each of a GPU's two sequences (default: 8192); a record each"
    )
    parser.add_argument("--trace", type=Path, metavar="DIR", help="profile a step of each variant; pictures go there")
    options = parser.parse(arguments)
    torch._functorch.config.activation_memory_budget = options.memory_budget
    warnings.filterwarnings("ignore")
    device = options.device
    if options.trace is not None and device == "cpu":
        parser.error("a CPU has no kernels to trace; leave --trace out")
    where = _start(device, options.simulate)
    done = [_run(options, choose_shape(device, num_tokens), where) for num_tokens in options.tokens or [None]]
    dist.destroy_process_group()
    return 0 if all(done) else 1


def _run(options: Any, shape: StackShape, where: str) -> bool:
    """One record; whether no variant failed."""
    device, is_first, failed = options.device, dist.get_rank() == 0, False
    traced = f"; kernels by torch's profiler in {NUM_TRACES} steps of their own" if options.trace else ""
    what = (
        f"FSDP2 {where}: training step of {shape} a GPU, each layer of plain torch compiled and sharded, torch's fused "
        f"AdamW on bf16 parameters (or octavo.optim's with FP8 moments), {TIMED_STEPS} steps after {WARMUP_STEPS} and "
        f"gc.freeze(); "
        f"activation memory budget {options.memory_budget}; variants one after the other{traced}; "
        f"{peers.describe_peers(device)}"
    )
    # a profiler may slow what is timed after it: its figures are a record of their own
    kind = "fsdp_simulated" if options.simulate else "fsdp_trace" if options.trace else "fsdp"
    tokens = "" if shape == choose_shape(device, None) else f"_{shape.num_tokens}_tokens"
    record, base = Record(kind + tokens, what, device=device), None
    for name, variant in make_variants(device).items():
        if name != BASE and not keeps(options, name):
            continue
        gc.unfreeze()
        step = None  # holds the last variant's model
        gc.collect()
        if device == "cuda":
            torch._dynamo.reset()
            torch.cuda.empty_cache()
        try:
            began = time.perf_counter()
            timing, peak, held, loss, step = measure(variant, shape, device)
            base = timing.median_us if name == BASE else base
            record.add_times(name, "time", "ms", timing, peer=BASE, peer_value=base)
            record.add(name, "peak memory", "GiB", peak)
            record.add(name, "FP8 codes held after a step", "bytes", held)
            if is_first:
                took = f"loss {loss:.5f}, {time.perf_counter() - began:.0f} s in all"
                print(f"{name:<50} {timing.median_us:8.1f} ms {peak:6.2f} GiB, {held} bytes held, {took}", flush=True)
            if options.trace is not None:
                trace(record, name, step, options.trace / str(shape.num_tokens), device)
        except Exception as error:  # the other variants' figures are worth having; the exit code is 1
            failed = True
            print(f"{name}: {type(error).__name__}: {error}", flush=True)
            continue
        if is_first and options.out is not None:
            record.save(options.out, options.commit)
    return not failed


if __name__ == "__main__":
    sys.exit(main())
