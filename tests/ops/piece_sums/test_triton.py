"""The Triton kernel against the reference: every bit, in the interpreter and on a GPU."""

import pytest
import torch

from octavo.ops.piece_sums import reference
from octavo.ops.piece_sums import triton as kernels
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
SMALL = [(1, 1), (4097, 1), (5, 3), (33, 431), (3, 4096), (2, 9000)]
LARGE = [(63, 431), (128, 4096), (4096, 7168), (1, 1_700_001)]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", SMALL if is_interpreting() else SMALL + LARGE, ids=str)
def test_bits(shape: tuple[int, int], dtype: torch.dtype) -> None:
    x = generate("normal", shape, dtype)
    for is_squared in (True, False):
        assert_bitwise(kernels.piece_sums(x.to(DEVICE), is_squared), reference.piece_sums(x, is_squared))


@pytest.mark.parametrize("bad", [torch.nan, torch.inf])
def test_what_is_not_finite_shows(bad: float) -> None:
    x = torch.ones(3, 500)
    x[1, 499] = bad
    assert kernels.piece_sums(x.to(DEVICE), True).isfinite().view(-1).tolist() == [True, False, True]
