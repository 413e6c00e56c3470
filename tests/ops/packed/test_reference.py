"""Pieces of blocks: codes and scales are the contract's, blocks that are not finite are NaN, what is lost is kept."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import Scaling
from octavo.ops.packed import decode_pieces_, quantize_pieces_, requantize_pieces_, round_pieces_
from octavo.ops.quantize import quantize
from octavo.testing import GENERATORS, assert_bitwise, generate
from tests.assertions import assert_raises
from tests.ops.packed.cases import buffer


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("name", [name for name in GENERATORS if name != "with_inf_nan"])
def test_the_codes_and_scales_are_the_contracts(name: str, dtype: torch.dtype, device: torch.device) -> None:
    x = generate(name, (3, 1000), dtype).to(device)
    codes, scales = buffer(3, 8, str(device))
    quantize_pieces_(x, codes, scales)
    wanted = quantize(x, Scaling.block_1x128())
    assert_bitwise(codes.flatten(1)[:, :1000], wanted.qdata)
    assert_bitwise(scales, wanted.scale)
    out = torch.empty(3, 1000, dtype=dtype, device=device)
    decode_pieces_(codes, scales, out)
    assert_bitwise(out, wanted.dequantize(dtype))


def test_a_block_that_is_not_finite_has_the_scale_nan(device: torch.device) -> None:
    x = generate("normal", (2, 512)).to(device)
    x[0, 3], x[0, 130], x[1, 511] = torch.nan, torch.inf, -torch.inf
    for run in (
        quantize_pieces_,
        lambda *args: round_pieces_(*args, torch.zeros((), dtype=torch.int32, device=device)),
    ):
        codes, scales = buffer(2, 4, str(device))
        run(x, codes, scales)
        assert scales.isnan().tolist() == [[True, True, False, False], [False, False, False, True]]


def test_a_residual_and_the_codes_are_what_was_given(device: torch.device) -> None:
    x, given = generate("normal", (2, 300)).to(device), generate("normal", (2, 300), seed=1).to(device)
    x[1, 5] = torch.inf
    codes, scales = buffer(2, 3, str(device))
    quantize_pieces_(x, codes, scales, residual := given.clone())
    out = torch.empty_like(x)
    decode_pieces_(codes, scales, out)
    is_finite = out.isfinite()
    assert (~is_finite).sum() == 128 and (residual[~is_finite] == 0).all()
    assert_bitwise(residual[is_finite], (x + given - out)[is_finite])


def test_a_mean_and_what_it_lacks(device: torch.device) -> None:
    codes, scales = buffer(4, 3, str(device))
    quantize_pieces_(generate("normal", (4, 300)).to(device), codes, scales)
    total = torch.empty(1, 300, device=device)
    decode_pieces_(codes, scales, total)
    one_codes, one_scales = buffer(1, 3, str(device))
    residual = torch.full((1, 300), 0.5, device=device)
    requantize_pieces_(codes, scales, one_codes, one_scales, average=True, residual=residual)
    mean = torch.empty(1, 300, device=device)
    decode_pieces_(one_codes, one_scales, mean)
    assert_bitwise(residual, 0.5 + (total / 4 - mean) * 4)
    assert ((total / 4 - mean).norm() / mean.norm()).item() < 0.04


def test_stochastic_rounding_goes_to_either_neighbour_as_often_as_it_is_near(device: torch.device) -> None:
    """Every code between two others, subnormal ones too, with 4,096 draws of each value: five standard errors."""
    places = torch.tensor([448.0, 9.3, 0.01, 0.0017, 0.0003, -0.031, -300.0, 0.0], device=device)
    x = places.repeat(1, 16 * 4096)  # each block of 128 has 448 in it: the scale is 1
    codes, scales = buffer(1, x.shape[1] // 128, str(device))
    round_pieces_(x, codes, scales, torch.full((), 7, dtype=torch.int32, device=device))
    draws = codes.float().view(-1, 8)
    error = (draws - places).double().mean(dim=0).abs()
    bound = 5 * (draws.double().std(dim=0) / len(draws) ** 0.5)
    assert (scales == 1.0).all() and (error <= bound).all()
    assert [len(column.unique()) for column in draws.T] == [1, 2, 2, 2, 2, 2, 2, 1]


def test_shapes_that_do_not_fit() -> None:
    codes, scales = buffer(2, 3)
    x = torch.zeros(2, 300)
    assert_raises(ShapeError, r"pieces \[P, n\] have codes", quantize_pieces_, torch.zeros(2, 400), codes, scales)
    assert_raises(ShapeError, r"pieces \[P, n\] have codes", decode_pieces_, codes, scales, torch.zeros(3, 300))
    assert_raises(ShapeError, "contiguous pieces", quantize_pieces_, x, codes, scales, torch.zeros(300, 2).t())
    seed = torch.zeros((), dtype=torch.int32)
    assert_raises(ShapeError, "got", round_pieces_, torch.zeros(300), codes, scales, seed)
