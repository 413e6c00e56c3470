"""What this machine can do at best, measured in the same run as what is compared with it: products and a copy.

A roofline share is the time that the ceilings alone would take over the time that was measured.
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from bench.record import time_calls
from bench.report import number
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize

_EDGE, _TOY_EDGE = 8192, 256
_COPY_SHAPE, _TOY_COPY_SHAPE = (32768, 4096), (256, 256)


@dataclasses.dataclass(frozen=True)
class Ceilings:
    """Floating-point operations a second of the best bf16 and FP8 product, and bytes a second of a copy."""

    bf16_flops: float
    fp8_flops: float
    copy_bytes: float
    edge: int = _EDGE

    def product_s(self, flops: float, *, fp8: bool) -> float:
        """Seconds of a product at the ceiling of its format."""
        return flops / (self.fp8_flops if fp8 else self.bf16_flops)

    def moving_s(self, num_bytes: float) -> float:
        """Seconds of moving bytes at the rate of a copy."""
        return num_bytes / self.copy_bytes

    def __str__(self) -> str:
        return (
            f"ceilings of this run: bf16 {number(self.bf16_flops / 1e12, ',.0f')} TFLOP/s, FP8 "
            f"{number(self.fp8_flops / 1e12, ',.0f')} TFLOP/s ({self.edge} cubed), copy "
            f"{number(self.copy_bytes / 1e9, ',.0f')} GB/s"
        )


def measure_ceilings(device: str, *, quick: bool) -> Ceilings:
    """Time a square product in bf16 and in FP8 (per tensor and per row, fast accumulation), and a copy."""
    edge = _TOY_EDGE if quick else _EDGE
    a, b = (torch.randn(edge, edge, device=device, dtype=torch.bfloat16) for _ in range(2))
    source = torch.randn(_TOY_COPY_SHAPE if quick else _COPY_SHAPE, device=device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    pairs = {s.kind: (quantize(a, s), quantize(b, s)) for s in (Scaling.per_tensor(), Scaling.per_row())}
    calls: dict[str, Callable[[], object]] = {"bf16": lambda: a @ b.t(), "copy": lambda: target.copy_(source)}
    calls |= {kind: functools.partial(scaled_mm, *pair, fast_accum=True) for kind, pair in pairs.items()}
    timings = time_calls(calls, repeats=3 if quick else 20, device=device)
    flops = 2.0 * edge**3
    fp8_us = min(timings[kind].median_us for kind in pairs)
    return Ceilings(
        edge=edge,
        bf16_flops=flops / timings["bf16"].median_us * 1e6,
        fp8_flops=flops / fp8_us * 1e6,
        copy_bytes=2 * source.nbytes / timings["copy"].median_us * 1e6,
    )
