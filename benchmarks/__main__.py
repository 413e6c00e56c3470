"""`make bench`: every speed benchmark, each of which checks correctness first and writes its record."""

import sys

import torch

from benchmarks import quantize


def main() -> int:
    """Run them; 2 where this machine has no GPU, whose speed is what they are about."""
    if not torch.cuda.is_available():
        print(
            "the speed benchmarks need an NVIDIA GPU, and torch sees none here; see benchmarks/records", file=sys.stderr
        )
        return 2
    quantize.main()
    return 0


if __name__ == "__main__":
    sys.exit(main())
