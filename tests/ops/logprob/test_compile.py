"""Every launch of the row kernels compiles for Hopper without spills, and without a shuffle inside the loop."""

import re

import pytest
import torch

from octavo.ops.logprob import triton as kernels
from octavo.ops.logprob.chunks import empty_chunk
from tests.ops.compiled import Launch, compiled, launched

CPU = torch.device("cpu")


def launches(cols: int, has_pitch: bool, dtype: torch.dtype, rows: int = 16) -> list[Launch]:
    if has_pitch:
        logits, grads = (empty_chunk(rows, cols, t, CPU) for t in (torch.float32, dtype))
    else:
        logits, grads = (torch.empty(rows, cols, dtype=t) for t in (torch.float32, dtype))
    targets, per_row = torch.zeros(rows, dtype=torch.int64), torch.zeros(rows)

    def launch() -> None:
        kernels.logit_rows(logits, targets, 0.7, True)
        kernels.logit_rows(logits, targets, 0.7, False)
        kernels.logit_grads(grads, logits, per_row, targets, per_row, per_row, 0.7, 128)
        kernels.cross_entropy_rows(grads, logits, targets, -100, 1e-4)
        kernels.cross_entropy_rows(None, logits, targets, -100, 0.0)

    return launched(launch, 5)


@pytest.mark.parametrize(
    ("cols", "has_pitch", "dtype"),
    [
        (128256, True, torch.bfloat16),
        *(pytest.param(50257, has_pitch, torch.bfloat16, marks=pytest.mark.slow) for has_pitch in (True, False)),
        *(pytest.param(128256, True, dtype, marks=pytest.mark.slow) for dtype in (torch.float32, torch.float16)),
    ],
    ids=["aligned", "odd-vocabulary", "unaligned", "fp32-grads", "fp16-grads"],
)
def test_every_launch_compiles_for_hopper(cols: int, has_pitch: bool, dtype: torch.dtype) -> None:
    for launch in launches(cols, has_pitch, dtype):
        report = compiled(launch)
        # six blocks of 256 threads an SM, so that enough loads are under way
        assert report.registers <= (40 if has_pitch else 80), f"{launch} takes {report.registers} registers"
        if has_pitch:
            assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), f"{launch} loads less than 16 bytes at once"
            assert "shfl" not in loop_of(report.ptx), f"{launch} reduces across threads in every block"


def loop_of(ptx: str) -> str:
    """The text between the first loop's label and its backward branch."""
    for match in re.finditer(r"^(\$L__BB\w+):", ptx, re.MULTILINE):
        branch = re.compile(rf"bra(\.uni)?\s+{re.escape(match[1])};").search(ptx, match.end())
        if branch:
            return ptx[match.end() : branch.start()]
    raise AssertionError("no loop in the PTX")


@pytest.mark.parametrize("cols", [151936, pytest.param(50257, marks=pytest.mark.slow)])
def test_the_exact_normalizer_compiles_for_hopper(cols: int) -> None:
    logits = empty_chunk(16, cols, torch.float32, CPU)
    for launch in launched(lambda: kernels.exact_normalizer(logits, torch.ones(16, 1), 30), 2):
        report = compiled(launch)
        assert report.registers <= 64, f"{launch} takes {report.registers} registers"
        assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), f"{launch} loads less than 16 bytes at once"
