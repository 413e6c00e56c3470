"""MXFP8 and NVFP4 by emulation: equal to independent numpy statements of them, and their edge cases."""

import ml_dtypes
import numpy as np
import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.emulated import fake_quantize_mxfp8, fake_quantize_nvfp4
from octavo.testing import GENERATORS, assert_bitwise, generate

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FORMATS = {E4M3: (ml_dtypes.float8_e4m3fn, 8, 448.0), E5M2: (ml_dtypes.float8_e5m2, 15, 57344.0)}
SHAPES = [(3, 96), (63, 47), (1, 1), (40, 160)]
NAMES = [name for name in GENERATORS if name != "with_inf_nan"]


def mxfp8_rule(x: torch.Tensor, dtype: torch.dtype) -> np.ndarray:
    """One block after another; exponents by frexp, scales as E8M0 bytes."""
    storage, emax, largest = FORMATS[dtype]
    values = x.double().numpy()
    result = np.empty(values.shape, np.float32)
    for row in range(values.shape[0]):
        for start in range(0, values.shape[1], 32):
            block = values[row, start : start + 32]
            amax = np.abs(block).max()
            exponent = (np.frexp(amax)[1] - 1 - emax) if amax > 0 else 0  # floor(log2(amax)) - emax
            byte = np.array([np.clip(exponent, -127, 127) + 127], np.uint8)
            scale = byte.view(ml_dtypes.float8_e8m0fnu).astype(np.float64)[0]
            codes = np.clip(block / scale, -largest, largest).astype(storage)
            result[row, start : start + 32] = codes.astype(np.float64) * scale
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


@pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
@pytest.mark.parametrize("name", NAMES)
def test_mxfp8_is_the_rule(name: str, dtype: torch.dtype) -> None:
    for shape in SHAPES:
        for source in (torch.float32, torch.bfloat16):
            x = generate(name, shape, source)
            found = fake_quantize_mxfp8(x, dtype)
            assert found.dtype == source
            np.testing.assert_array_equal(found.float().numpy(), torch.from_numpy(mxfp8_rule(x, dtype)).to(source).float().numpy())  # fmt: skip # noqa: E501


@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
@pytest.mark.parametrize("name", NAMES)
def test_nvfp4_is_the_rule(name: str, square: bool) -> None:
    for shape in SHAPES:
        for source in (torch.float32, torch.bfloat16):
            x = generate(name, shape, source)
            found = fake_quantize_nvfp4(x, square_blocks=square)
            assert found.dtype == source
            np.testing.assert_array_equal(found.float().numpy(), torch.from_numpy(nvfp4_rule(x, square)).to(source).float().numpy())  # fmt: skip # noqa: E501


def test_the_largest_may_saturate_in_mxfp8_only() -> None:
    x = torch.tensor([[1.9375] + [0.5] * 31])  # 496 in units of 2**-8
    assert fake_quantize_mxfp8(x, E4M3)[0, 0] == 1.75
    assert fake_quantize_nvfp4(x)[0, 0] == 1.9375


def test_square_blocks_commute_with_the_transpose() -> None:
    x = generate("heavy_tailed", (50, 70))
    assert_bitwise(fake_quantize_nvfp4(x.t(), square_blocks=True).t(), fake_quantize_nvfp4(x, square_blocks=True))
    assert not torch.equal(fake_quantize_nvfp4(x.t()).t(), fake_quantize_nvfp4(x))


def test_leading_dims_are_rows() -> None:
    x = generate("normal", (4, 5, 40))
    for fake_quantize in (fake_quantize_mxfp8, fake_quantize_nvfp4):
        assert_bitwise(fake_quantize(x), fake_quantize(x.view(20, 40)).view(4, 5, 40))
        assert fake_quantize(x[:0]).shape == (0, 5, 40)
        assert fake_quantize(x[..., :0]).shape == (4, 5, 0)

    assert_bitwise(fake_quantize_mxfp8(x[0, 0]), fake_quantize_mxfp8(x)[0, 0])


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


def test_what_cannot_be_quantized_is_refused() -> None:
    with pytest.raises(DtypeError, match="float64"):
        fake_quantize_mxfp8(torch.ones(2, 2, dtype=torch.float64))
    with pytest.raises(DtypeError, match="e4m3fn or float8_e5m2"):
        fake_quantize_mxfp8(torch.ones(2, 2), torch.float16)
    with pytest.raises(ShapeError, match="needs a matrix"):
        fake_quantize_nvfp4(torch.ones(2, 2, 2), square_blocks=True)
    with pytest.raises(ShapeError, match="scalar"):
        fake_quantize_nvfp4(torch.ones(()))
