"""The GEMMs for few tokens against the reference, the same bits from call to call, and which products they take."""

import pytest
import torch

from octavo.numerics import Scaling, quantize_reference
from octavo.ops.gemm.scaled_mm import scaled_mm_reference
from octavo.ops.gemm.skinny_mm import triton as kernels
from octavo.ops.gemm.skinny_mm.triton import splits, tiled
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_all_bitwise

DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(1, 136, 256), (5, 64, 128), (17, 200, 640), (33, 200, 640), (100, 136, 256)]
if not is_interpreting():
    SHAPES += [(1, 6144, 4096), (16, 4096, 12288), (33, 24576, 4096), (64, 4096, 4096)]
    SHAPES += [(64, 4096, 12288), (128, 6144, 4096), (256, 4096, 12288), (200, 2048, 4096)]
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


@pytest.mark.skipif(is_interpreting(), reason="the interpreter runs one program after the other")
@pytest.mark.parametrize("kind", SCALINGS)
def test_one_after_the_other(kind: str) -> None:
    """Products of as many tiles in other ranges of K count in the same places."""
    generator, calls = torch.Generator().manual_seed(0), []
    for K in (4096, 12288):
        for M in (16, 64, 32, 33, 128):
            x, weight = (torch.randn(n, K, generator=generator).to(DEVICE, torch.bfloat16) for n in (M, 4096))
            calls.append([quantize_reference(t, s) for t, s in zip((x, weight), SCALINGS[kind], strict=True)])
    alone = []
    for a, b in calls:
        alone.append(kernels.skinny_mm(a, b, None, torch.bfloat16))
        torch.cuda.synchronize()
    for _ in range(5):
        together = [kernels.skinny_mm(a, b, None, torch.bfloat16) for a, b in calls]
        assert_all_bitwise(together, alone)


def test_splits_cover_k() -> None:
    for wanted in (0, 1, 2, 44, 132):
        for slabs, unroll in ((1, 1), (2, 2), (31, 1), (32, 1), (32, 2), (96, 4)):
            num, each = splits.split_of(wanted, slabs, unroll)
            assert (num - 1) * each < slabs <= num * each
            assert each % unroll == 0
            assert num == 1 or num <= wanted


def test_what_the_library_is_quicker_at_is_left_to_it() -> None:
    assert all(tiled.suits(M, 4096) for M in (33, 64, 128, 256)) and tiled.suits(64, 24576)
    assert tiled.suits(256, 12288) and tiled.suits(128, 24576)  # three programs on a multiprocessor
    assert not any(tiled.suits(M, N) for M, N in ((257, 4096), (256, 6144), (128, 12288), (129, 24576)))


def test_as_many_wide_tiles_run_on_a_multiprocessor_as_there_are() -> None:
    stages = {(M, N): tiled.tile_of(M, N).stages for M, N in ((64, 12288), (256, 12288), (128, 12288), (64, 49152))}
    assert stages == {(64, 12288): 6, (256, 12288): 3, (128, 12288): 4, (64, 49152): 4}
    assert tiled.tile_of(256, 4096).stages == 6 and tiled.tile_of(256, 4096, splits_k=True).stages == 4


def test_codes_of_another_format_are_left_to_the_library() -> None:
    a, b = (quantize_reference(torch.ones(4, 128, dtype=torch.bfloat16), s) for s in SCALINGS["row"])
    assert kernels.can_run(a, b)
    assert not kernels.can_run(quantize_reference(torch.ones(4, 128), Scaling.per_row(torch.float8_e5m2)), b)
    assert not kernels.can_run(b, quantize_reference(torch.ones(4, 128), Scaling.block_128x128()))
