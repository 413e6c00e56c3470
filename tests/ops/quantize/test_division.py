"""The kernels' branch-free division, restated in numpy: equal to true division for every amax, so every scale is."""

import numpy as np
import pytest

pytestmark = pytest.mark.skipif(np.finfo(np.longdouble).nmant < 63, reason="needs more than 53 bits to round once")
FP8_MAXES = pytest.mark.parametrize("fp8_max", [448.0, 57344.0], ids=["e4m3", "e5m2"])
ONE = np.uint32(0x3F800000)


def fma(a: np.ndarray, b: np.ndarray, c: np.ndarray) -> np.ndarray:
    """a * b + c rounded once to fp32: the product is exact in fp64, and the 64-bit mantissa holds the sum's head."""
    return (a.astype(np.longdouble) * b.astype(np.longdouble) + c.astype(np.longdouble)).astype(np.float32)


def quotient(bits: np.ndarray, fp8_max: float) -> np.ndarray:
    """fp8_max / amax as triton.py's _quant_scale has it, for amaxes given as fp32 bits that do not overflow."""
    one, largest = np.float32(1), np.float32(fp8_max)
    m_bits = (bits & np.uint32(0x7FFFFF)) | ONE
    m = m_bits.view(np.float32)
    inverse = fma(fma(m, np.float32(0.3232325), np.float32(-1.4545455)), m, np.float32(2.1212122))
    inverse = fma(fma(-m, inverse, one), inverse, inverse)
    inverse = fma(fma(-m, inverse, one), inverse, inverse)
    result = largest * inverse
    result = fma(fma(-m, result, largest), inverse, result)
    return (result.view(np.uint32) - (bits - m_bits)).view(np.float32)


def short_quotient(bits: np.ndarray, fp8_max: float, error: float) -> np.ndarray:
    """The same for an amax of 16 bits, from an inverse that is wrong by a part `error`."""
    m_bits = (bits & np.uint32(0x7FFFFF)) | ONE
    m = m_bits.view(np.float32)
    inverse = ((1.0 + error) / m.astype(np.float64)).astype(np.float32)
    result = np.float32(fp8_max) * inverse
    result = fma(fma(-m, result, np.float32(fp8_max)), inverse, result)
    return (result.view(np.uint32) - (bits - m_bits)).view(np.float32)


def check(mantissas: np.ndarray, fp8_max: float) -> None:
    """Every mantissa at exponents from the first that does not overflow to the largest."""
    least = np.float32(fp8_max * 2.0**-128)
    for exponent in (*range(7, 25), 127, 128, 200, 254):
        bits = (mantissas | np.uint32(exponent << 23)).astype(np.uint32)
        amax = bits.view(np.float32)
        with np.errstate(over="ignore"):
            true = np.float32(fp8_max) / amax
        assert np.array_equal(np.isinf(true), amax <= least)  # what the kernel replaces, and nothing else
        fine = amax > least
        np.testing.assert_array_equal(quotient(bits[fine], fp8_max).view(np.uint32), true[fine].view(np.uint32))


@FP8_MAXES
def test_mantissas_of_16_bit_types(fp8_max: float) -> None:
    check(np.arange(1 << 10, dtype=np.uint32) << np.uint32(13), fp8_max)


@FP8_MAXES
@pytest.mark.parametrize("error", [0.0, *(sign * 2.0**-power for sign in (1, -1) for power in (18, 20, 21, 22, 23))])
def test_any_close_inverse_is_enough_for_16_bit_types(error: float, fp8_max: float) -> None:
    """What the square of an approximate reciprocal root is off by, 2**-21, is left to the hardware."""
    bits = (np.arange(1 << 10, dtype=np.uint32) << np.uint32(13)) | ONE
    true = np.float32(fp8_max) / bits.view(np.float32)
    np.testing.assert_array_equal(short_quotient(bits, fp8_max, error).view(np.uint32), true.view(np.uint32))


@FP8_MAXES
def test_no_quotient_of_bf16_lies_between_the_largest_bf16_and_infinity(fp8_max: float) -> None:
    least = np.float32(fp8_max * 2.0**-128).view(np.uint32)
    above = (np.arange(1, 1 << 12, dtype=np.uint32) << np.uint32(16)) + least
    assert (np.float32(fp8_max) / above.view(np.float32)).max() < np.uint32(0x7F7F0000).view(np.float32)


@FP8_MAXES
def test_random_mantissas(fp8_max: float) -> None:
    drawn = np.random.default_rng(0).integers(0, 1 << 23, 20_000, dtype=np.uint32)
    edges = np.array([0, 1, 2, (1 << 23) - 2, (1 << 23) - 1], dtype=np.uint32)
    check(np.concatenate([drawn, edges]), fp8_max)


@pytest.mark.slow
@FP8_MAXES
def test_every_mantissa(fp8_max: float) -> None:
    every = np.arange(1 << 23, dtype=np.uint32)
    bits = every | ONE
    true = np.float32(fp8_max) / bits.view(np.float32)
    for part in np.split(np.arange(1 << 23), 64):  # the exponent is added exactly, so one is enough
        np.testing.assert_array_equal(quotient(bits[part], fp8_max).view(np.uint32), true[part].view(np.uint32))
