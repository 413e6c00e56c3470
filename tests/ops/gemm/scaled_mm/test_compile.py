"""The bias after a library's GEMM compiles for Hopper without spills and moves 16 bytes at once."""

import re

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.ops.gemm.scaled_mm import triton as kernels
from octavo.testing import tolerances
from octavo.testing.compile import record_launches
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter compiles nothing")
STORES = {torch.bfloat16: "cvt.rn.bf16x2.f32", torch.float16: "cvt.rn.f16x2.f32"}


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("bias_dtype", [torch.bfloat16, torch.float32], ids=str)
def test_launches(bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """GPT-J-6B's fc_out."""
    with record_launches() as found:
        kernels.add_bias(torch.empty(8192, 4096), torch.empty(4096, dtype=bias_dtype), out_dtype)
    (launch,) = found
    report = launch.compile()
    assert report.spill_bytes <= tolerances.MAX_SPILL_BYTES, f"{launch} spills {report.spill_bytes} bytes"
    assert not report.notes, f"{launch}: {report.notes}"
    assert ".ftz" not in report.ptx, f"{launch} flushes subnormals"
    assert STORES.get(out_dtype, "add.f32") in report.ptx, launch
    assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), launch
    assert re.search(r"st\.global[\w.:]*v4\.b32", report.ptx), launch
