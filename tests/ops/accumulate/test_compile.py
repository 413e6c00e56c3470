"""The kernel that adds gradients up compiles for Hopper without spills or fma, and moves 16 bytes at once."""

import re

import pytest
import torch

from octavo.ops.accumulate import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched


@pytest.mark.parametrize("old_dtype", [None, torch.bfloat16, torch.float32], ids=str)
def test_it_compiles(old_dtype: torch.dtype | None) -> None:
    grads = [torch.empty(shape, dtype=torch.bfloat16) for shape in ((4096,), (4096, 4096))] * 20
    sums = [torch.empty_like(x, dtype=torch.float32) for x in grads]
    olds = [None if old_dtype is None else torch.empty_like(x, dtype=old_dtype) for x in grads]
    (launch,) = launched(lambda: kernels.add_gradients(list(zip(sums, olds, grads, strict=True))))
    report = compiled(launch)
    assert report.registers <= 64, f"{report.registers} registers: fewer than four programs an SM"
    assert_moves_16_bytes(launch, report.ptx)
    assert ".ftz" not in report.ptx and not re.search(r"\bfma\.", report.ptx)
