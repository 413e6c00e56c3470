"""The sampling kernel compiles for Hopper without spills."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.ops.sampling import triton as kernels
from octavo.testing import tolerances
from octavo.testing.compile import record_launches
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.skipif(is_interpreting(), reason="the interpreter compiles nothing")


@pytest.mark.slow
@pytest.mark.parametrize("vocab", [1, 151_936])
def test_launch(vocab: int) -> None:
    floats, integers = torch.ones(4), torch.ones(4, dtype=torch.int64)
    with record_launches() as found:
        kernels.sample(torch.zeros(4, vocab), floats, integers, floats, floats, integers, integers)
    assert len(found) == 2
    for launch in found:
        report = launch.compile()
        assert report.spill_bytes <= tolerances.MAX_SPILL_BYTES, f"{launch} spills {report.spill_bytes} bytes"
