"""The shared assertions fail when they should, and inputs are what they are called."""

import pytest
import torch

from octavo.errors import ConfigError
from octavo.testing import GENERATORS, assert_bitwise, assert_sqnr, generate
from tests.assertions import assert_raises


@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2, torch.bfloat16, torch.float32], ids=str)
def test_bitwise_sees_every_bit(dtype: torch.dtype) -> None:
    x = torch.tensor([[0.0, 1.0], [2.0, torch.nan]]).to(dtype)
    assert_bitwise(x, x.clone())
    other = torch.tensor([[-0.0, 1.0], [2.0, torch.nan]]).to(dtype)
    with pytest.raises(
        AssertionError, match=r"codes: 1 of 4 elements differ; first at \(0, 0\): 0x80*.* expected 0x0+"
    ):
        assert_bitwise(other, x, "codes")


def test_bitwise_compares_shape_and_dtype() -> None:
    assert_raises(AssertionError, "shape", assert_bitwise, torch.ones(2), torch.ones(2, 1))
    with pytest.raises(AssertionError, match=r"expected torch\.bfloat16"):
        assert_bitwise(torch.ones(2), torch.ones(2, dtype=torch.bfloat16))
    assert_bitwise(torch.arange(3), torch.arange(3))


def test_sqnr() -> None:
    x = torch.full((100,), 1.0)
    assert_sqnr(x * 1.01, x, 39.9)
    assert_raises(AssertionError, r"out: SQNR 40\.00 dB, at least 41\.00 dB", assert_sqnr, x * 1.01, x, 41.0, "out")
    assert_raises(AssertionError, "SQNR", assert_sqnr, x * torch.nan, x, 0.0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16], ids=str)
@pytest.mark.parametrize("name", GENERATORS)
def test_inputs_are_seeded(name: str, dtype: torch.dtype) -> None:
    state = torch.get_rng_state()
    x = generate(name, (63, 65), dtype, seed=3)
    assert x.shape == (63, 65)
    assert x.dtype == dtype
    assert_bitwise(x, generate(name, (63, 65), dtype, seed=3))
    assert torch.equal(state, torch.get_rng_state())


def test_inputs_are_what_they_are_called() -> None:
    special = generate("with_inf_nan", (256, 256))
    assert special.isnan().any() and (special == torch.inf).any() and (special == -torch.inf).any()
    assert (special[special.isnan()].view(torch.int32) < 0).any()  # a negative NaN
    for dtype in (torch.float32, torch.bfloat16, torch.float16):
        small = generate("subnormal", (64, 64), dtype)
        assert (small.abs() < torch.finfo(dtype).tiny).all()
        assert small.abs().max() > 0
        assert generate("format_max", (64, 64), dtype).abs().max() == torch.finfo(dtype).max
    assert not generate("zeros", (3, 3)).any()


def test_an_unknown_generator_is_refused_with_those_there_are() -> None:
    with pytest.raises(ConfigError, match=r"no generator 'zero'; there are normal, .*, ties; did you mean 'zeros'\?"):
        generate("zero", (3, 3))
