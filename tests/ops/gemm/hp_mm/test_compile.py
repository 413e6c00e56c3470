"""The exact 16-bit GEMM compiles for Hopper to wgmma, without spills and without serialized products."""

import pytest
import torch

from octavo.ops.gemm.hp_mm import triton as kernels
from octavo.testing.tolerances import MAX_SPILL_BYTES
from tests.ops.compiled import compile_all


@pytest.mark.parametrize(
    ("M", "out_dtype"), [pytest.param(64, torch.float32, marks=pytest.mark.slow), (4096, torch.bfloat16)], ids=str
)
def test_launches(M: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((M, 4096), (6144, 4096), (6144,)))
    (report,) = compile_all(lambda: kernels.hp_mm_exact(x, weight, bias, out_dtype), 1, MAX_SPILL_BYTES)
    assert "wgmma.mma_async" in report.ptx
