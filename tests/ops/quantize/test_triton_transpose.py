"""The kernel that transposes codes has every byte in its place, of whole and ragged tiles."""

import pytest
import torch

from octavo.ops.quantize.transpose.triton import transpose
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(1, 1), (0, 16), (63, 431), (128, 256), (256, 128), (300, 129)]
if not is_interpreting():
    SHAPES += [(4096, 7168), (14336, 4096), (1, 65536 * 3)]


@pytest.mark.usefixtures("poisoned_outputs")
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"M{s[0]}-K{s[1]}")
def test_bits(shape: tuple[int, int]) -> None:
    codes = torch.randint(0, 256, shape, dtype=torch.uint8, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    assert torch.equal(transpose(codes, None), codes.t())
