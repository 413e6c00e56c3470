"""The exact 16-bit GEMM compiles for Hopper to wgmma, without spills and without serialized products."""

import pytest
import torch

from octavo.ops.gemm.hp_mm import triton as kernels
from tests.ops.compiled import compiled, record_launches


@pytest.mark.parametrize(
    ("M", "out_dtype"), [pytest.param(64, torch.float32, marks=pytest.mark.slow), (4096, torch.bfloat16)], ids=str
)
def test_launches(M: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((M, 4096), (6144, 4096), (6144,)))
    with record_launches() as found:
        kernels.hp_mm_exact(x, weight, bias, out_dtype)
    (launch,) = found
    report = compiled(launch)
    assert "wgmma.mma_async" in report.ptx, launch
