"""Transposed codes: the dtype stays, what is no matrix of codes is refused, and torch's own checks pass."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.ops.quantize.transpose import transpose_codes


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.uint8], ids=str)
def test_bits_and_dtype(dtype: torch.dtype, device: torch.device) -> None:
    codes = torch.arange(63 * 4, dtype=torch.uint8, device=device).view(63, 4)
    for after in (None, codes.new_ones(1)):
        found = transpose_codes(codes.view(dtype), after)
        assert found.dtype == dtype and found.is_contiguous() and torch.equal(found.view(torch.uint8), codes.t())


def test_what_is_no_matrix_of_codes_is_refused() -> None:
    for wrong in (torch.zeros(4, 4), torch.zeros(4, dtype=torch.uint8), torch.zeros(4, 8, dtype=torch.uint8).t()):
        with pytest.raises(ShapeError, match="codes must be a contiguous matrix of an 8-bit dtype"):
            transpose_codes(wrong)


def test_the_op_passes_torchs_own_checks(device: torch.device) -> None:
    codes = torch.arange(6, dtype=torch.uint8, device=device).view(2, 3)
    torch.library.opcheck(torch.ops.octavo.transpose_codes.default, (codes, torch.ones(1, device=device)))
