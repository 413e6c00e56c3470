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
    compile_all(lambda: kernels.sample(*given), 2, MAX_SPILL_BYTES)
