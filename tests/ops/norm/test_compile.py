"""The norm kernels compile for Hopper without spills, with 16-byte moves, and sum their rows in the tree's order."""

import re

import pytest
import torch

from octavo.ops.norm import triton as kernels
from tests.ops.compiled import Launch, assert_moves_16_bytes, compiled, launched

KINDS = pytest.mark.parametrize("kind", ["rms_norm", "layer_norm"])


def launches(kind: str, K: int, *, residual: bool = True) -> list[Launch]:
    """Forward, backward from bf16 and from FP8."""
    x, weight = torch.empty(256, K, dtype=torch.bfloat16), torch.empty(K, dtype=torch.bfloat16)
    rstd, scale = torch.empty(256), torch.empty(-(-K // 128), 256).t()
    added, bias, mean = x if residual else None, None, None
    if kind == "layer_norm":
        bias, mean = weight, rstd

    def launch() -> None:
        kernels.norm_forward(x, weight, bias, added, 1e-5, kind, False)
        kernels.norm_backward(x, x, None, weight, mean, rstd, added, False, [])
        codes = x.to(torch.float8_e4m3fn)
        kernels.norm_backward(x, codes, scale, weight, mean, rstd, added, False, [1, 128])

    return launched(launch)


def check(launch: Launch) -> None:
    report = compiled(launch)
    assert ".ftz" not in report.ptx, f"{launch} flushes subnormals"
    assert set(re.findall(r"\b(?:div|sqrt)\.\w+\.f32", report.ptx)) <= {"div.rn.f32", "sqrt.rn.f32"}, launch
    if launch.kernel.__name__ == "norm_rows":
        assert_moves_16_bytes(launch, report.ptx)


@pytest.mark.parametrize("kind", ["rms_norm", pytest.param("layer_norm", marks=pytest.mark.slow)])
def test_rows_of_4096(kind: str) -> None:
    found = launches(kind, 4096)
    assert len(found) == 4  # the last sum is the same for both backwards
    for launch in found:
        check(launch)


@pytest.mark.slow
@KINDS
@pytest.mark.parametrize(
    ("K", "residual"),
    # without a residual the same kernel holds fewer values: the shortest and the longest rows stand for it
    [
        *((128, True), (5120, True), (20480, True), (128, False)),
        *(pytest.param(*rest, marks=pytest.mark.largest) for rest in ((1024, True), (2048, True), (8192, True))),
        pytest.param(20480, False, marks=pytest.mark.largest),
    ],
)
def test_other_rows(K: int, residual: bool, kind: str) -> None:
    for launch in launches(kind, K, residual=residual):
        check(launch)
