"""QuantizedTensor: decoding, round trips that change no code, transposing, and what it refuses."""

import dataclasses

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from octavo.errors import ShapeError
from octavo.numerics.quantized import QuantizedTensor, expand_scale, quantize_reference
from octavo.numerics.scaling import BLOCK_SIZES, Scaling
from tests.assertions import assert_raises

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
LAW = settings(deadline=None, max_examples=60, derandomize=True, database=None)
SHAPE = (130, 260)


def codes(q: QuantizedTensor) -> torch.Tensor:
    return q.qdata.view(torch.uint8)


def weights(seed: int, shape: tuple[int, int] = SHAPE) -> dict[str, torch.Tensor]:
    """bf16 matrices of very different ranges."""
    generator = torch.Generator().manual_seed(seed)
    normal = torch.randn(shape, generator=generator)
    tails = torch.exp(4 * torch.randn(shape, generator=generator))
    sparse = normal * (torch.rand(shape, generator=generator) < 0.02)
    cases = {"normal": normal, "heavy": normal * tails, "tiny": normal * 1e-37, "subnormal": normal * 3e-39}
    cases |= {"huge": normal * 3e37, "sparse": sparse, "zeros": torch.zeros(shape)}
    return {name: x.bfloat16() for name, x in cases.items()}


# decoding


@FP8
@KINDS
def test_decoding_is_code_times_scale(kind: str, dtype: torch.dtype) -> None:
    q = quantize_reference(weights(0)["normal"], Scaling.of_kind(kind, dtype))
    bm, bk = (size if size > 0 else 10_000 for size in q.scaling.block_size)
    decoded = q.dequantize()
    for row, col in [(0, 0), (127, 127), (128, 128), (129, 259), (64, 31), (64, 32)]:
        assert decoded[row, col] == q.qdata[row, col].float() * q.scale[row // bm, col // bk]
    assert torch.equal(q.dequantize(torch.bfloat16), decoded.bfloat16())


@FP8
@KINDS
def test_error_is_half_an_ulp_of_the_block(kind: str, dtype: torch.dtype) -> None:
    x = weights(1)["normal"].float()
    q = quantize_reference(x, Scaling.of_kind(kind, dtype))
    bits = 3 if dtype is E4M3 else 2
    smallest = torch.finfo(dtype).smallest_normal * q.expanded_scale()
    bound = torch.maximum(x.abs(), smallest) * 2.0 ** -(bits + 1)
    assert ((q.dequantize() - x).abs() <= bound * (1 + 1e-5)).all()


@FP8
@KINDS
@LAW
@given(exponent=st.floats(-36, 36), seed=st.integers(0, 2**31))
def test_decoded_values_stay_within_the_range_of_the_input(kind, dtype, exponent, seed):
    x = torch.randn(5, 140, generator=torch.Generator().manual_seed(seed)) * 10.0**exponent
    q = quantize_reference(x, Scaling.of_kind(kind, dtype))
    assert q.dequantize().isfinite().all()
    # amax itself is mapped to the format's largest value, but where quant_scale would overflow: there it is rounded
    slack = 2**-3 if x.abs().max() * 3e38 < q.scaling.fp8_max else 2**-22
    assert q.dequantize().abs().max() <= x.abs().max() * (1 + slack)


def test_an_infinity_spoils_the_scale_of_its_own_block_only() -> None:
    x = torch.full((2, 256), 3.0)
    x[0, 0] = float("inf")
    q = quantize_reference(x, Scaling.block_1x128())
    assert q.scale[0, 0] == 1.0
    assert q.dequantize()[0, 0] == 448.0
    assert torch.equal(q.dequantize()[0, 1:128], x[0, 1:128])
    assert torch.equal(codes(q)[0, 128:], codes(q)[1, 128:])


def test_nan_keeps_its_place_and_moves_no_scale() -> None:
    x = weights(2)["normal"].clone()
    expected = quantize_reference(x, Scaling.block_128x128())
    x[5, 7] = x[5, 8] = float("nan")
    q = quantize_reference(x, Scaling.block_128x128())
    assert torch.equal(q.scale, expected.scale)
    assert codes(q)[5, 7:9].tolist() == [0x7F, 0x7F]
    assert (codes(q) != codes(expected)).sum() == 2


@pytest.mark.parametrize("kind", ["per_row", "block_1x128", "mx_1x32"])
def test_rows_are_independent(kind: str) -> None:
    x = weights(4)["heavy"]
    whole = quantize_reference(x, Scaling.of_kind(kind))
    for row in (0, 77, 129):
        alone = quantize_reference(x[row : row + 1], Scaling.of_kind(kind))
        assert torch.equal(codes(alone)[0], codes(whole)[row])
        assert torch.equal(alone.scale[0], whole.scale[row])


# round trips


@FP8
@KINDS
def test_round_trips_change_no_code(kind: str, dtype: torch.dtype) -> None:
    """bf16 -> fp8 -> bf16 -> fp8: an exported bf16 checkpoint gives the same codes and scales; in fp32 scales round."""
    scaling = Scaling.of_kind(kind, dtype)
    for name, x in weights(5).items():
        first = quantize_reference(x, scaling)
        again = quantize_reference(first.dequantize(torch.bfloat16), scaling)
        assert torch.equal(codes(again), codes(first)), name
        assert torch.equal(again.scale, first.scale), name
        first = quantize_reference(x.float(), scaling)
        again = quantize_reference(first.dequantize(), scaling)
        assert torch.equal(codes(again), codes(first))
        torch.testing.assert_close(again.scale, first.scale, rtol=2**-22, atol=0)


def test_power_of_two_scales_may_change_codes_but_no_value() -> None:
    """Why the promise above is for fp32 scales: a block's largest code may round to 224 and be doubled."""
    scaling = Scaling.block_1x128(scale_format="e8m0")
    x = torch.full((1, 128), 225.0, dtype=torch.bfloat16)
    first = quantize_reference(x, scaling)
    again = quantize_reference(first.dequantize(torch.bfloat16), scaling)
    assert (first.qdata.float().max(), again.qdata.float().max()) == (224.0, 448.0)
    assert torch.equal(again.dequantize(), first.dequantize())


# transposing


@FP8
@pytest.mark.parametrize("kind", ["per_tensor", "block_128x128"])
def test_transposed_codes_equal_codes_of_the_transposed(kind: str, dtype: torch.dtype) -> None:
    for x in weights(7).values():
        scaling = Scaling.of_kind(kind, dtype)
        turned, expected = quantize_reference(x, scaling).t(), quantize_reference(x.t(), scaling)
        assert torch.equal(codes(turned), codes(expected))
        assert torch.equal(turned.scale, expected.scale)
        assert turned.qdata.is_contiguous()
        assert turned.scale.is_contiguous()


@pytest.mark.parametrize("kind", ["per_row", "block_1x128", "mx_1x32"])
def test_codes_scaled_along_rows_are_not_transposed(kind: str) -> None:
    q = quantize_reference(torch.ones(4, 4), Scaling.of_kind(kind))
    assert_raises(ShapeError, rf"{kind} codes cannot be transposed.*quantize_columns", q.t)


# known quant_scale, shapes


def test_known_quant_scale_is_one_number_for_one_tensor() -> None:
    with pytest.raises(ShapeError, match=r"one number and goes with per_tensor.*\(\) with block_1x128"):
        quantize_reference(torch.ones(2, 2), Scaling(), torch.tensor(1.0))
    with pytest.raises(ShapeError, match=r"one number and goes with per_tensor.*\(2,\) with per_tensor"):
        quantize_reference(torch.ones(2, 2), Scaling.per_tensor(), torch.ones(2))


def test_scale_of_another_shape_is_refused() -> None:
    q = quantize_reference(torch.ones(4, 200), Scaling())
    with pytest.raises(ShapeError, match=r"\(4, 200\) operand with block_1x128 must have shape \(4, 2\), got \(2, 4\)"):
        QuantizedTensor(q.qdata, q.scale.t(), q.scaling)


def test_attributes() -> None:
    q = quantize_reference(weights(9)["normal"], Scaling(E5M2))
    assert q.shape == SHAPE
    assert q.qdata.dtype == E5M2
    assert q.scale.dtype == torch.float32
    assert q.device == torch.device("cpu")
    assert q.num_bytes == 130 * 260 + 4 * 130 * 3
    assert q.expanded_scale().shape == SHAPE
    with pytest.raises(dataclasses.FrozenInstanceError):
        q.scale = q.scale  # type: ignore[misc]


def test_expand_scale_cuts_ragged_blocks() -> None:
    scale = torch.arange(6.0).reshape(2, 3)
    expanded = expand_scale(scale, (128, 128), (130, 260))
    assert expanded.shape == (130, 260)
    assert [float(expanded[at]) for at in ((0, 0), (127, 128), (128, 0), (129, 259))] == [0.0, 1.0, 3.0, 5.0]
