"""Sums of rows: close to fp64's, the same bits however rows are cut, and inf and NaN in sight."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.ops.piece_sums import row_sums
from octavo.testing import assert_bitwise, generate
from tests.assertions import assert_raises

SHAPES = [(1, 1), (300, 1), (5, 3), (7, 128), (3, 4096), (33, 431), (2, 12288), (1, 200_001)]


@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("is_squared", [True, False])
def test_sums_are_of_every_element_once(shape: tuple[int, int], is_squared: bool, device: torch.device) -> None:
    x = generate("heavy_tailed", shape).abs().to(device)
    wide = x.double().square() if is_squared else x.double()
    torch.testing.assert_close(row_sums(x, is_squared=is_squared).double(), wide.sum(dim=1), rtol=2e-6, atol=0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("shape", [shape for shape in SHAPES if shape[0] > 1], ids=str)
def test_a_rows_bits_are_its_own(shape: tuple[int, int], dtype: torch.dtype, device: torch.device) -> None:
    """Whichever rows lie beside it, wherever its memory begins, and however many threads there are."""
    x = generate("heavy_tailed", shape, dtype).to(device)
    whole = row_sums(x, is_squared=True)
    shifted = torch.empty(x.numel() + 1, dtype=dtype, device=device)[1:].view(shape).copy_(x)
    for cut in {1, shape[0] // 2, shape[0] - 1}:
        for part in (x, shifted):
            parts = [row_sums(rows, is_squared=True) for rows in (part[:cut], part[cut:], part[:0])]
            assert_bitwise(torch.cat(parts), whole)
    num_threads = torch.get_num_threads()
    try:
        torch.set_num_threads(3)
        assert_bitwise(row_sums(x, is_squared=True), whole)
    finally:
        torch.set_num_threads(num_threads)


@pytest.mark.parametrize("bad", [torch.nan, torch.inf, -torch.inf, 1e30])
def test_what_is_not_finite_shows_in_its_row(bad: float, device: torch.device) -> None:
    x = torch.ones(3, 5000, device=device)
    x[1, 4999] = bad
    assert row_sums(x, is_squared=True).isfinite().tolist() == [True, False, True]


def test_only_matrices() -> None:
    assert_raises(
        ShapeError, r"takes a matrix \[R, L\] with L >= 1, got \(3,\)", row_sums, torch.ones(3), is_squared=True
    )
    assert_raises(ShapeError, r"got \(3, 0\)", row_sums, torch.ones(3, 0), is_squared=False)
