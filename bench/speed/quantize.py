"""Other plans of the quantizers beside the shipped ones: `python -m bench.speed.quantize`.

Takes a minute, most of it compiling. Needs a GPU and prints only; `octavo bench quant` holds the quantizers to the
reference and writes their record.
"""

import argparse

import torch

from bench.record import time_calls
from bench.speed.quant_cases import make_cases
from octavo.ops.quantize import triton
from octavo.ops.quantize.triton import TilePlan

TIMED_SHAPE = (32768, 4096)

# A plan's name, the case of `octavo bench quant` that shows it, and the plans to try, the shipped one among them.
# TilePlan(block_m, block_k, num_warps, rows_m, chunks, cols_k, registers)
VARIANTS: dict[tuple[str, str], list[TilePlan]] = {
    ("group both", "quantize, 1x128 both ways"): [
        TilePlan(128, 128, 4, 64, 1, 128),
        TilePlan(128, 128, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 128),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 128),
        TilePlan(128, 128, 4, 64, 2, 128),
        TilePlan(128, 128, 4, 64, 1, 128, 168),
    ],
    ("group columns", "quantize, block_1x128 columns"): [
        TilePlan(128, 64, 2, 16, 1, 64),
        TilePlan(128, 64, 4, 16, 1, 64),
        TilePlan(128, 128, 4, 16, 1, 128),
    ],
    ("group and square", "quantize, 1x128 rows, 128x128 columns"): [
        TilePlan(128, 128, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("square", "quantize, 128x128 both ways"): [
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 128),
        TilePlan(128, 128, 4, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("square", "quantize, 128x128 rows"): [TilePlan(128, 128, 8, 128, 1, 64), TilePlan(128, 128, 4, 32, 1, 64)],
    ("lines both", "quantize, per row and column"): [
        TilePlan(128, 128, 4, 64, 1, 64, 128),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 4, 128, 1, 64),
    ],
    ("amax of lines", "quantize, per row and column"): [
        TilePlan(512, 128, 4, 32, 1, 16),
        TilePlan(1024, 64, 4, 64, 1, 16),
        TilePlan(256, 128, 4, 32, 1, 16),
        TilePlan(512, 128, 8, 64, 1, 16),
    ],
    ("amax of all", "quantize, per tensor both ways"): [
        TilePlan(128, 256, 4, 32, 1, 16),
        TilePlan(64, 512, 8, 16, 1, 16),
        TilePlan(256, 256, 4, 16, 1, 16),
    ],
    ("both", "quantize, per tensor both ways, known scale"): [
        TilePlan(128, 64, 4, 64, 1, 64),
        TilePlan(128, 128, 8, 128, 1, 64),
        TilePlan(128, 128, 8, 64, 1, 128),
    ],
    ("group rows", "quantize, 1x128 rows"): [
        TilePlan(64, 128, 4, 64, 1, 16),
        TilePlan(32, 128, 4, 32, 1, 16),
        TilePlan(32, 128, 2, 32, 1, 16),
    ],
}


def main() -> None:
    """Print what every variant gives."""
    parser = argparse.ArgumentParser(prog="python -m bench.speed.quantize", description=__doc__)
    parser.add_argument("--sweep", action="store_true", help="what it does anyway")
    parser.parse_args()
    if not torch.cuda.is_available():
        raise SystemExit("bench.speed.quantize needs a GPU: no CUDA device is visible")
    cases = {case.name: case for case in make_cases()}
    [x] = cases["quantize, 1x128 rows"].make_inputs(*TIMED_SHAPE, "cuda")
    copy = torch.empty_like(x)
    timing = time_calls({"copy": lambda: copy.copy_(x)}, repeats=20)["copy"]
    copy_rate, *_ = timing.rate(2 * x.nbytes / 1e9)
    print(f"copy {timing.median_us:.1f} us {copy_rate:.0f} GB/s")
    for (name, case), plans in VARIANTS.items():
        shipped, call = triton.PLANS[name], cases[case].build((x,))
        for plan in plans:
            triton.PLANS[name] = plan
            triton.clear_plans()
            timing = time_calls({case: call}, repeats=10, warmup=2)[case]
            share = timing.rate(cases[case].bytes_per_element * x.numel() / 1e9)[0] / copy_rate
            mark = "  shipped" if plan == shipped else ""
            print(f"{name:17s} {case:42s} {tuple(plan)!s:34s} {timing.median_us:7.1f} us {share:5.2f} of copy{mark}")
        triton.PLANS[name] = shipped
        triton.clear_plans()


if __name__ == "__main__":
    main()
