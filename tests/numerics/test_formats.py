"""Format facts and every code, both ways, against ml_dtypes; the codec's laws by hypothesis."""

import ml_dtypes
import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import DtypeError
from octavo.numerics.formats import E4M3, E5M2, E8M0, NAN_CODE, FloatFormat, Format, all_values, format_of
from octavo.numerics.scaling import encode
from tests.assertions import assert_raises

PEERS = {"e4m3": ml_dtypes.float8_e4m3fn, "e5m2": ml_dtypes.float8_e5m2, "e8m0": ml_dtypes.float8_e8m0fnu}
FORMATS = pytest.mark.parametrize("fmt", [E4M3, E5M2, E8M0], ids=lambda f: f.name)
SIGNED = pytest.mark.parametrize("fmt", [E4M3, E5M2], ids=lambda f: f.name)
LAW = settings(deadline=None, max_examples=150, derandomize=True, database=None)
ONE = torch.ones(())


def peer_codes(x: torch.Tensor, fmt: FloatFormat) -> np.ndarray:
    """Saturating codes by ml_dtypes; every NaN is NAN_CODE."""
    wide = x.float().numpy()
    is_nan = np.isnan(wide)
    clipped = np.clip(np.where(is_nan, 0, wide), -fmt.max, fmt.max)
    return np.where(is_nan, NAN_CODE, clipped.astype(PEERS[fmt.name]).view(np.uint8))


@FORMATS
def test_every_code_decodes_as_in_ml_dtypes(fmt: FloatFormat) -> None:
    expected = np.arange(256, dtype=np.uint8).view(PEERS[fmt.name]).astype(np.float32)
    np.testing.assert_array_equal(all_values(fmt.dtype).numpy(), expected)


@FORMATS
def test_every_value_encodes_to_its_code(fmt: FloatFormat) -> None:
    values = all_values(fmt.dtype)
    known = ~values.isnan()
    codes = values.to(fmt.dtype).view(torch.uint8)[known]
    assert torch.equal(codes, torch.arange(256, dtype=torch.uint8)[known])
    assert values.to(fmt.dtype).float()[~known].isnan().all()
    np.testing.assert_array_equal(codes.numpy(), values[known].numpy().astype(PEERS[fmt.name]).view(np.uint8))


@SIGNED
def test_encode_is_the_identity_on_finite_values(fmt: FloatFormat) -> None:
    values = all_values(fmt.dtype)
    finite = values.isfinite()
    codes = encode(values, ONE, fmt.dtype).view(torch.uint8)
    assert torch.equal(codes[finite], torch.arange(256, dtype=torch.uint8)[finite])


@FORMATS
def test_limits(fmt: FloatFormat) -> None:
    info = ml_dtypes.finfo(PEERS[fmt.name])
    assert fmt.max == float(info.max)
    assert fmt.min_normal == float(info.smallest_normal)
    assert fmt.min_subnormal == float(info.smallest_subnormal if fmt.signed else info.smallest_normal)
    assert (fmt.exponent_bits, fmt.mantissa_bits) == (info.nexp, info.nmant)
    assert fmt.min_normal == 2.0 ** ((1 if fmt.signed else 0) - fmt.bias)
    values = all_values(fmt.dtype)
    assert fmt.max == values[values.isfinite()].max()
    assert fmt.min_subnormal == values[values > 0].min()


def test_published_limits() -> None:
    assert (E4M3.max, E4M3.min_normal, E4M3.min_subnormal) == (448.0, 2.0**-6, 2.0**-9)
    assert (E5M2.max, E5M2.min_normal, E5M2.min_subnormal) == (57344.0, 2.0**-14, 2.0**-16)
    assert (E8M0.max, E8M0.min_normal) == (2.0**127, 2.0**-127)


@pytest.mark.parametrize(
    ("fmt", "nan", "inf"),
    [(E4M3, [0x7F, 0xFF], []), (E5M2, [0x7D, 0x7E, 0x7F, 0xFD, 0xFE, 0xFF], [0x7C, 0xFC]), (E8M0, [0xFF], [])],
    ids=["e4m3", "e5m2", "e8m0"],
)
def test_special_codes(fmt: FloatFormat, nan: list[int], inf: list[int]) -> None:
    values = all_values(fmt.dtype)
    assert values.isnan().nonzero().flatten().tolist() == nan
    assert values.isinf().nonzero().flatten().tolist() == inf
    assert fmt.has_inf == bool(inf)
    if fmt.signed:
        assert values[NAN_CODE].isnan()
        assert values[0] == 0
        assert values[0x80] == 0
        assert torch.signbit(values[0x80])


@SIGNED
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_input_encodes_as_in_ml_dtypes(fmt: FloatFormat, source: torch.dtype) -> None:
    x = torch.arange(-(2**15), 2**15, dtype=torch.int32).to(torch.int16).view(source)
    np.testing.assert_array_equal(encode(x, ONE, fmt.dtype).view(torch.uint8).numpy(), peer_codes(x, fmt))


@SIGNED
def test_random_fp32_bits_encode_as_in_ml_dtypes(fmt: FloatFormat) -> None:
    generator = torch.Generator().manual_seed(0)
    x = torch.randint(-(2**31), 2**31, (1 << 18,), generator=generator).to(torch.int32).view(torch.float32)
    x = torch.cat([x, torch.randn(1 << 18, generator=generator) * fmt.max / 2])
    np.testing.assert_array_equal(encode(x, ONE, fmt.dtype).view(torch.uint8).numpy(), peer_codes(x, fmt))


@SIGNED
def test_ties_go_to_even(fmt: FloatFormat) -> None:
    values = all_values(fmt.dtype)[:128].double()
    values = values[values.isfinite()]
    middles = ((values[1:] + values[:-1]) / 2).float()  # between code c and c + 1
    codes = encode(middles, ONE, fmt.dtype).view(torch.uint8).int()
    lower = torch.arange(len(middles), dtype=torch.int32)
    assert torch.equal(codes, lower + lower % 2)


@SIGNED
def test_infinity_saturates_and_nan_has_one_code(fmt: FloatFormat) -> None:
    negative_nan = torch.tensor([-1], dtype=torch.int32).view(torch.float32)  # all bits set
    x = torch.cat([torch.tensor([float("inf"), float("-inf"), float("nan"), 1e30, -1e30]), negative_nan])
    codes = encode(x, ONE, fmt.dtype)
    assert codes.float()[[0, 1, 3, 4]].tolist() == [fmt.max, -fmt.max, fmt.max, -fmt.max]
    assert codes.view(torch.uint8)[[2, 5]].tolist() == [NAN_CODE, NAN_CODE]


@SIGNED
@LAW
@given(x=st.floats(width=32), scale=st.floats(2.0**-20, 2.0**20, width=32))
def test_codes_are_never_infinite(fmt: FloatFormat, x: float, scale: float) -> None:
    value = encode(torch.tensor([x]), torch.tensor(scale), fmt.dtype).float()
    assert bool(value.isnan()) == bool(np.isnan(x))
    assert not value.isinf()


def test_format_of() -> None:
    assert [format_of(f.dtype) for f in (E4M3, E5M2, E8M0)] == [E4M3, E5M2, E8M0]
    assert_raises(DtypeError, r"torch\.bfloat16 is no 8-bit float format; use one of", format_of, torch.bfloat16)
    assert_raises(DtypeError, "no 8-bit float format", all_values, torch.float16)


def test_dynamic_range_in_powers_of_two() -> None:
    assert E4M3.decades == pytest.approx(17.807, abs=1e-3)
    assert E5M2.decades == pytest.approx(31.807, abs=1e-3)
    assert E8M0.decades == pytest.approx(254.0)


def test_formats_of_a_recipe() -> None:
    assert (Format.HYBRID.forward_dtype, Format.HYBRID.backward_dtype) == (E4M3.dtype, E5M2.dtype)
    assert (Format.E4M3.forward_dtype, Format.E4M3.backward_dtype) == (E4M3.dtype, E4M3.dtype)
    assert (Format.E5M2.forward_dtype, Format.E5M2.backward_dtype) == (E5M2.dtype, E5M2.dtype)
