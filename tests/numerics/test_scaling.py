"""From amax to scale: every edge of the rule. tests/ops/quantize has whole matrices against rule.py."""

import itertools
import math

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from octavo.errors import DtypeError, RecipeError, ShapeError
from octavo.numerics.quantized import quantize_reference
from octavo.numerics.scaling import (
    BLOCK_SIZES,
    Scaling,
    block_amax,
    compute_quant_scale,
    floor_to_power_of_two,
    reciprocal,
    to_blocks,
)
from tests.assertions import assert_raises
from tests.numerics import rule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
LAW = settings(deadline=None, max_examples=150, derandomize=True, database=None)
INF, NAN = math.inf, math.nan
FP32_MAX = torch.finfo(torch.float32).max


def quant_scale(amax: float, scaling: Scaling, source: torch.dtype = torch.float32) -> float:
    return float(compute_quant_scale(torch.tensor([amax]), scaling, source))


# amax


@KINDS
def test_amax_ignores_nan_and_keeps_inf(kind: str) -> None:
    x = torch.full((4, 256), 0.5)
    x[0, 3], x[1, 4], x[1, 5] = -3.0, NAN, -INF
    scaling = Scaling.of_kind(kind)
    amax = block_amax(x, scaling.block_size)
    assert amax.shape == scaling.scale_shape(4, 256)
    assert not amax.isnan().any()
    assert amax.max() == INF
    x[1] = NAN
    assert block_amax(x, scaling.block_size).max() == 3.0
    assert block_amax(torch.full((4, 256), NAN), scaling.block_size).max() == 0.0


def test_ragged_blocks_are_padded_with_zeros() -> None:
    x = torch.arange(1.0, 1 + 130 * 129).reshape(130, 129)
    blocks = to_blocks(x, (128, 128))
    assert blocks.shape == (2, 128, 2, 128)
    assert torch.equal(blocks.reshape(256, 256)[:130, :129], x)
    assert blocks.sum() == x.sum()
    assert block_amax(-x, (128, 128)).tolist() == [
        [x[127, 127], x[127, 128]],
        [x[129, 127], x[129, 128]],
    ]


@KINDS
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (3, 0), (1, 1)], ids=str)
def test_empty_matrices_have_scales_of_the_stated_shape(kind: str, shape: tuple[int, int]) -> None:
    scaling = Scaling.of_kind(kind)
    q = quantize_reference(torch.ones(shape), scaling)
    assert q.scale.shape == scaling.scale_shape(*shape)
    assert q.dequantize().shape == shape
    if not q.qdata.numel():
        assert (q.scale == 1).all()


def test_scale_shapes() -> None:
    shapes = {kind: Scaling.of_kind(kind).scale_shape(303, 300) for kind in BLOCK_SIZES}
    blocks = {"block_1x128": (303, 3), "block_128x128": (3, 3), "mx_1x32": (303, 10)}
    assert shapes == {"per_tensor": (1, 1), "per_row": (303, 1)} | blocks


# quant_scale


@KINDS
def test_overflow_becomes_the_largest_value_of_the_input(kind: str) -> None:
    for source, amax in itertools.product(rule.LARGEST, [1e-37, 2.0**-126, 1e-40, 2.0**-149]):
        expected = FP32_MAX if kind == "per_tensor" else torch.finfo(source).max
        assert quant_scale(amax, Scaling.of_kind(kind), source) == expected, (source, amax)


def test_largest_finite_quotient_is_kept() -> None:
    amax = float(np.nextafter(np.float32(448 / FP32_MAX), np.float32(1)))
    got = quant_scale(amax, Scaling(), torch.float16)
    assert got == np.float32(448) / np.float32(amax)  # finite, so not replaced, though fp16 cannot hold it
    assert torch.finfo(torch.float16).max < got < INF


def test_division_is_rounded_once() -> None:
    amax = torch.linspace(0.1, 10, 100_001)
    got = compute_quant_scale(amax, Scaling(), torch.float32)
    np.testing.assert_array_equal(got.numpy(), np.float32(448) / amax.numpy())
    np.testing.assert_array_equal(reciprocal(got).numpy(), np.float32(1) / got.numpy())
    # the trap: torch computes number / tensor as a reciprocal and a product
    assert not torch.equal(448.0 * torch.reciprocal(amax), got)


def test_power_of_two_is_cut_after_the_overflow_replacement() -> None:
    per_tensor, blocks = Scaling.per_tensor(scale_format="e8m0"), Scaling.block_1x128(scale_format="e8m0")
    assert quant_scale(1e-40, per_tensor) == 2.0**127
    assert quant_scale(1e-40, blocks, torch.bfloat16) == 2.0**127
    assert quant_scale(1e-40, blocks, torch.float16) == 2.0**15
    assert quant_scale(0.0, blocks) == 1.0
    assert quant_scale(INF, blocks) == 1.0


def test_power_of_two_is_cut_down() -> None:
    scaling = Scaling(scale_format="e8m0")
    assert quant_scale(448.0, scaling) == 1.0
    assert quant_scale(448.0 * (1 + 2**-20), scaling) == 0.5  # exp2(floor(log2)) in fp32 would give 1
    assert quant_scale(224.0, scaling) == 2.0
    assert quant_scale(225.0, scaling) == 1.0
    x = torch.tensor([1.0, 1.5, 2.0 - 2**-23, 2.0, FP32_MAX, 2.0**-126])
    assert floor_to_power_of_two(x).tolist() == [1.0, 1.0, 1.0, 2.0, 2.0**127, 2.0**-126]


@FP8
@LAW
@given(amax=st.floats(0, width=32, allow_nan=False), is_e8m0=st.booleans(), floor=st.sampled_from([0.0, 1e-12, 1e-4]))
@example(amax=0.0, is_e8m0=False, floor=0.0)
@example(amax=INF, is_e8m0=False, floor=0.0)
@example(amax=0.0, is_e8m0=False, floor=1e-4)  # the floor comes before the test for zero
@example(amax=INF, is_e8m0=False, floor=1e-4)
def test_rule_for_any_amax(dtype: torch.dtype, amax: float, is_e8m0: bool, floor: float) -> None:
    scaling = Scaling(dtype, scale_format="e8m0" if is_e8m0 else "fp32", amax_floor=floor)
    for source, largest in rule.LARGEST.items():
        expected = rule.quant_scale_of(np.float32([amax]), scaling.fp8_max, largest, is_e8m0, floor)
        assert quant_scale(amax, scaling, source) == expected


@FP8
@LAW
@given(amax=st.floats(0, width=32, allow_nan=False))
def test_scale_is_positive_and_finite_and_decodes_the_maximum(dtype: torch.dtype, amax: float) -> None:
    scaling = Scaling(dtype)
    scale = reciprocal(compute_quant_scale(torch.tensor([amax]), scaling, torch.float32))
    assert 0 < scale < INF
    if 1e-30 < amax < INF:
        assert float(scale) * scaling.fp8_max == pytest.approx(amax, rel=2**-22)


# bad input


def test_errors() -> None:
    assert_raises(DtypeError, r"must be float8_e4m3fn or float8_e5m2, got torch\.bfloat16", Scaling, torch.bfloat16)
    assert_raises(DtypeError, r"got torch\.float8_e8m0fnu", Scaling, torch.float8_e8m0fnu)
    assert_raises(RecipeError, r"block_size must be one of .*got \(2, 64\)", Scaling, block_size=(2, 64))
    with pytest.raises(RecipeError, match=r"scale_format must be one of \('fp32', 'e8m0'\), got 'bf16'"):
        Scaling(scale_format="bf16")
    for floor in (-1.0, INF, NAN):
        assert_raises(RecipeError, "amax_floor must be a finite number >= 0", Scaling, amax_floor=floor)
    with pytest.raises(RecipeError, match="unknown scaling 'per_column'; known: per_tensor, per_row"):
        Scaling.of_kind("per_column")


def test_inputs_that_no_quantizer_takes() -> None:
    with pytest.raises(ShapeError, match=r"must be a matrix \[M, K\], got shape \(2, 3, 4\); flatten"):
        quantize_reference(torch.ones(2, 3, 4), Scaling())
    for dtype in (torch.float64, torch.int32, E4M3):
        with pytest.raises(DtypeError, match="must be float32, bfloat16 or float16"):
            quantize_reference(torch.ones(2, 3).to(dtype), Scaling())
