"""`make bench`: the speed records of docs/performance.md, one `octavo bench` after the other."""

import sys

import torch

from octavo.bench import BENCHMARKS, BenchOptions, run_benchmark


def main() -> int:
    """Run them; 2 where this machine has no GPU, whose speed is what they are about, 1 where an arm failed."""
    if not torch.cuda.is_available():
        print(
            "the speed benchmarks need an NVIDIA GPU, and torch sees none here; see benchmarks/records", file=sys.stderr
        )
        return 2
    went_well = [run_benchmark(name, BenchOptions()) for name in BENCHMARKS]  # each of them, whatever befell the others
    return 0 if all(went_well) else 1


if __name__ == "__main__":
    sys.exit(main())
