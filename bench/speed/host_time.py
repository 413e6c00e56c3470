"""CPU time of what an eager linear is made of: `python -m bench.speed.host_time --out bench/records`.

Every part is issued in bursts without waiting, on operands so small that the device keeps up: what is left is the time
of Python, torch and the driver. A step whose parts take longer here than on the device is bound by the CPU.
"""

import argparse
import sys
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from bench.options import FP8_RECIPES
from bench.record import Record, Timing, summarize
from octavo.nn import Linear, mark_weights_updated
from octavo.numerics import Scaling, get_recipe
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize, quantize_both

TOKENS, FEATURES = 128, 128
_BURST = 20  # calls without waiting


def main(arguments: list[str] | None = None) -> int:
    """Measure, print a table, write the record."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed.host_time", description=__doc__)
    parser.add_argument("--repeats", type=int, default=50, help="bursts of each part")
    parser.add_argument("--device", default="cuda" if torch.cuda.is_available() else "cpu")
    parser.add_argument("--out", type=Path, help="folder of the record")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    options = parser.parse_args(arguments)
    what = (
        f"CPU time to issue a call, bursts of {_BURST} without waiting, {TOKENS} x {FEATURES} x {FEATURES} bf16; "
        "forward and backward of a linear, and what they are made of."
    )
    record = Record("host_time", what, device=options.device)
    for name, call in make_calls(options.device).items():
        timing = time_bursts(call, options.repeats, options.device)
        record.add(name, "CPU time", "us", timing.median_us, timing.p20_us, timing.p80_us)
        print(f"{name:<44} {timing.median_us:8.1f} us", flush=True)
    if options.out is not None:
        print(f"record: {record.save(options.out, options.commit)}")
    return 0


def make_calls(device: str) -> dict[str, Callable[[], object]]:
    """The parts by name, and the whole of them for each recipe, with the weight quantized anew and kept."""
    x, grad = (torch.randn(TOKENS, FEATURES, device=device).bfloat16() for _ in range(2))
    weight = torch.randn(FEATURES, FEATURES, device=device).bfloat16()
    group, square = Scaling.block_1x128(), Scaling.block_128x128()
    a, b = quantize(x, group), quantize(weight, square)
    calls: dict[str, Callable[[], object]] = {
        "torch.empty": lambda: torch.empty(TOKENS, FEATURES, dtype=torch.bfloat16, device=device),
        "torch.mm": lambda: torch.mm(x, weight),
        "quantize, 1x128": lambda: quantize(x, group),
        "quantize, 1x128 both ways": lambda: quantize_both(x, group, column_scaling=group),
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
    return calls


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
