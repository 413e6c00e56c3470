"""Every launch compiles for Hopper without spills, on its 8-bit matrix instruction, two programs on a processor."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.gemm.grouped_swiglu import triton as kernels
from tests.ops.compiled import compiled, launched
from tests.ops.gemm.grouped_mm.test_compile import REGISTERS_OF_A_PROCESSOR, SHARED_BYTES_OF_A_PROCESSOR, codes


@pytest.mark.parametrize("rows", [2048, pytest.param(64, marks=pytest.mark.slow)])
@pytest.mark.parametrize("gathered", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["gathered", "sorted"])
def test_two_programs_fit(gathered: bool, rows: int) -> None:
    a = codes(rows // 8 if gathered else rows, 2048, Scaling.block_1x128())
    whole, offsets = codes(128 * 1536, 2048, Scaling.block_128x128()), torch.zeros(128, dtype=torch.int32)
    slots = torch.zeros(rows, dtype=torch.int64) if gathered else None
    made = a, whole, offsets, slots, 8, Scaling.block_1x128(), torch.bfloat16
    (launch,) = launched(lambda: kernels.grouped_swiglu(*made))
    report = compiled(launch, 0)
    assert f"wgmma.mma_async.sync.aligned.m64n{16 if rows == 64 else 32}k32.f32.e4m3.e4m3" in report.ptx
    assert 2 * report.registers * 32 * kernels.WARPS <= REGISTERS_OF_A_PROCESSOR
    assert 2 * (report.shared_bytes + 1024) <= SHARED_BYTES_OF_A_PROCESSOR  # a program keeps 1 KB


def test_steps_of_other_sizes_share_their_kernels() -> None:
    whole, offsets = codes(128 * 256, 256, Scaling.block_128x128()), torch.zeros(128, dtype=torch.int32)

    def multiply() -> None:
        for rows in (130, 256, 1000):
            a = codes(rows, 256, Scaling.block_1x128())
            kernels.grouped_swiglu(a, whole, offsets, None, 1, Scaling.block_1x128(), torch.bfloat16)

    launched(multiply, 1)
