"""CPU time of what an eager linear is made of: `python -m bench.speed.host_time --out bench/records`.

Every part is issued in bursts without waiting, on operands so small that the device keeps up: what is left is the time
of Python, torch and the driver. A step whose parts take longer here than on the device is bound by the CPU. Beside it
stands how many Python functions of octavo a call enters, without those of the reference implementations.
"""

import json
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import FrameType

import numpy as np
import torch
from torch import nn

import octavo
from bench.options import FP8_RECIPES
from bench.program import Program, keeps
from bench.record import Record, Timing, summarize
from octavo.models import Decoder, ModelConfig
from octavo.nn import Linear, mark_weights_updated
from octavo.numerics import Numerics, Scaling, get_recipe
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize, quantize_both
from octavo.ops.quantize.many import MatrixBatch
from octavo.run.optimizer import MasterAdamW
from octavo.run.sections import OptimizerSection
from octavo.train.data import make_batch
from octavo.train.step import train_step

TOKENS, FEATURES = 128, 128
_BURST = 20  # calls without waiting


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record."""
    parser = Program("bench.speed.host_time", __doc__)
    parser.add_filter("calls")
    parser.add_argument("--repeats", type=int, default=50, help="bursts of each part")
    parser.add_argument("--before", type=Path, help="record of another tree on this machine, to stand beside this one")
    options = parser.parse(arguments)
    what = (
        f"CPU time to issue a call, bursts of {_BURST} without waiting, {TOKENS} x {FEATURES} x {FEATURES} bf16; "
        "forward and backward of a linear, and what they are made of."
    )
    record = Record("host_time", what, device=options.device)
    before, peer = values_of(options.before)
    calls = make_calls(options.device)
    for name in (name for name in calls if keeps(options, name)):
        call = calls[name]
        timing = time_bursts(call, options.repeats, options.device)
        old_us, old_calls = before.get((name, "CPU time")), before.get((name, "Python calls"))
        record.add(name, "CPU time", "us", timing.median_us, timing.p20_us, timing.p80_us, peer, old_us)
        num_calls = count_calls(call)
        record.add(name, "Python calls", "calls", num_calls, peer=peer, peer_value=old_calls)
        old = "" if old_us is None else f"   before: {old_us:8.1f} us  {old_calls:6.0f} calls"
        print(f"{name:<44} {timing.median_us:8.1f} us  {num_calls:6d} calls{old}", flush=True)
    if options.out is not None:
        print(f"record: {record.save(options.out, options.commit)}")
    return 0


def values_of(path: Path | None) -> tuple[dict[tuple[str, str], float], str | None]:
    """(case, metric) -> value of another tree's record, and that tree's name; nothing without a path."""
    if path is None:
        return {}, None
    held = json.loads(path.read_text())
    return {(row["case"], row["metric"]): row["value"] for row in held["rows"]}, f"octavo at {held['commit']}"


def make_calls(device: str) -> dict[str, Callable[[], object]]:
    """The parts by name, and the whole of them for each recipe, with the weight quantized again and kept."""
    x, grad = (torch.randn(TOKENS, FEATURES, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(FEATURES, FEATURES, device=device).bfloat16()
    group, square = Scaling.block_1x128(), Scaling.block_128x128()
    a, b = quantize(x, group), quantize(weight, square)
    batch = MatrixBatch([torch.zeros_like(weight) for _ in range(7)], square)
    calls: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty(TOKENS, FEATURES, dtype=torch.bfloat16, device=device),
        "torch.mm": lambda: torch.mm(x, weight),
        "quantize, 1x128": lambda: quantize(x, group),
        "quantize, 1x128 both ways": lambda: quantize_both(x, group, column_scaling=group),
        "quantize, 7 weights one by one": lambda: [quantize(matrix, square) for matrix in batch.matrices],
        "quantize, 7 weights in one launch": batch.quantize,
        "scaled_mm, blocks": lambda: scaled_mm(a, b),
    }
    plain = nn.Linear(FEATURES, FEATURES, bias=False, device=device, dtype=torch.bfloat16)
    calls["linear, bf16, forward"] = lambda: plain(x)
    calls["linear, bf16, forward and backward"] = _both(plain, x, grad, is_fresh=False)
    for recipe in FP8_RECIPES:
        linear = Linear(FEATURES, FEATURES, bias=False, device=device, dtype=torch.bfloat16)
        linear.set_recipe(get_recipe(recipe))
        calls[f"linear, {recipe}, forward"] = lambda linear=linear: linear(x)  # type: ignore[misc]
        calls[f"linear, {recipe}, forward and backward"] = _both(linear, x, grad, is_fresh=False)
        calls[f"linear, {recipe}, both, new weight"] = _both(linear, x, grad, is_fresh=True)
        calls[f"training step, {recipe}"] = _training_step(recipe, device)
        calls[f"decode step, {recipe}"] = _decode_step(recipe, device)
    return calls


def _build_decoder(recipe: str, device: str) -> Decoder:
    sizes = {"hidden_size": 128, "intermediate_size": 256, "head_dim": 64, "num_layers": 2, "num_heads": 2}
    config = ModelConfig(family="qwen3", vocab_size=256, num_kv_heads=2, qk_norm=True, **sizes)  # type: ignore[arg-type]
    model = Decoder(config, dtype=torch.bfloat16, device=device, seed=0)
    model.set_numerics(Numerics(get_recipe(recipe)))
    return model


def _training_step(recipe: str, device: str) -> Callable[[], object]:
    model = _build_decoder(recipe, device)
    optimizer = MasterAdamW(model, OptimizerSection())
    batch = make_batch([np.arange(TOKENS + 1) % 256], None)
    return lambda: train_step(model, optimizer, [batch], lr=1e-4, max_grad_norm=1.0, step=1)


def _decode_step(recipe: str, device: str) -> Callable[[], object]:
    """One token of eight sequences by an engine without CUDA graphs: eight requests and what they need are in it."""
    llm = octavo.LLM(_build_decoder(recipe, device), max_num_seqs=8, num_kv_pages=16, enforce_eager=True)
    params = octavo.SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
    return lambda: llm.generate([[1, 2, 3]] * 8, params)


def count_calls(call: Callable[[], object]) -> int:
    """How many Python functions of octavo one call enters, but for the reference implementations and what they call."""
    home, inside, num_calls = str(Path(octavo.__file__).parent), 0, 0

    def profile(frame: FrameType, event: str, _: object) -> None:
        nonlocal inside, num_calls
        name = frame.f_code.co_filename
        if event not in ("call", "return") or not name.startswith(home):
            return
        if name.endswith("reference.py"):
            inside += 1 if event == "call" else -1
        elif event == "call" and not inside:
            num_calls += 1

    call()  # what is made once is made
    with torch.autograd.set_multithreading_enabled(False):
        sys.setprofile(profile)
        try:
            call()
        finally:
            sys.setprofile(None)
    return num_calls


def _both(module: nn.Module, x: torch.Tensor, grad: torch.Tensor, *, is_fresh: bool) -> Callable[[], object]:
    leaf, parameter = x.clone().requires_grad_(), next(module.parameters())

    def call() -> None:
        leaf.grad = parameter.grad = None
        if is_fresh:
            mark_weights_updated(module)
        module(leaf).backward(grad)

    return call


def time_bursts(call: Callable[[], object], repeats: int, device: str) -> Timing:
    """Wall time of the issuing alone, a call."""
    samples = []
    for _ in range(repeats + 2):
        _wait(device)
        began = time.perf_counter()
        for _ in range(_BURST):
            call()
        samples.append((time.perf_counter() - began) * 1e6 / _BURST)
    _wait(device)
    return summarize(samples[2:])


def _wait(device: str) -> None:
    if device == "cuda":
        torch.cuda.synchronize()


if __name__ == "__main__":
    sys.exit(main())
