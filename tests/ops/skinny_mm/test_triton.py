"""The GEMM for few tokens against the reference, and the same bits from call to call."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.numerics import Scaling, quantize_reference
from octavo.ops.scaled_mm import scaled_mm_reference
from octavo.ops.skinny_mm import triton as kernels
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import correct_interpreter, is_interpreting

pytestmark = [] if is_interpreting() else pytest.mark.gpu
DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(1, 136, 256), (5, 64, 128), (17, 200, 640)]
if is_interpreting():
    correct_interpreter()
else:
    SHAPES += [(1, 6144, 4096), (16, 4096, 12288), (33, 24576, 4096), (64, 4096, 4096)]
SCALINGS = {
    "row": (Scaling.per_row(), Scaling.per_row()),
    "tensor": (Scaling.per_row(), Scaling.per_tensor()),
    "block": (Scaling.block_1x128(), Scaling.block_128x128()),
}


@pytest.mark.parametrize("kind", SCALINGS)
@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_it_is_the_scaled_product(M: int, N: int, K: int, kind: str) -> None:
    generator = torch.Generator().manual_seed(0)
    x, weight, bias = (torch.randn(*s, generator=generator).to(DEVICE, torch.bfloat16) for s in ((M, K), (N, K), (N,)))
    a, b = (quantize_reference(t, s) for t, s in zip((x, weight), SCALINGS[kind], strict=True))
    assert kernels.can_run(a, b)
    for extra in (None, bias):
        found = kernels.skinny_mm(a, b, extra, torch.bfloat16)
        assert_sqnr(found, scaled_mm_reference(a, b, extra, torch.bfloat16), 45.0)
        for _ in range(3):
            assert_bitwise(kernels.skinny_mm(a, b, extra, torch.bfloat16), found)


def test_splits_cover_k() -> None:
    for tiles in (1, 3, 64, 96, 384, 1000):
        for slabs, unroll in ((1, 1), (2, 2), (31, 1), (32, 1), (32, 2), (96, 4)):
            splits, each = kernels.split_of(tiles, slabs, unroll)
            assert (splits - 1) * each < slabs <= splits * each
            assert each % unroll == 0
            assert splits == 1 or tiles * splits <= kernels.PROGRAMS
