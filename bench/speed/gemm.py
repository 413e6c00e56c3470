"""`octavo bench gemm`: products of quantized operands beside bf16's, with their error against fp32.

M rows, N out, K summed; a [M, K], b [N, K].
"""

import dataclasses
import functools
from collections.abc import Callable

import torch

from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record, Timing, time_calls
from bench.report import format_results
from bench.speed.ceilings import Ceilings, measure_ceilings
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.gemm.skinny_mm import MAX_TOKENS, skinny_mm
from octavo.ops.quantize import quantize

SHAPES = (
    (16, 7168, 16384),
    (64, 4096, 7168),
    (64, 4096, 12288),  # down projection of Qwen3-8B
    (128, 4096, 12288),
    (256, 4096, 12288),
    (256, 4096, 4096),
    (128, 24576, 1536),
    (1024, 8192, 8192),
    (4096, 4096, 7168),
    (4096, 7168, 16384),
    (8192, 8192, 8192),
    (16384, 6144, 4096),
)
TOY_SHAPES = ((64, 256, 384),)
BASE_NAME = "bf16"
# What the output's own rounding to bf16 leaves is 1.7e-3; fast accumulation gave up to 3.5e-3 on an H200.
MAX_ERROR, MAX_FAST_ERROR = 2.5e-3, 5e-3


@dataclasses.dataclass(frozen=True)
class GemmProduct:
    """A pair of scalings, whether sums stay in the matrix units, and whether it goes through ops.skinny_mm."""

    name: str
    a: Scaling
    b: Scaling
    fast_accum: bool = False
    few_tokens: bool = False

    def call(self, left: QuantizedTensor, right: QuantizedTensor) -> torch.Tensor:
        """left times right transposed."""
        return skinny_mm(left, right) if self.few_tokens else scaled_mm(left, right, fast_accum=self.fast_accum)


_TENSOR, _ROW = Scaling.per_tensor(), Scaling.per_row()
PRODUCTS = (
    GemmProduct("tensorwise, slow", _TENSOR, _TENSOR),
    GemmProduct("tensorwise, fast", _TENSOR, _TENSOR, fast_accum=True),
    GemmProduct("rowwise, slow", _ROW, _ROW),
    GemmProduct("rowwise, fast", _ROW, _ROW, fast_accum=True),
    GemmProduct("block 1x128 x 128x128", Scaling.block_1x128(), Scaling.block_128x128()),
    GemmProduct("block 1x128 x 1x128", Scaling.block_1x128(), Scaling.block_1x128()),
    GemmProduct("rowwise, few tokens", _ROW, _ROW, few_tokens=True),
    GemmProduct("block 1x128 x 128x128, few tokens", Scaling.block_1x128(), Scaling.block_128x128(), few_tokens=True),
)
# torchao has no product of its own: it calls the library that octavo calls, so bf16 is the one peer here.


def run(options: BenchOptions) -> Outcome:
    """Check and time every product on every shape."""
    ceilings = measure_ceilings(options.device, quick=options.quick)
    print(ceilings)
    what = (
        "Products of quantized operands through octavo.ops.gemm.scaled_mm, few tokens' through "
        f"octavo.ops.gemm.skinny_mm; round-robin, L2 flushed. {ceilings}"
    )
    record, complaints = Record("gemm", what, device=options.device), []
    for shape in TOY_SHAPES if options.quick else SHAPES:
        name = "x".join(map(str, shape))
        fitting = [p for p in PRODUCTS if shape[0] <= MAX_TOKENS or not p.few_tokens]
        products = [p for p in fitting if options.wants(f"{name} {p.name}")]
        if not products:
            continue
        calls, errors = prepare(shape, products, options.device)
        timings = time_calls(calls, repeats=3 if options.quick else 30, device=options.device)
        complaints += [f"{name} {case}: relative error {e:.1e}" for case, e in errors.items() if e > limit(case)]
        first_row = len(record.rows)
        _add_shape(record, shape, timings, errors, ceilings)
        print(format_results(record, "gemm", first_row), flush=True)
    return Outcome(record, complaints)


def limit(case: str) -> float:
    """Largest relative error that a product may have."""
    return MAX_FAST_ERROR if case.endswith("fast") else MAX_ERROR


def prepare(
    shape: tuple[int, int, int], products: list[GemmProduct], device: str
) -> tuple[dict[str, Callable[[], torch.Tensor]], dict[str, float]]:
    """Operands of normal data, a call a product, and each product's error against fp32 on the decoded operands.

    Returns:
        (name -> call, name -> relative error).
    """
    rows, cols, depth = shape
    generator = torch.Generator(device).manual_seed(0)
    a, b = (
        torch.randn(sizes, generator=generator, device=device).to(torch.bfloat16)
        for sizes in ((rows, depth), (cols, depth))
    )
    calls: dict[str, Callable[[], torch.Tensor]] = {BASE_NAME: lambda: a @ b.t()}
    errors = {}
    for product in products:
        left, right = quantize(a, product.a), quantize(b, product.b)
        calls[product.name] = functools.partial(product.call, left, right)
        errors[product.name] = _relative_error(calls[product.name](), left.dequantize() @ right.dequantize().t())
    return calls, errors


def _relative_error(found: torch.Tensor, wanted: torch.Tensor) -> float:
    error = float((found.double() - wanted.double()).norm() / wanted.double().norm())
    return error if error == error else float("inf")


def roofline_share(shape: tuple[int, int, int], case: str, timing: Timing, ceilings: Ceilings) -> float:
    """The floor (operations or bytes, whichever takes longer) over the measured time."""
    rows, cols, depth = shape
    fp8 = case != BASE_NAME
    num_bytes = (rows + cols) * depth * (1 if fp8 else 2) + 2 * rows * cols
    floor = max(ceilings.product_s(2.0 * rows * cols * depth, fp8=fp8), ceilings.moving_s(num_bytes))
    return floor * 1e6 / timing.median_us


def _add_shape(
    record: Record,
    shape: tuple[int, int, int],
    timings: dict[str, Timing],
    errors: dict[str, float],
    ceilings: Ceilings,
) -> None:
    teraflops = 2e-12 * shape[0] * shape[1] * shape[2]
    base = teraflops / timings[BASE_NAME].median_us * 1e6
    for case, timing in timings.items():
        name = f"{'x'.join(map(str, shape))} {case}"
        record.add(name, "rate", "TFLOP/s", *timing.rate(teraflops), peer=BASE_NAME, peer_value=base)
        share = roofline_share(shape, case, timing, ceilings)
        record.add_roofline(name, share)
        if case in errors:
            record.add(name, "relative error", "of |product|", errors[case], peer="bound", peer_value=limit(case))
