"""Rows, columns and both on the reference path: equal to an independent numpy statement of the rule, bit for bit."""

import itertools

import numpy as np
import pytest
import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import quantize, quantize_both, quantize_columns
from octavo.testing import GENERATORS, assert_bitwise, generate
from tests.assertions import assert_codes, assert_raises
from tests.numerics import rule

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
SCALE_FORMATS = pytest.mark.parametrize("scale_format", ["fp32", "e8m0"])
# One block and a part of one, whole blocks each way, single columns, rows and elements, less than a block of rows.
SHAPES = [(131, 140), (129, 1), (1, 129), (256, 144), (130, 256), (1, 1), (63, 271)]


def check(q: QuantizedTensor, x: torch.Tensor, what: str) -> None:
    codes, scales = rule.quantize(x, q.scaling.dtype, q.scaling.block_size, q.scaling.scale_format)
    np.testing.assert_array_equal(q.qdata.view(torch.uint8).numpy(), codes, err_msg=what)
    np.testing.assert_array_equal(q.scale.numpy().view(np.uint32), scales.view(np.uint32), err_msg=what)


@FP8
@KINDS
def test_every_direction_equals_the_rule(kind: str, dtype: torch.dtype) -> None:
    for name, source, shape in itertools.product(GENERATORS, rule.LARGEST, SHAPES):
        if source != torch.bfloat16 and shape not in SHAPES[:4]:  # all dtypes take one path
            continue
        x = generate(name, shape, source)
        for scale_format in ("fp32", "e8m0"):
            scaling, what = Scaling.of_kind(kind, dtype, scale_format=scale_format), f"{name}, {shape}, {source}"
            rows, columns = quantize_both(x, scaling)
            check(rows, x, f"rows, {what}, {scale_format}")
            check(columns, x.t(), f"columns, {what}, {scale_format}")
            if source != torch.bfloat16:
                continue
            for alone, together in [(quantize(x, scaling), rows), (quantize_columns(x, scaling), columns)]:
                assert_codes(alone, together, f"{what}, {scale_format}")


@pytest.mark.parametrize(("kind", "group"), [("per_row", 512), ("block_1x128", 128), ("mx_1x32", 32)])
def test_scales_run_along_rows_and_columns(kind: str, group: int) -> None:
    """One outlier changes the scale of its own group alone, in the row that it stands in or in the column."""
    x = torch.ones(256, 384)
    x[3, 200] = 100.0
    rows, columns = quantize_both(x, Scaling.of_kind(kind))
    assert (rows.scale > 0.1).nonzero().tolist() == [[3, 200 // group]]
    assert (columns.scale > 0.1).nonzero().tolist() == [[200, 3 // group]]


@FP8
def test_a_known_quant_scale_is_used_as_it_is(dtype: torch.dtype) -> None:
    x = generate("heavy_tailed", (63, 431))
    quant_scale = torch.tensor(37.5)
    rows, columns = quantize_both(x, Scaling.per_tensor(dtype), quant_scale=quant_scale)
    largest = torch.finfo(dtype).max
    expected = (x * quant_scale).clamp(-largest, largest).to(dtype)
    assert (x * quant_scale).abs().max() > largest  # saturates
    assert_bitwise(rows.qdata, expected)
    assert_bitwise(columns.qdata, expected.view(torch.uint8).t().contiguous().view(dtype))
    assert rows.scale.item() == columns.scale.item() == np.float32(1) / np.float32(37.5)


@SCALE_FORMATS
def test_the_floor_bounds_the_scale(scale_format: str) -> None:
    x = generate("half_zero", (256, 272)) * 1e-6
    scaling = Scaling(amax_floor=1e-4, scale_format=scale_format)
    q = quantize(x, scaling)
    codes, scales = rule.quantize(x, E4M3, (1, 128), scale_format, floor=1e-4)
    np.testing.assert_array_equal(q.qdata.view(torch.uint8).numpy(), codes)
    np.testing.assert_array_equal(q.scale.numpy(), scales)


@KINDS
def test_strides_do_not_matter(kind: str) -> None:
    wide = generate("heavy_tailed", (60, 500))
    scaling = Scaling.of_kind(kind)
    for x in (wide[:, 3:300], wide.t()[5:200], wide[::2, ::3], wide[:1].expand(7, 500)):
        for view, plain in zip(quantize_both(x, scaling), quantize_both(x.contiguous(), scaling), strict=True):
            assert_codes(view, plain)
            assert view.qdata.is_contiguous()


@KINDS
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)], ids=str)
def test_empty_matrices(kind: str, shape: tuple[int, int]) -> None:
    rows, columns = quantize_both(torch.ones(shape), Scaling.of_kind(kind))
    assert rows.shape == shape
    assert columns.shape == shape[::-1]


@KINDS
@pytest.mark.parametrize("column_kind", list(BLOCK_SIZES))
def test_columns_may_have_a_scaling_of_their_own(kind: str, column_kind: str) -> None:
    x = generate("heavy_tailed", (130, 260), torch.bfloat16)
    scaling, column_scaling = Scaling.of_kind(kind), Scaling.of_kind(column_kind, E5M2)
    rows, columns = quantize_both(x, scaling, column_scaling=column_scaling)
    assert (rows.scaling, columns.scaling) == (scaling, column_scaling)
    check(rows, x, "rows")
    check(columns, x.t(), "columns")


@pytest.mark.parametrize("kind", ["block_1x128", "mx_1x32"])
def test_scales_of_groups_lie_column_by_column(kind: str, device: torch.device) -> None:
    x = generate("normal", (70, 260), device=str(device))
    rows, columns = quantize_both(x, Scaling.of_kind(kind))
    for q in (rows, columns, quantize(x, Scaling.of_kind(kind)), quantize_columns(x, Scaling.of_kind(kind))):
        assert q.scale.stride() == (1, q.shape[0])


def test_the_amax_is_folded_into_what_is_there(device: torch.device) -> None:
    scaling, known = Scaling.per_tensor(), torch.tensor(2.0, device=device)
    x = generate("with_inf_nan", (60, 70), torch.bfloat16).to(device)
    finite = torch.where(x.isfinite(), x, 0)
    for call in (quantize, quantize_columns, quantize_both):
        amax = torch.zeros(1, device=device)
        call(finite, scaling, quant_scale=known, amax_out=amax)
        assert amax.item() == finite.abs().max().item()
        call(finite / 2, scaling, quant_scale=known, amax_out=amax)
        assert amax.item() == finite.abs().max().item()
        call(x, scaling, quant_scale=known, amax_out=amax)
        assert amax.item() == np.inf


@pytest.mark.parametrize("kind", ["per_tensor", "block_1x128"])
def test_the_ops_are_registered_as_torch_wants(kind: str) -> None:
    x = generate("normal", (33, 140), torch.bfloat16)
    known = (torch.tensor(2.0), torch.zeros(1)) if kind == "per_tensor" else (None, None)
    for name, count in (("quantize_rows", 1), ("quantize_columns", 1), ("quantize_both", 2)):
        texts = (Scaling.of_kind(kind).text,) * count
        op = getattr(torch.ops.octavo, name).default
        torch.library.opcheck(op, (x, *known, *texts), test_utils=("test_schema", "test_faketensor"))


def test_bad_input_is_refused() -> None:
    assert_raises(ShapeError, "must be a matrix", quantize_columns, torch.ones(2, 3, 4), Scaling())
    with pytest.raises(DtypeError, match="cast it before quantizing"):
        quantize_both(torch.ones(2, 3, dtype=torch.float64), Scaling())
    with pytest.raises(ShapeError, match="goes with per_tensor"):
        quantize(torch.ones(2, 128), Scaling(), quant_scale=torch.ones(()))
    with pytest.raises(ShapeError, match="goes with per_tensor"):
        quantize_both(torch.ones(2, 128), Scaling.per_tensor(), column_scaling=Scaling(), quant_scale=torch.ones(()))
    with pytest.raises(ShapeError, match="goes with a known quant_scale"):
        quantize(torch.ones(2, 128), Scaling.per_tensor(), amax_out=torch.zeros(1))
    known, halves = torch.ones(()), torch.zeros(1).half()
    with pytest.raises(DtypeError, match="amax_out must be float32"):
        quantize(torch.ones(2, 4), Scaling.per_tensor(), quant_scale=known, amax_out=halves)
