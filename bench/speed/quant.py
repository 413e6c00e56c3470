"""`octavo bench quant`: quantizers and fused norm or activation with quantization, against a plain copy.

Each is first held to its unfused parts and the reference, bit for bit, on small shapes; then all are
timed round-robin on one large matrix. The rate counts the fewest bytes that the work can move.
"""

from collections.abc import Callable

import torch

from bench.options import BenchOptions
from bench.outcome import Outcome
from bench.record import Record, Timing, time_calls
from bench.report import format_results
from bench.speed.quant_cases import QuantCase, make_cases
from octavo.numerics.quantized import QuantizedTensor
from octavo.testing.assertions import assert_bitwise, assert_sqnr

CHECKED_SHAPES = ((256, 384), (304, 272))  # aligned as the timed one is, so that no kernel is compiled for them alone
TIMED_SHAPE, TOY_SHAPE = (32768, 4096), (64, 256)
MIN_TENSOR_DB = 45.0  # a bf16 result in another order of sums
COPY_NAME = "torch copy_"


def run(options: BenchOptions) -> Outcome:
    """Check every case, time those that are right, make the record."""
    cases = [case for case in make_cases() if options.wants(case.name)]
    complaints, right = [], []
    for case in cases:
        try:
            check(case, options.device)
            right.append(case)
        except Exception as error:  # the other cases' figures are worth having; the exit code is 1
            complaints.append(f"{case.name}: {type(error).__name__}: {error}")
    print(f"{len(right)} of {len(cases)} cases equal their unfused parts and the reference, bit for bit")
    tokens, width = TOY_SHAPE if options.quick else TIMED_SHAPE
    timings = time_cases(right, tokens, width, options)
    what = (
        f"Quantizers, and norm or activation fused with quantization, [{tokens}, {width}] bf16 to E4M3: the fewest "
        "bytes that the work can move, over time; round-robin, L2 flushed."
    )
    record = Record("quant", what, device=options.device)
    copy_rate = 4.0 * tokens * width / timings[COPY_NAME].median_us * 1e6
    for case in right:
        num_bytes = case.bytes_per_element * tokens * width
        rate, p20, p80 = timings[case.name].rate(num_bytes / 1e9)
        record.add(case.name, "bandwidth", "GB/s", rate, p20, p80, peer=COPY_NAME, peer_value=copy_rate / 1e9)
        share = rate * 1e9 / copy_rate
        record.add(case.name, "share of copy bandwidth", "share", share, peer=COPY_NAME, peer_value=1.0)
    print(format_results(record, "quant"))
    return Outcome(record, complaints)


def check(case: QuantCase, device: str) -> None:
    """Every code and scale of the case equals that of its parts.

    Raises:
        AssertionError: naming case, shape and the first difference.
    """
    for tokens, width in CHECKED_SHAPES:
        inputs = case.make_inputs(tokens, width, device)
        found, wanted = case.build(inputs)(), case.parts(inputs)
        assert len(found) == len(wanted), f"{case.name}: {len(found)} results, {len(wanted)} expected"
        for index, (ours, theirs) in enumerate(zip(found, wanted, strict=True)):
            what = f"{case.name} [{tokens}, {width}], result {index}"
            if isinstance(ours, QuantizedTensor) and isinstance(theirs, QuantizedTensor):
                assert_bitwise(ours.scale, theirs.scale, f"scales of {what}")
                assert_bitwise(ours.qdata, theirs.qdata, f"codes of {what}")
            else:
                assert isinstance(ours, torch.Tensor) and isinstance(theirs, torch.Tensor), f"{what}: two kinds"
                assert_sqnr(ours, theirs, MIN_TENSOR_DB, what)


def time_cases(cases: list[QuantCase], tokens: int, width: int, options: BenchOptions) -> dict[str, Timing]:
    """Name -> timing, the copy included; cases share inputs of the same widths, which keeps them in memory."""
    inputs = {case.widths: case.make_inputs(tokens, width, options.device) for case in cases}
    source = torch.randn(tokens, width, device=options.device, dtype=torch.bfloat16)
    target = torch.empty_like(source)
    calls: dict[str, Callable[[], object]] = {COPY_NAME: lambda: target.copy_(source)}
    calls |= {case.name: case.build(inputs[case.widths]) for case in cases}
    return time_calls(calls, repeats=3 if options.quick else 30, device=options.device)
