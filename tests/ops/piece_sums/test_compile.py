"""The kernel compiles for Hopper without spills and without fma, and moves 16 bytes at once."""

import re

import pytest
import torch

from octavo.ops.piece_sums import triton as kernels
from tests.ops.compiled import compiled, launched


@pytest.mark.parametrize(
    ("shape", "dtype"),
    [
        ((64, 4096), torch.bfloat16),
        pytest.param((64, 12288), torch.float32, marks=pytest.mark.slow),
        pytest.param((64, 431), torch.bfloat16, marks=pytest.mark.slow),
        pytest.param((4096, 1), torch.float32, marks=pytest.mark.slow),
    ],
)
def test_it_compiles(shape: tuple[int, int], dtype: torch.dtype) -> None:
    (launch,) = launched(lambda: kernels.piece_sums(torch.empty(shape, dtype=dtype), True))
    report = compiled(launch)
    assert set(re.findall(r"\b(?:fma|mul|add)\.[\w.]*f32", report.ptx)) <= {
        "mul.f32",
        "add.f32",
        "mul.rn.f32",
        "add.rn.f32",
    }
    assert ".ftz" not in report.ptx
    if shape[1] % 128 == 0:
        assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), f"{launch} loads less than 16 bytes at once"
