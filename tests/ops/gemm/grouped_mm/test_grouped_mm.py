"""Grouped GEMMs: each group's rows are what the dense op makes of them alone, whatever else is in the batch."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm.grouped_mm import (
    Gather,
    grouped_mm,
    grouped_mm_columns,
    scaled_grouped_mm,
    scaled_grouped_mm_columns,
)
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize, quantize_columns
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import GEMM_ACROSS_DEVICES_DB, GEMM_FAST_ACCUMULATION_DB
from tests.assertions import assert_raises

N, K = 256, 384
SIZES = [16, 0, 128, 48]  # rows of each group; the second has none
PAIRS = {
    "rowwise": (Scaling.per_row(), Scaling.per_row()),
    "blockwise": (Scaling.block_1x128(), Scaling.block_128x128()),
    "tensorwise": (Scaling.per_tensor(), Scaling.per_tensor()),
}
TAIL = 16  # rows of no group


def operands(generator, device, dtype=torch.bfloat16, sizes=SIZES):
    rows = sum(sizes) + TAIL
    x = torch.randn(rows, K, generator=generator).to(device, dtype)
    weights = torch.randn(len(sizes), N, K, generator=generator).to(device, dtype)
    return x, weights, torch.tensor(sizes, device=device).cumsum(0).int()


def spans(sizes=SIZES):
    ends = torch.tensor(sizes).cumsum(0).tolist()
    return [slice(end - size, end) for end, size in zip(ends, sizes, strict=True)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_exact_rows_are_those_of_the_dense_product(dtype, generator, device):
    x, weights, offsets = operands(generator, device, dtype)
    out = grouped_mm(x, weights, offsets, exact=True)
    for group, rows in enumerate(spans()):
        assert_bitwise(out[rows], hp_mm(x[rows], weights[group], exact=True))
        for row in range(rows.start, rows.stop, 11):
            alone = grouped_mm(x[row : row + 1], weights[group : group + 1], offsets.new_ones(1), exact=True)
            assert_bitwise(alone, out[row : row + 1])
    assert not out[-TAIL:].any()


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_the_library_follows_exact(out_dtype, generator, device):
    x, weights, offsets = operands(generator, device)
    out = grouped_mm(x, weights, offsets, out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_sqnr(out, grouped_mm(x, weights, offsets, out_dtype=out_dtype, exact=True), GEMM_ACROSS_DEVICES_DB)


def test_columns_are_each_groups_own(generator, device):
    a, b = (torch.randn(rows, sum(SIZES) + TAIL, generator=generator).to(device, torch.bfloat16) for rows in (N, K))
    out = grouped_mm_columns(a, b, torch.tensor(SIZES, device=device).cumsum(0).int())
    for group, columns in enumerate(spans()):
        expected = a[:, columns].double() @ b[:, columns].double().t()
        if columns.stop > columns.start:
            assert_sqnr(out[group], expected, GEMM_ACROSS_DEVICES_DB)
        else:
            assert not out[group].any()


# One scale for the weights of all groups is not what experts have.
@pytest.mark.parametrize(
    ("pair", "whole"), [(pair, whole) for pair in PAIRS for whole in (True, False) if not (whole and "tensor" in pair)]
)
def test_scaled_rows_are_those_of_the_dense_product(pair, whole, generator, device):
    x, weights, offsets = operands(generator, device)
    rows_scaling, weight_scaling = PAIRS[pair]
    a = quantize(x, rows_scaling)
    apart = [quantize(w, weight_scaling) for w in weights]
    codes = [quantize(weights.flatten(0, 1), weight_scaling)] if whole else apart
    out = scaled_grouped_mm(a, codes, offsets, exact=True)
    library = scaled_grouped_mm(a, codes, offsets)
    for group, rows in enumerate(spans()):
        scale = a.scale if pair == "tensorwise" else a.scale[rows]
        left = QuantizedTensor(a.qdata[rows], scale, rows_scaling)
        expected = scaled_mm(left, apart[group], exact=True)
        if torch.device(device).type == "cpu":
            assert_bitwise(out[rows], expected)
        elif rows.stop > rows.start:
            assert_sqnr(out[rows], expected, GEMM_FAST_ACCUMULATION_DB)
    assert_sqnr(library[: sum(SIZES)], out[: sum(SIZES)], GEMM_FAST_ACCUMULATION_DB)
    assert not out[-TAIL:].any() and not library[-TAIL:].any()


@pytest.mark.parametrize("exact", [False, True])
@pytest.mark.parametrize("pair", PAIRS)
def test_gathered_rows_are_those_of_copies(pair, exact, generator, device):
    """On the library's path, on our own and in the reference."""
    num_rows = sum(SIZES) + TAIL
    x, weights, offsets = operands(generator, device)
    slots = torch.randperm(2 * num_rows, generator=generator)[:num_rows].to(device)
    scaling, weight_scaling = PAIRS[pair]
    a = quantize(x, scaling)
    codes = [quantize(w, weight_scaling) for w in weights]
    scale = a.scale if pair == "tensorwise" else a.scale[slots // 2]
    copied = QuantizedTensor(a.qdata.view(torch.uint8)[slots // 2].view(a.qdata.dtype), scale, scaling)
    expected = scaled_grouped_mm(copied, codes, offsets, exact=exact)
    assert expected.any()
    assert_bitwise(scaled_grouped_mm(a, codes, offsets, gather=Gather(slots, 2), exact=exact), expected)


@pytest.mark.parametrize("kind", ["per_row", "block_1x128", "per_tensor"])
def test_scaled_columns_are_each_groups_own(kind, generator, device):
    sizes = [128, 0, 256, 128]
    scaling = Scaling.of_kind(kind, torch.float8_e4m3fn)
    offsets = torch.tensor(sizes, device=device).cumsum(0).int()
    grad, x = (torch.randn(sum(sizes), width, generator=generator).to(device, torch.bfloat16) for width in (N, K))
    a, b = quantize_columns(grad, scaling), quantize_columns(x, scaling)
    out = scaled_grouped_mm_columns(a, b, offsets, out_dtype=torch.bfloat16)
    decoded_a, decoded_b = a.dequantize().double(), b.dequantize().double()
    for group, columns in enumerate(spans(sizes)):
        if columns.stop > columns.start:
            expected = decoded_a[:, columns] @ decoded_b[:, columns].t()
            assert_sqnr(out[group], expected, GEMM_ACROSS_DEVICES_DB)
        else:
            assert not out[group].any()


def test_bad_shapes_are_refused(generator):
    x, weights, offsets = operands(generator, "cpu")
    assert_raises(ShapeError, r"weights \[E, N, K\]", grouped_mm, x, weights[1:], offsets)
    assert_raises(ShapeError, "agree in R", grouped_mm_columns, x, x[:, 1:], offsets)
    a = quantize(x, Scaling.per_row())
    codes = [quantize(w, Scaling.per_row()) for w in weights]
    assert_raises(ShapeError, "codes of 4 weights", scaled_grouped_mm, a, codes[1:], offsets)
    square = quantize(x, Scaling.block_128x128())
    with pytest.raises(ShapeError, match="blocks of one row"):
        scaled_grouped_mm(square, codes, offsets, gather=Gather(torch.zeros(4, dtype=torch.int64), 1))
    with pytest.raises(ShapeError, match="agree in R"):
        scaled_grouped_mm_columns(a, quantize(x[:, 16:], Scaling.per_row()), offsets)
