"""The bias after a library's GEMM compiles for Hopper without spills and moves 16 bytes at once."""

import pytest
import torch

from octavo.ops.gemm.scaled_mm import triton as kernels
from tests.ops.compiled import assert_moves_16_bytes, compiled, launched

STORES = {torch.bfloat16: "cvt.rn.bf16x2.f32", torch.float16: "cvt.rn.f16x2.f32"}


@pytest.mark.parametrize(
    ("bias_dtype", "out_dtype"),
    [(torch.bfloat16, torch.bfloat16), (torch.float32, torch.float16), (torch.bfloat16, torch.float32)],
    ids=str,
)
def test_launches(bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    """GPT-J-6B's fc_out."""
    x, bias = torch.empty(8192, 4096), torch.empty(4096, dtype=bias_dtype)
    (launch,) = launched(lambda: kernels.add_bias(x, bias, out_dtype))
    report = compiled(launch)
    assert ".ftz" not in report.ptx, f"{launch} flushes subnormals"
    assert STORES.get(out_dtype, "add.f32") in report.ptx, launch
    assert_moves_16_bytes(launch, report.ptx)
