"""The sampling kernel compiles for Hopper without spills."""

import pytest
import torch

from octavo.ops.sampling import triton as kernels
from tests.ops.compiled import compiled, record_launches


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 151_936])
def test_launch(vocab: int) -> None:
    floats, integers = torch.ones(4), torch.ones(4, dtype=torch.int64)
    with record_launches() as found:
        kernels.sample(torch.zeros(4, vocab), floats, integers, floats, floats, integers, integers)
    assert len(found) == 2
    for launch in found:
        compiled(launch)
