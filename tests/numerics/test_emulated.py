"""MXFP8 and NVFP4 by emulation: equal to independent numpy statements of them, and their edge cases."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.numerics.emulated import fake_quantize_mxfp8, fake_quantize_nvfp4
from octavo.numerics.emulated_config import ScaleRounding
from octavo.testing import GENERATORS, assert_bitwise, generate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (ml_dtypes.float8_e4m3fn, 8, 448.0), E5M2: (ml_dtypes.float8_e5m2, 15, 57344.0)}
SHAPES = [(3, 96), (63, 47), (1, 1), (40, 160)]
NAMES = [name for name in GENERATORS if name != "with_inf_nan"]


def mxfp8_rule(x: torch.Tensor, dtype: torch.dtype, rounding: str = "up") -> np.ndarray:
    """One block after another; exponents by frexp, scales as E8M0 bytes."""
    storage, emax, largest = FORMATS[dtype]
    values = x.double().numpy()
    result = np.empty(values.shape, np.float32)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 32):
            block = values[row, start : start + 32]
            amax = np.abs(block).max()
            if amax == 0:
                exponent = 0
            elif rounding == "down":
                exponent = np.frexp(amax)[1] - 1 - emax  # floor(log2(amax)) - emax
            else:
                mantissa, above = np.frexp(amax / largest)  # [0.5, 1) * 2**above
                exponent = above - (mantissa == 0.5)  # ceil(log2(amax / largest))
            byte = np.array([np.clip(exponent, -127, 127) + 127], np.uint8)
            scale = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[0]
            codes = np.clip(block / scale, -largest, largest).astype(storage)
            with np.errstate(over="ignore"):  # the largest fp32 number is rounded up to 2**128
                result[row, start : start + 32] = (codes.astype(np.float64) * scale).astype(np.float32)
    return result


def nvfp4_rule(x: torch.Tensor, square: bool) -> np.ndarray:
    """One block after another; E2M1 and E4M3 by ml_dtypes."""
    values = x.float().numpy()
    result = np.zeros(values.shape, np.float32)
    one = np.float32(1)
    amax = np.abs(values).max()
    with np.errstate(over="ignore", divide="ignore"):
        quant_scale = np.minimum(np.float32(6 * 448) / amax, np.finfo(np.float32).max) if amax > 0 else one
    height = 16 if square else 1
    for top in range(0, values.shape[0], height):
        for left in range(0, values.shape[1], 16):
            place = np.s_[top : top + height, left : left + 16]
            block = values[place]
            target = np.abs(block).max() / np.float32(6) * quant_scale
            block_scale = np.minimum(target, np.float32(448)).astype(ml_dtypes.float8_e4m3fn).astype(np.float32)
            decode = block_scale * (one / quant_scale)
            if decode > 0:
                with np.errstate(over="ignore"):
                    encode = np.minimum(one / decode, np.finfo(np.float32).max)
                codes = np.clip(block * encode, -6, 6).astype(ml_dtypes.float4_e2m1fn)
                result[place] = codes.astype(np.float32) * decode
    return result


@pytest.mark.parametrize("rounding", ["up", "down"])
@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", NAMES)
def test_mxfp8_is_the_rule(name: str, dtype: torch.dtype, rounding: ScaleRounding) -> None:
    for shape in SHAPES:
        for source in (torch.float32, torch.bfloat16):
            x = generate(name, shape, source)
            found = fake_quantize_mxfp8(x, dtype, scale_rounding=rounding)
            assert found.dtype == source
            expected = torch.from_numpy(mxfp8_rule(x, dtype, rounding)).to(source)
            np.testing.assert_array_equal(found.float().numpy(), expected.float().numpy())


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_is_the_rule(name: str, square: bool) -> None:
    for shape in SHAPES:
        for source in (torch.float32, torch.bfloat16):
            x = generate(name, shape, source)
            found = fake_quantize_nvfp4(x, square_blocks=square)
            assert found.dtype == source
            np.testing.assert_array_equal(found.float().numpy(), torch.from_numpy(nvfp4_rule(x, square)).to(source).float().numpy())  # fmt: skip # noqa: E501


def test_the_largest_saturates_only_where_mxfp8_scales_are_rounded_down() -> None:
    x = torch.tensor([[1.9375] + [0.5] * 31])  # 496 in units of 2**-8
    assert fake_quantize_mxfp8(x, E4M3, scale_rounding="down")[0, 0] == 1.75
    assert fake_quantize_mxfp8(x, E4M3)[0, 0] == 2.0  # 248 in units of 2**-7, between 240 and 256
    assert fake_quantize_nvfp4(x)[0, 0] == 1.9375
    just_above, largest = torch.nextafter(torch.tensor(448.0), torch.tensor(512.0)), torch.tensor(448.0)
    small = torch.full((31,), 2.0**-9)  # the least code at a scale of 1
    for amax, expected in ((largest, 2.0**-9), (just_above, 0.0)):  # a tie at a scale of 2 goes to even
        assert fake_quantize_mxfp8(torch.cat([amax[None], small]), E4M3)[1] == expected


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
def test_no_value_loses_more_than_half_a_step_when_mxfp8_scales_are_rounded_up(dtype: torch.dtype) -> None:
    x = generate("heavy_tailed", (64, 96))
    blocks, found = x.view(-1, 32), fake_quantize_mxfp8(x, dtype).view(-1, 32)
    half_step = 2.0**-4 if dtype == E4M3 else 2.0**-3
    largest = blocks.abs().amax(dim=1, keepdim=True)
    near = blocks.abs() > largest / 64  # normal codes
    assert ((found - blocks).abs() <= half_step * blocks.abs())[near].all()


def test_square_blocks_commute_with_the_transpose() -> None:
    x = generate("heavy_tailed", (50, 70))
    assert_bitwise(fake_quantize_nvfp4(x.t(), square_blocks=True).t(), fake_quantize_nvfp4(x, square_blocks=True))
    assert not torch.equal(fake_quantize_nvfp4(x.t()).t(), fake_quantize_nvfp4(x))


def test_twice_is_once() -> None:
    x = generate("heavy_tailed", (20, 96))
    for dtype in (E4M3, E5M2):
        once = fake_quantize_mxfp8(x, dtype)
        assert_bitwise(fake_quantize_mxfp8(once, dtype), once)


def test_nan_stays_and_infinities_saturate() -> None:
    x = generate("normal", (4, 64))
    clean = x.clone()
    clean[0, 3] = 0.0
    x[0, 3] = torch.nan
    for fake_quantize in (fake_quantize_mxfp8, fake_quantize_nvfp4):
        found = fake_quantize(x)
        assert found[0, 3].isnan()
        found[0, 3] = 0.0
        assert_bitwise(found, fake_quantize(clean))  # NaN has no say in any scale
    x[0, 3], x[2, 40] = torch.inf, -torch.inf
    found = fake_quantize_mxfp8(x)
    assert (found[0, 3], found[2, 40]) == (448.0, -448.0)
    assert_bitwise(found[1], fake_quantize_mxfp8(clean)[1])
    found = fake_quantize_nvfp4(x)
    assert (found[0, 3], found[2, 40]) == (6 * 448.0, -6 * 448.0)
    assert found.isfinite().all()
    assert fake_quantize_nvfp4(torch.full((2, 16), torch.nan)).isnan().all()


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_stochastic_rounding_is_right_on_average_and_repeatable(square: bool) -> None:
    x = generate("normal", (8, 48))
    x[0, 0] = 6.0  # the tensor's largest
    total = torch.zeros_like(x)
    for seed in range(600):
        total += fake_quantize_nvfp4(x, square_blocks=square, stochastic_seed=seed) / 600
    nearest = fake_quantize_nvfp4(x, square_blocks=square)
    assert (total - x).abs().mean() < 0.2 * (nearest - x).abs().mean()
    again = [fake_quantize_nvfp4(x, stochastic_seed=seed) for seed in (7, 7, 8)]
    assert_bitwise(again[0], again[1])
    assert not torch.equal(again[0], again[2])
    # Stochastic rounding goes to one of the two neighbours: what is a value of the format stays.
    assert_bitwise(fake_quantize_nvfp4(nearest, square_blocks=square, stochastic_seed=3)[0, 0], nearest[0, 0])


def test_each_element_is_right_on_average() -> None:
    """Five standard deviations of the mean at most, for all but what saturates because E4M3 rounded its scale."""
    num = 1000
    x = generate("normal", (4, 48), seed=3)
    found = torch.stack([fake_quantize_nvfp4(x, stochastic_seed=seed) for seed in range(num)])
    low, high = found.amin(0), found.amax(0)
    is_between = (low < x) & (x < high)
    assert is_between.float().mean() > 0.8
    share = (x - low) / (high - low)
    deviation = (high - low) * (share * (1 - share)).sqrt() / num**0.5
    assert ((found.mean(0) - x).abs() <= 5 * deviation)[is_between].all()
    # The others saturate, or lie so close to a value that no draw went to another one.
    is_largest = x.abs() == x.view(4, 3, 16).abs().amax(-1, keepdim=True).expand(4, 3, 16).reshape(4, 48)
    assert ((found.mean(0) - x).abs() <= 0.01 * x.abs().max())[~is_between & ~is_largest].all()


def test_other_data_are_rounded_by_other_noise() -> None:
    """One seed for a whole run: each step's gradients bring their own noise, and the same ones bring the same."""
    row = torch.full((16,), 1.2)
    row[0] = 6.0
    rounds = []
    for other in range(400):
        x = torch.stack([row, row.clone()])
        x[1, 0] = 5.0 + other / 400  # what differs from step to step lies in other places
        rounds.append(fake_quantize_nvfp4(x, stochastic_seed=0)[0])
        assert_bitwise(fake_quantize_nvfp4(x.clone(), stochastic_seed=0)[0], rounds[-1])
    found = torch.stack(rounds)
    assert set(found[:, 1].tolist()) == {1.0, 1.5}
    assert (found[:, 1:].mean(0) - 1.2).abs().max() < 5 * 0.5 * (0.4 * 0.6 / 400) ** 0.5
    a_pair = torch.corrcoef(found[:, 1:3].t())[0, 1]
    assert abs(a_pair) < 5 / 400**0.5  # neighbours are independent


def test_noise_depends_on_neither_layout_nor_nans() -> None:
    x = generate("normal", (16, 32))
    columns = x.t().contiguous().t()
    assert_bitwise(fake_quantize_nvfp4(columns, stochastic_seed=1), fake_quantize_nvfp4(x, stochastic_seed=1))
    holed, zero = x.clone(), x.clone()
    holed[3, 3], zero[3, 3] = torch.nan, 0.0
    found = fake_quantize_nvfp4(holed, stochastic_seed=1)
    assert_bitwise(torch.where(found.isnan(), 0.0, found), fake_quantize_nvfp4(zero, stochastic_seed=1))
