"""The sampling kernel compiles for Hopper without spills."""

import pytest
import torch

from octavo.ops.sampling import triton as kernels
from octavo.testing.tolerances import MAX_SPILL_BYTES
from tests.ops.compiled import compile_all


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 151_936])
def test_launch(vocab: int) -> None:
    floats, integers = torch.ones(4), torch.ones(4, dtype=torch.int64)
    given = (torch.zeros(4, vocab), floats, integers, floats, floats, integers, integers)
    blocks, _ = compile_all(lambda: kernels.sample(*given), 2, MAX_SPILL_BYTES)
    assert ".f64" not in blocks.ptx  # of next to none of its entries the score in fp64 is asked for
