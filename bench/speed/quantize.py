"""Quantizers: bit-equal to the CPU reference on a grid of shapes first, then timed against a plain copy.

    python -m bench.speed.quantize [--sweep] [--commit HASH] [--out FOLDER]

Needs a GPU; writes bench/records/quantize.json. --sweep only prints how other plans do.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from bench.record import Record, time_calls
from octavo.numerics import Scaling, quantize_reference
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import quantize, quantize_both, quantize_columns, triton
from octavo.ops.quantize.triton import TilePlan
from octavo.testing import GENERATORS, assert_bitwise, generate

SHAPES = [(1, 1), (129, 1), (63, 431), (303, 300), (305, 256), (256, 272), (64, 14336), (4096, 7168)]
TIMED_SHAPE = (32768, 4096)
# Each is compiled anew for every alignment of a shape.
COMBINATIONS = (
    (torch.bfloat16, torch.float8_e4m3fn, "fp32"),
    (torch.float32, torch.float8_e5m2, "e8m0"),
)
Call = Callable[[], object]


def check_all() -> int:
    """Compare every scaling and direction with the reference on a CPU; returns how many tensors were compared."""
    compared = 0
    for shape in SHAPES:
        # Large inputs once, small ones with every kind of number.
        names = ["heavy_tailed"] if shape[0] * shape[1] > 1 << 20 else list(GENERATORS)
        for source, dtype, scale_format in COMBINATIONS:
            for kind in BLOCK_SIZES:
                scaling = Scaling.of_kind(kind, dtype, scale_format=scale_format)
                compared += sum(check(generate(name, shape, source), scaling, name) for name in names)
    return compared


def check(x: torch.Tensor, scaling: Scaling, name: str) -> int:
    """Rows and columns, alone and together, against the reference."""
    on_gpu = x.cuda()
    rows, columns = quantize_both(on_gpu, scaling)
    square = Scaling.block_128x128(scaling.dtype, scale_format=scaling.scale_format)
    mixed_rows, mixed_columns = quantize_both(on_gpu, scaling, column_scaling=square)
    wanted_rows, wanted_columns = quantize_reference(x, scaling), quantize_reference(x.t(), scaling)
    pairs = [
        (quantize(on_gpu, scaling), wanted_rows),
        (rows, wanted_rows),
        (mixed_rows, wanted_rows),
        (quantize_columns(on_gpu, scaling), wanted_columns),
        (columns, wanted_columns),
        (mixed_columns, quantize_reference(x.t(), square)),
    ]
    what = f"{name} {tuple(x.shape)} {x.dtype} {scaling}"
    for found, wanted in pairs:
        assert_bitwise(found.scale, wanted.scale, f"scale of {what}")
        assert_bitwise(found.qdata, wanted.qdata, f"codes of {what}")
    return 2 * len(pairs)


# Bytes an element of bf16 that a case must move: 2 for every read of x that it needs, 1 for every code it writes.
# Scales are not counted. A fresh amax over a whole column or tensor needs a read of its own.
BYTES = {
    "1x128 rows": 3,
    "1x128 columns": 3,
    "1x128 both": 4,
    "1x128 rows, 128x128 columns": 4,
    "128x128 rows": 3,
    "128x128 columns": 3,
    "128x128 both": 4,
    "per_row rows": 3,
    "per_row columns": 5,
    "per_row both": 6,
    "per_tensor rows": 5,
    "per_tensor columns": 5,
    "per_tensor both": 6,
    "known scale rows": 3,
    "known scale both": 4,
    "known scale both, amax_out": 4,
}


def timed_calls(x: torch.Tensor) -> dict[str, Call]:
    """The call of every case of BYTES."""
    known, amax = torch.ones(1, device=x.device), torch.zeros(1, device=x.device)
    calls: dict[str, Call] = {}
    directions = (("rows", quantize), ("columns", quantize_columns), ("both", quantize_both))
    for kind, name in (
        ("block_1x128", "1x128"),
        ("block_128x128", "128x128"),
        ("per_row", "per_row"),
        ("per_tensor", "per_tensor"),
    ):
        for direction, function in directions:
            calls[f"{name} {direction}"] = functools.partial(function, x, Scaling.of_kind(kind))
    calls["1x128 rows, 128x128 columns"] = functools.partial(
        quantize_both, x, Scaling(), column_scaling=Scaling.block_128x128()
    )
    static = Scaling.per_tensor()
    calls["known scale rows"] = functools.partial(quantize, x, static, quant_scale=known)
    calls["known scale both"] = functools.partial(quantize_both, x, static, quant_scale=known)
    calls["known scale both, amax_out"] = functools.partial(quantize_both, x, static, quant_scale=known, amax_out=amax)
    return {case: calls[case] for case in BYTES}


def time_all(record: Record) -> None:
    """Time every case beside a copy of x, and add the rows."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    copy = torch.empty_like(x)
    timings = time_calls({"copy": lambda: copy.copy_(x), **timed_calls(x)})
    copy_rate, *_ = timings["copy"].rate(2 * x.nbytes / 1e9)
    print(f"{'copy':28s} {timings['copy'].median_us:8.1f} us  {copy_rate:7.0f} GB/s")
    for case, num_bytes in BYTES.items():
        rate, p20, p80 = timings[case].rate(num_bytes * x.numel() / 1e9)
        print(f"{case:28s} {timings[case].median_us:8.1f} us  {rate:7.0f} GB/s  {rate / copy_rate:5.2f} of copy")
        name = f"{case}, {TIMED_SHAPE[0]}x{TIMED_SHAPE[1]} bf16 to E4M3"
        record.add(name, "share of copy", "1", rate / copy_rate, p20 / copy_rate, p80 / copy_rate)
        record.add(name, "bandwidth", "GB/s", rate, p20, p80, peer="torch copy_", peer_value=copy_rate)


# What --sweep times: a plan's name, the case that shows it, and the plans to try, the shipped one among them.
# TilePlan(block_m, block_k, num_warps, rows_m, chunks, cols_k, registers)
VARIANTS: dict[tuple[str, str], list[TilePlan]] = {
    ("group both", "1x128 both"): [
        TilePlan(128, 128, 4, 64, 1, 128),
        TilePlan(128, 128, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 128),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 128),
        TilePlan(128, 128, 4, 64, 2, 128),
        TilePlan(128, 128, 4, 64, 1, 128, 168),
    ],
    ("group columns", "1x128 columns"): [
        TilePlan(128, 64, 2, 16, 1, 64),
        TilePlan(128, 64, 4, 16, 1, 64),
        TilePlan(128, 128, 4, 16, 1, 128),
    ],
    ("group and square", "1x128 rows, 128x128 columns"): [
        TilePlan(128, 128, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("square", "128x128 both"): [
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 128),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("square", "128x128 rows"): [TilePlan(128, 128, 8, 128, 1, 64), TilePlan(128, 128, 4, 32, 1, 64)],
    ("lines both", "per_row both"): [
        TilePlan(128, 128, 4, 64, 1, 64, 128),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 64),
    ],
    ("amax of lines", "per_row both"): [
        TilePlan(512, 128, 4, 32, 1, 16),
        TilePlan(1024, 64, 4, 64, 1, 16),
        TilePlan(256, 128, 4, 32, 1, 16),
        TilePlan(512, 128, 8, 64, 1, 16),
    ],
    ("amax of all", "per_tensor both"): [
        TilePlan(128, 256, 4, 32, 1, 16),
        TilePlan(64, 512, 8, 16, 1, 16),
        TilePlan(256, 256, 4, 16, 1, 16),
    ],
    ("both", "known scale both"): [
        TilePlan(128, 64, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("group rows", "1x128 rows"): [
        TilePlan(64, 128, 4, 64, 1, 16),
        TilePlan(32, 128, 4, 32, 1, 16),
        TilePlan(32, 128, 2, 32, 1, 16),
    ],
}


def sweep() -> None:
    """Print what every variant gives; one minute, most of it compiling."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    copy, calls = torch.empty_like(x), timed_calls(x)
    timing = time_calls({"copy": lambda: copy.copy_(x)}, repeats=20)["copy"]
    copy_rate, *_ = timing.rate(2 * x.nbytes / 1e9)
    print(f"copy {timing.median_us:.1f} us {copy_rate:.0f} GB/s")
    for (name, case), plans in VARIANTS.items():
        shipped = triton.PLANS[name]
        for plan in plans:
            triton.PLANS[name] = plan
            triton.clear_plans()
            timing = time_calls({case: calls[case]}, repeats=10, warmup=2)[case]
            share = timing.rate(BYTES[case] * x.numel() / 1e9)[0] / copy_rate
            mark = "  shipped" if plan == shipped else ""
            print(f"{name:17s} {case:28s} {tuple(plan)!s:34s} {timing.median_us:7.1f} us {share:5.2f} of copy{mark}")
        triton.PLANS[name] = shipped
        triton.clear_plans()


def main() -> None:
    """Check, time, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="print other plans' times; write nothing")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent.parent / "records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.speed.quantize needs a GPU: no CUDA device is visible")
    if arguments.sweep:
        sweep()
        return
    print(f"{check_all()} tensors equal the reference bit for bit")
    what = "Quantizers against a copy: the fewest bytes (BYTES) over time; medians, L2 flushed, interleaved"
    record = Record("quantize", what)
    time_all(record)
    print(f"wrote {record.save(arguments.out, arguments.commit)}")


if __name__ == "__main__":
    main()
