"""Quantizers: bit-equal to the CPU reference on a grid of shapes first, then timed against a plain copy.

    python -m benchmarks.quantize [--sweep] [--commit HASH] [--out FOLDER]

Needs a GPU; writes benchmarks/records/quantize.json. --sweep only prints how other tiles do.
"""

import argparse
import functools
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import quantize, quantize_both, quantize_columns, triton
from octavo.testing import GENERATORS, Record, assert_bitwise, generate, time_calls

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
    wanted_rows, wanted_columns = quantize_reference(x, scaling), quantize_reference(x.t(), scaling)
    pairs = [
        (quantize(on_gpu, scaling), wanted_rows),
        (rows, wanted_rows),
        (quantize_columns(on_gpu, scaling), wanted_columns),
        (columns, wanted_columns),
    ]
    what = f"{name} {tuple(x.shape)} {x.dtype} {scaling}"
    for found, wanted in pairs:
        assert_bitwise(found.scale, wanted.scale, f"scale of {what}")
        assert_bitwise(found.qdata, wanted.qdata, f"codes of {what}")
    return 2 * len(pairs)


def timed_calls(x: torch.Tensor) -> dict[str, tuple[Call, int]]:
    """Case -> (call, bytes that it must move: x read once, codes and scales written once)."""
    known = torch.tensor(1.0, device=x.device)
    calls: dict[str, Call] = {}
    for kind in ("block_1x128", "block_128x128", "per_row", "per_tensor"):
        for direction, function in (("rows", quantize), ("columns", quantize_columns), ("both", quantize_both)):
            calls[f"{kind} {direction}"] = functools.partial(function, x, Scaling.of_kind(kind))
    static = Scaling.per_tensor()
    calls["per_tensor known scale rows"] = lambda: quantize(x, static, quant_scale=known)
    calls["per_tensor known scale both"] = lambda: quantize_both(x, static, quant_scale=known)
    return {case: (call, moved_bytes(x, call())) for case, call in calls.items()}


def moved_bytes(x: torch.Tensor, result: object) -> int:
    """Bytes of x and of one QuantizedTensor or two."""
    parts = result if isinstance(result, tuple) else (result,)
    return x.nbytes + sum(part.num_bytes for part in parts if isinstance(part, QuantizedTensor))


def time_all(record: Record) -> None:
    """Time every case beside a copy of x, and add the rows."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    copy = torch.empty_like(x)
    cases = timed_calls(x)
    timings = time_calls({"copy": lambda: copy.copy_(x), **{case: call for case, (call, _) in cases.items()}})
    copy_rate, *_ = timings["copy"].rate(2 * x.nbytes / 1e9)
    print(f"{'copy':28s} {timings['copy'].median_us:8.1f} us  {copy_rate:7.0f} GB/s")
    for case, (_, num_bytes) in cases.items():
        value, p20, p80 = timings[case].rate(num_bytes / 1e9)
        print(f"{case:28s} {timings[case].median_us:8.1f} us  {value:7.0f} GB/s  {value / copy_rate:5.2f} of copy")
        name = f"{case}, {TIMED_SHAPE[0]}x{TIMED_SHAPE[1]} bf16 to E4M3"
        record.add(name, "bandwidth", "GB/s", value, p20, p80, peer="torch copy_", peer_value=copy_rate)


def sweep() -> None:
    """Print what other tiles and warp counts give, by setting the launcher's constants."""
    x = generate("normal", TIMED_SHAPE, torch.bfloat16).cuda()
    block, square, line, static = Scaling(), Scaling.block_128x128(), Scaling.per_row(), Scaling.per_tensor()
    known = torch.tensor(1.0, device=x.device)
    candidates: list[tuple[str, list[object], list[tuple[str, Call]]]] = [
        (
            "GROUP_ROWS_TILE",
            [(m, w) for m in (8, 16, 32, 64) for w in (1, 2, 4, 8)],
            [("1x128 rows", lambda: quantize(x, block))],
        ),
        (
            "SQUARE_TILE_WARPS",
            [{128: w, 32: 4} for w in (4, 8, 16, 32)],
            [("1x128 both", lambda: quantize_both(x, block)), ("128x128 both", lambda: quantize_both(x, square))],
        ),
        (
            "TRANSPOSED_TILE",
            [(m, k, w) for m, k in ((128, 64), (64, 64), (128, 32), (64, 128), (128, 128)) for w in (4, 8, 16)],
            [
                ("per_row columns", lambda: quantize_columns(x, line)),
                ("known scale both", lambda: quantize_both(x, static, quant_scale=known)),
            ],
        ),
        (
            "STRAIGHT_TILE",
            [(m, k, w) for m, k in ((1, 4096), (4, 1024), (16, 512), (32, 256)) for w in (4, 8, 16)],
            [("per_tensor rows", lambda: quantize(x, static))],
        ),
        ("WHOLE_ROW_WARPS", [2, 4, 8, 16], [("per_row rows", lambda: quantize(x, line))]),
        ("WHOLE_ROW_BLOCK", [1024, 2048, 4096], [("per_row rows", lambda: quantize(x, line))]),
    ]
    for constant, values, calls in candidates:
        shipped = getattr(triton, constant)
        for value in values:
            setattr(triton, constant, value)
            timings = time_calls(dict(calls), repeats=10, warmup=2)
            print(constant, value, {case: f"{t.median_us:.1f} us" for case, t in timings.items()})
        setattr(triton, constant, shipped)


def main() -> None:
    """Check, time, write the record."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--sweep", action="store_true", help="print other tiles' times; write nothing")
    parser.add_argument("--commit", help="of the tree that is measured, where git is not at hand")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records")
    arguments = parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("benchmarks.quantize needs a GPU: no CUDA device is visible")
    if arguments.sweep:
        sweep()
        return
    print(f"{check_all()} tensors equal the reference bit for bit")
    what = "Quantizers against a copy: bytes of input, codes and scales over time; medians, L2 flushed, interleaved"
    record = Record("quantize", what)
    time_all(record)
    print(f"wrote {record.save(arguments.out, arguments.commit)}")


if __name__ == "__main__":
    main()
