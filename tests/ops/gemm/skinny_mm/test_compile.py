"""The GEMMs for few tokens compile for Hopper to FP8 wgmma, without spills."""

import pytest
import torch

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm.skinny_mm import FEW_TOKENS
from octavo.ops.gemm.skinny_mm import triton as kernels
from octavo.ops.gemm.skinny_mm.triton import tiled
from tests.ops.compiled import compiled, launched

SHAPES = [(1, 4096, 4096), (32, 4096, 4096), (33, 4096, 4096), (256, 4096, 12288), (200, 1000, 4096)]


def operand(rows: int, cols: int, scaling: Scaling) -> QuantizedTensor:
    scale = torch.empty(*scaling.scale_shape(rows, cols))
    return QuantizedTensor(torch.empty(rows, cols, dtype=scaling.dtype), scale, scaling)


FAST = [(0, True), (1, False), (2, True), (3, False)]
REST = [(i, b) for i in range(len(SHAPES)) for b in (True, False) if (i, b) not in FAST]


@pytest.mark.parametrize(
    ("number", "is_block"), [*FAST, *(pytest.param(*each, marks=pytest.mark.slow) for each in REST)]
)
def test_launches(number: int, is_block: bool) -> None:
    M, N, K = SHAPES[number]
    has_bias = is_block == (number % 2 == 0)  # each kernel has it with and without, in both scalings
    a = operand(M, K, Scaling.block_1x128() if is_block else Scaling.per_row())
    b = operand(N, K, Scaling.block_128x128() if is_block else Scaling.per_row())
    bias = torch.empty(N, dtype=torch.bfloat16) if has_bias else None
    (launch,) = launched(lambda: kernels.skinny_mm(a, b, bias, torch.bfloat16))
    report = compiled(launch)
    assert "wgmma.mma_async" in report.ptx and "e4m3.e4m3" in report.ptx, launch
    if M <= FEW_TOKENS:
        assert report.ptx.index("prefetch.global.L2") < report.ptx.index("griddepcontrol.wait"), launch
    else:
        assert "cp.async.bulk.tensor" in report.ptx, launch
        assert 2 * report.shared_bytes <= 227 * 1024 and 2 * 128 * report.registers <= 65536, "two programs fit"


def test_steps_of_other_sizes_take_the_same_kernels() -> None:
    """A compilation in the middle of serving would stall its step."""
    weights = [operand(N, 4096, Scaling.block_128x128()) for N in (2048, 4096, 6144)]

    def multiply() -> None:
        for M in range(33, 257):
            for weight in weights:
                if tiled.suits(M, weight.shape[0]):
                    tiled.tiled_mm(operand(M, 4096, Scaling.block_1x128()), weight, None, torch.bfloat16)

    launched(multiply, 3)  # one range of K or several, with narrow tiles; with wide ones there is one at these sizes
