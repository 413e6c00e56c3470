"""The exact 16-bit GEMM compiles for Hopper to wgmma, without spills and without serialized products."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.ops.gemm.hp_mm import triton as kernels
from octavo.testing import tolerances
from octavo.testing.compile import record_launches
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter compiles nothing")


@pytest.mark.parametrize("M", [64, 4096])
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_launches(M: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = (torch.empty(*shape, dtype=torch.bfloat16) for shape in ((M, 4096), (6144, 4096), (6144,)))
    with record_launches() as found:
        kernels.hp_mm_exact(x, weight, bias, out_dtype)
    (launch,) = found
    report = launch.compile()
    assert report.spill_bytes <= tolerances.MAX_SPILL_BYTES, f"{launch} spills {report.spill_bytes} bytes"
    assert "wgmma.mma_async" in report.ptx, launch
    assert not report.notes, f"{launch}: {report.notes}"
