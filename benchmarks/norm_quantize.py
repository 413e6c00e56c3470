"""Fused norms: equal to norm, then quantizer, bit for bit on this GPU first, then timed against a plain copy.

    python -m benchmarks.norm_quantize [--sweep] [--commit HASH] [--out FOLDER]

Needs a GPU; writes benchmarks/records/norm_quantize.json. A rate counts the fewest bytes that a call can move, whatever
it moves. Cases of two directions are timed as two launches and as one. --sweep only prints how other constants do.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.norm import norm_backward, norm_forward
from octavo.ops.norm import reference as norm_reference
from octavo.ops.norm import triton as norm_kernels
from octavo.ops.norm_quantize import norm_quantize
from octavo.ops.norm_quantize import triton as kernels
from octavo.ops.quantize import quantize, quantize_both
from octavo.testing import Record, assert_bitwise, assert_sqnr, generate, time_calls, tolerances

# `make test-gpu` has the grid of shapes; each is compiled anew.
CHECKED = [("rms_norm", (4096, 4096)), ("layer_norm", (303, 344))]
TIMED_SHAPE = (32768, 4096)
EPS = 1e-6
ROW, BLOCK, SQUARE, TENSOR = Scaling.per_row(), Scaling(), Scaling.block_128x128(), Scaling.per_tensor()
Call = Callable[[], object]

# Case -> (scalings of rows and columns, whether quant_scale is known, bytes an element, whether one launch can do it).
# TRAINING's are timed with a residual and a saved input as well.
FORWARD: dict[str, tuple[Scaling, Scaling | None, bool, int, bool]] = {
    "1x128 rows": (BLOCK, None, False, 3, False),
    "per row rows": (ROW, None, False, 3, False),
    "known scale rows": (TENSOR, None, True, 3, False),
    "1x128 rows + 128x128 columns": (BLOCK, SQUARE, False, 4, True),
    "1x128 rows + 1x128 columns": (BLOCK, BLOCK, False, 4, True),
    "known scale both": (TENSOR, TENSOR, True, 4, True),
    "per row + per column": (ROW, ROW, False, 6, False),
    "fresh per tensor both": (TENSOR, TENSOR, False, 6, False),
}

TRAINING = ("1x128 rows + 128x128 columns", "known scale both", "per row + per column")


@functools.cache
def _residual(shape: tuple[int, int], device: torch.device) -> torch.Tensor:
    return generate("normal", shape, torch.bfloat16, seed=3).to(device)


def residual_of(x: torch.Tensor) -> torch.Tensor:
    """A second tensor of x's shape, in memory of its own: reading x twice would be free."""
    return _residual((x.shape[0], x.shape[1]), x.device)


def fused(x: torch.Tensor, weight: torch.Tensor, case: str, *, kind: str = "rms_norm", training: bool = False) -> Call:
    """The call of a case; training adds a residual and keeps the sum in FP8 for the backward."""
    scaling, column_scaling, is_known, _, _ = FORWARD[case]
    known = torch.ones(1, device=x.device) if is_known else None
    bias = weight if kind == "layer_norm" else None
    amax = torch.zeros(1, device=x.device) if is_known else None
    return functools.partial(
        norm_quantize, x, weight, bias=bias, eps=EPS, kind=kind, scaling=scaling, column_scaling=column_scaling,
        quant_scale=known, amax_out=amax, residual=residual_of(x) if training else None,
        store_scaling=BLOCK if training else None,
    )  # type: ignore[arg-type]  # fmt: skip


def with_launches(call: Call, one_launch: bool) -> Call:
    """The call under one of the two forms."""

    def run() -> object:
        shipped, kernels.ONE_LAUNCH = kernels.ONE_LAUNCH, one_launch
        try:
            return call()
        finally:
            kernels.ONE_LAUNCH = shipped

    return run


def check_all() -> int:
    """Every case against its parts on this GPU, gradients against the CPU; returns how many tensors were compared."""
    compared = 0
    for kind, shape in CHECKED:
        x = generate("normal", shape, torch.bfloat16).cuda()
        weight = generate("normal", shape[1:], torch.bfloat16, seed=1).cuda()
        for case in FORWARD if kind == "rms_norm" else TRAINING:
            for one_launch in (False, True) if FORWARD[case][4] else (False,):
                compared += check(x, weight, case, kind, one_launch)
        compared += check_backward(x, weight, kind)
    return compared


def check(x: torch.Tensor, weight: torch.Tensor, case: str, kind: str, one_launch: bool) -> int:
    """One case against norm_forward and the quantizers."""
    training = case in TRAINING
    found: Any = with_launches(fused(x, weight, case, kind=kind, training=training), one_launch)()
    bias, residual = weight if kind == "layer_norm" else None, residual_of(x) if training else None
    normed = norm_forward(x, weight, bias=bias, eps=EPS, kind=kind, residual=residual)  # type: ignore[arg-type]
    scaling, column_scaling, is_known, _, _ = FORWARD[case]
    known = torch.ones(1, device=x.device) if is_known else None
    if column_scaling is None:
        parts: tuple[QuantizedTensor, ...] = (quantize(normed.y, scaling, quant_scale=known),)
    else:
        parts = quantize_both(normed.y, scaling, column_scaling=column_scaling, quant_scale=known)
    pairs = list(zip((found.rows, found.columns), parts, strict=False))
    if training:
        assert normed.summed is not None, "there is a residual"
        assert_bitwise(found.summed, normed.summed, f"sum of {case}")
        pairs.append((found.stored, quantize(normed.summed, BLOCK)))
    what = f"{case}, {kind}, {tuple(x.shape)}, {'one launch' if one_launch else 'two launches'}"
    for ours, wanted in pairs:
        assert_bitwise(ours.scale, wanted.scale, f"scale of {what}")
        assert_bitwise(ours.qdata, wanted.qdata, f"codes of {what}")
    assert_bitwise(found.rstd, normed.rstd, what)
    return 2 * len(pairs) + 1


def check_backward(x: torch.Tensor, weight: torch.Tensor, kind: str) -> int:
    """Gradients from bf16 and from FP8 against the reference on the CPU."""
    grad = generate("normal", tuple(x.shape), torch.bfloat16, seed=2).cuda()
    mean, rstd = norm_reference.statistics(x, EPS, kind)
    saved_mean = mean if kind == "layer_norm" else None
    for stored in (x, quantize(x, BLOCK)):
        found = norm_backward(grad, stored, weight, saved_mean, rstd, kind=kind, grad_residual=x)  # type: ignore[arg-type]
        values = (stored.dequantize() if isinstance(stored, QuantizedTensor) else stored).cpu()
        on_cpu = [None if t is None else t.cpu() for t in (saved_mean, rstd, x)]
        wanted = norm_reference.backward(grad.cpu(), values, weight.cpu(), *on_cpu, False)  # type: ignore[arg-type]
        for ours, theirs in zip(found, wanted, strict=True):
            if ours is not None:
                assert_sqnr(ours, theirs, tolerances.BF16_OUTPUT_ACROSS_DEVICES_DB, f"gradient of {kind} {x.shape}")
    return 6


def timed_calls(x: torch.Tensor) -> dict[str, tuple[Call, int]]:
    """Case -> (call, the fewest bytes an element that it can move)."""
    weight = generate("normal", (x.shape[1],), torch.bfloat16, seed=1).cuda()
    calls: dict[str, tuple[Call, int]] = {}
    for case, (_, _, _, num_bytes, has_one_launch) in FORWARD.items():
        for training in (False, True) if case in TRAINING else (False,):
            call = fused(x, weight, case, training=training)
            # Training reads the residual, writes the sum and its FP8 copy.
            name, total = f"{case}{', residual and saved input' if training else ''}", num_bytes + 5 * training
            calls[name] = (with_launches(call, False), total)
            if has_one_launch:
                calls[f"{name}, one launch"] = (with_launches(call, True), total)
    calls["rms_norm alone"] = (lambda: norm_forward(x, weight, eps=EPS, kind="rms_norm"), 4)
    calls["rms_norm alone, residual"] = (
        lambda: norm_forward(x, weight, eps=EPS, kind="rms_norm", residual=residual_of(x)),
        8,
    )
    calls["layer_norm alone"] = (lambda: norm_forward(x, weight, bias=weight, eps=EPS, kind="layer_norm"), 4)
    return calls | backward_calls(x, weight)


def backward_calls(x: torch.Tensor, weight: torch.Tensor) -> dict[str, tuple[Call, int]]:
    """The backward from bf16 and from FP8, with and without the residual stream's gradient."""
    _, rstd = norm_reference.statistics(x, EPS, "rms_norm")
    grad = generate("normal", (x.shape[0], x.shape[1]), torch.bfloat16, seed=2).cuda()
    calls: dict[str, tuple[Call, int]] = {}
    for name, stored, num_bytes in (("bf16", x, 6), ("FP8", quantize(x, BLOCK), 5)):
        for residual in (None, residual_of(x)):
            case = f"backward from {name}{'' if residual is None else ', residual'}"
            call = functools.partial(
                norm_backward, grad, stored, weight, None, rstd, kind="rms_norm", grad_residual=residual
            )
            calls[case] = (call, num_bytes + 2 * (residual is not None))
    return calls


def time_all(record: Record) -> None:
    """Time every case beside a copy of x, and add the rows."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    copy = torch.empty_like(x)
    cases = timed_calls(x)
    calls = {"copy": lambda: copy.copy_(x), **{case: call for case, (call, _) in cases.items()}}
    timings = time_calls(calls, repeats=20, warmup=3)
    copy_rate, *_ = timings["copy"].rate(2 * x.nbytes / 1e9)
    print(f"{'copy':64s} {timings['copy'].median_us:8.1f} us  {copy_rate:7.0f} GB/s")
    for case, (_, num_bytes) in cases.items():
        value, p20, p80 = timings[case].rate(num_bytes * x.numel() / 1e9)
        print(f"{case:64s} {timings[case].median_us:8.1f} us  {value:7.0f} GB/s  {value / copy_rate:5.2f} of copy")
        name = f"{case}, {TIMED_SHAPE[0]}x{TIMED_SHAPE[1]} bf16 to E4M3"
        record.add(name, "bandwidth", "GB/s", value, p20, p80, peer="torch copy_", peer_value=copy_rate)


def sweep() -> None:
    """Print what other constants give, by setting the launchers'."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    calls = {case: call for case, (call, _) in timed_calls(x).items()}
    rows = ["1x128 rows", "per row rows", "rms_norm alone", "1x128 rows + 128x128 columns, residual and saved input"]
    both = [case for case in calls if case.endswith("one launch") and "1x128 columns" not in case]
    backward = [case for case in calls if case.startswith("backward")]
    candidates: list[tuple[Any, str, list[object], list[str]]] = [
        (norm_kernels, "ELEMENTS_PER_WARP", [512, 1024, 2048], rows),
        (norm_kernels, "ROW_TILE", [4096, 8192, 16384], rows),
        (kernels, "LAG", [2, 4, 8, 16, 32], both),
        (kernels, "STRIPE_ELEMENTS_PER_WARP", [256, 512, 1024], both),
        (
            kernels,
            "COLUMN_AMAX_LOOP",
            [(n, w, s) for n in (8, 16, 32) for w, s in ((1, 1), (2, 1), (2, 3), (4, 3))],
            ["per row + per column", "per row + per column, residual and saved input"],
        ),
        (
            kernels,
            "TENSOR_AMAX_LOOP",
            [(1, 1, 1), (1, 2, 1), (4, 1, 1), (4, 2, 3), (8, 2, 3)],
            ["known scale rows", "known scale both", "fresh per tensor both"],
        ),
        (norm_kernels, "BACKWARD_ELEMENTS_PER_WARP", [256, 512, 1024], backward),
        (norm_kernels, "BACKWARD_PROGRAMS", [132, 264, 528, 1056], backward),
        (norm_kernels, "BACKWARD_STAGES", [1, 2, 3, 4], backward),
    ]
    for module, constant, values, cases in candidates:
        shipped = getattr(module, constant)
        for value in values:
            setattr(module, constant, value)
            timings = time_calls({case: calls[case] for case in cases}, repeats=10, warmup=2)
            print(constant, value, {case: f"{t.median_us:.1f} us" for case, t in timings.items()}, flush=True)
        setattr(module, constant, shipped)


def main() -> None:
    """Check, time, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="print other constants' times; write nothing")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.norm_quantize needs a GPU: no CUDA device is visible")
    if arguments.sweep:
        sweep()
        return
    print(f"{check_all()} tensors equal their parts bit for bit, gradients the reference")
    what = "Norm + quantize against a copy: the fewest bytes a call can move over time; medians, L2 flushed"
    record = Record("norm_quantize", what)
    time_all(record)
    print(f"wrote {record.save(arguments.out, arguments.commit)}")


if __name__ == "__main__":
    main()
