"""quantize, dequantize and quantize_dynamic: the contract's codes, opaque to export, refused where they cannot be."""

import pytest
import torch

from octavo.errors import DtypeError, OctavoError, RecipeError, ShapeError
from octavo.numerics.quantized import quantize_reference
from octavo.numerics.scaling import Scaling
from octavo.qdq import dequantize, quantize, quantize_dynamic
from octavo.qdq.operators import DYNAMIC_KINDS, KINDS
from tests.assertions import assert_raises
from tests.qdq.graphs import randn


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("dtype", [torch.float8_e4m3fn, torch.float8_e5m2])
def test_codes_are_the_contracts(kind: str, dtype: torch.dtype, device: torch.device) -> None:
    """With power-of-two scales, whose reciprocals are exact, a known scale gives the codes of that amax."""
    x = randn(3, 63, 200).to(device)
    wanted = quantize_reference(x.flatten(0, 1), Scaling.of_kind(kind, dtype, scale_format="e8m0"))
    codes = quantize(x, wanted.scale, kind=kind, dtype=dtype)
    assert codes.shape == x.shape
    assert torch.equal(codes.flatten(0, 1).view(torch.uint8), wanted.qdata.view(torch.uint8))
    assert torch.equal(dequantize(codes, wanted.scale, kind=kind).flatten(0, 1), wanted.dequantize())


@pytest.mark.parametrize("kind", DYNAMIC_KINDS)
def test_a_dynamic_scale_is_the_contracts(kind: str, device: torch.device) -> None:
    x = randn(2, 31, 200, dtype=torch.bfloat16).to(device)
    wanted = quantize_reference(x.flatten(0, 1), Scaling.of_kind(kind))
    codes, scale = quantize_dynamic(x, kind=kind)
    assert torch.equal(scale, wanted.scale)
    assert torch.equal(codes.flatten(0, 1).view(torch.uint8), wanted.qdata.view(torch.uint8))


def test_a_number_is_a_scale() -> None:
    x = randn(5, 7)
    assert torch.equal(dequantize(quantize(x, 0.25), 0.25), dequantize(quantize(x, torch.tensor(0.25)), 0.25))


def test_saturates_and_keeps_nan() -> None:
    codes = quantize(torch.tensor([1e9, -float("inf"), float("nan")]), 1.0)
    assert dequantize(codes, 1.0)[:2].tolist() == [448.0, -448.0]
    assert codes.view(torch.uint8)[2] == 0x7F


@pytest.mark.parametrize("kind", KINDS)
def test_fakes_agree_with_the_ops(kind: str) -> None:
    x = randn(4, 256)
    scale = quantize_reference(x, Scaling.of_kind(kind)).scale
    codes = quantize(x, scale, kind=kind)
    calls = [
        (torch.ops.octavo.qdq_quantize.default, (x, scale, kind, torch.float8_e4m3fn)),
        (torch.ops.octavo.qdq_dequantize.default, (codes, scale, kind, torch.bfloat16)),
    ]
    if kind in DYNAMIC_KINDS:
        calls.append((torch.ops.octavo.qdq_quantize_dynamic.default, (x, kind, torch.float8_e4m3fn)))
    for op, args in calls:
        torch.library.opcheck(op, args, test_utils="test_faketensor")


@pytest.mark.parametrize(
    ("call", "error", "text"),
    [
        (lambda x: quantize(x, 1.0, kind="per_cow"), RecipeError, "per_cow"),
        (lambda x: quantize(x, -1.0), RecipeError, "positive finite"),
        (lambda x: quantize(x, torch.ones(3)), ShapeError, "one element"),
        (lambda x: quantize(x, torch.ones(3, 1), kind="per_row"), ShapeError, r"shape \(4, 1\)"),
        (lambda x: quantize(x.int(), 1.0), DtypeError, "int32"),
        (lambda x: quantize(x, torch.ones((), dtype=torch.bfloat16)), DtypeError, "float32"),
        (lambda x: quantize(x, 1.0, dtype=torch.int8), OctavoError, "int8"),
        (lambda x: dequantize(x, 1.0), OctavoError, "float32"),
        (lambda x: dequantize(quantize(x, 1.0), 1.0, dtype=torch.int8), DtypeError, "int8"),
        (lambda x: quantize_dynamic(x, kind="block_128x128"), RecipeError, "block_128x128"),
    ],
)
def test_refusals(call, error: type[Exception], text: str) -> None:  # type: ignore[no-untyped-def]
    assert_raises(error, text, call, randn(4, 8))
