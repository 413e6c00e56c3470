"""The random Hadamard transform: the matrix that it is, the product that it leaves alone, and its edges."""

import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.hadamard import SIGNS, random_hadamard
from octavo.testing import assert_sqnr, generate
from tests.assertions import assert_raises


def matrix() -> torch.Tensor:
    """diag(SIGNS) @ H / 4 by Kronecker products; blocks of 16 rows are multiplied by its transpose from the left."""
    two = torch.tensor([[1.0, 1.0], [1.0, -1.0]], dtype=torch.float64)
    whole = torch.ones(1, 1, dtype=torch.float64)
    for _ in range(4):
        whole = torch.kron(whole, two)
    return torch.diag(torch.tensor(SIGNS, dtype=torch.float64)) @ whole / 4


def test_it_is_the_matrix() -> None:
    eye = random_hadamard(torch.eye(16))
    assert torch.equal(eye.double(), matrix().t())
    assert torch.equal(matrix() @ matrix().t(), torch.eye(16, dtype=torch.float64))
    x = generate("heavy_tailed", (48, 20))
    expected = (matrix().t() @ x.double().view(3, 16, 20)).view(48, 20)
    assert_sqnr(random_hadamard(x), expected.float(), 130)


@pytest.mark.parametrize("tokens", [1, 15, 16, 17, 100])
def test_products_are_unchanged(tokens: int) -> None:
    x, y = (generate("heavy_tailed", (tokens, width), seed=width) for width in (24, 40))
    rows = -(-tokens // 16) * 16
    turned = [random_hadamard(t) for t in (x, y)]
    assert [t.shape for t in turned] == [(rows, 24), (rows, 40)]
    assert_sqnr(turned[0].t() @ turned[1], x.t() @ y, 120)
    rough = [random_hadamard(t.bfloat16()) for t in (x, y)]
    assert {t.dtype for t in rough} == {torch.bfloat16}
    assert_sqnr(rough[0].t().float() @ rough[1].float(), x.t() @ y, 35)


def test_dtypes_and_empty_tensors() -> None:
    large = torch.full((16, 2), 60000.0, dtype=torch.float16)
    assert random_hadamard(large).dtype == torch.float32
    assert random_hadamard(large * torch.tensor(SIGNS, dtype=torch.float16)[:, None])[0, 0] == 240_000.0
    assert random_hadamard(torch.ones(0, 5)).shape == (0, 5)
    assert random_hadamard(torch.ones(5, 0)).shape == (16, 0)


def test_nan_fills_its_block_and_no_other() -> None:
    x = torch.ones(32, 3)
    x[2, 1] = torch.nan
    is_nan = random_hadamard(x).isnan()
    assert is_nan[:16, 1].all() and is_nan.sum() == 16


def test_what_has_no_tokens_is_refused() -> None:
    assert_raises(ShapeError, "flatten leading dims", random_hadamard, torch.ones(2, 2, 2))
    assert_raises(DtypeError, "float64", random_hadamard, torch.ones(2, 2, dtype=torch.float64))
