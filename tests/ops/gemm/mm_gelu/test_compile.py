"""The GEMM with GeLU in its epilogue compiles for Hopper to 8-bit wgmma, without spills."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm.mm_gelu import triton as kernels
from octavo.testing import tolerances
from octavo.testing.compile import record_launches
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter compiles nothing")


@pytest.mark.parametrize("M", [64, 4096])
def test_launches(M: int) -> None:
    """GPT-J-6B's sizes."""
    scaling, one = Scaling.per_tensor(), torch.ones(1, 1)
    a, b = (QuantizedTensor(torch.empty(rows, 4096, dtype=scaling.dtype), one, scaling) for rows in (M, 16384))
    with record_launches() as found:
        kernels.mm_gelu(a, b, torch.empty(16384, dtype=torch.bfloat16), scaling, one.view(1), torch.bfloat16)
    (launch,) = found
    report = launch.compile()
    assert report.spill_bytes <= tolerances.MAX_SPILL_BYTES, f"{launch} spills {report.spill_bytes} bytes"
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in report.ptx, launch
    assert "C7515" not in report.notes, report.notes
