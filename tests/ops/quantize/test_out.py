"""Quantizers that overwrite an older operand: the bits of a fresh one, at the addresses of the old one."""

import dataclasses

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import quantize, quantize_both
from octavo.testing import generate
from tests.assertions import assert_codes, assert_raises

KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
SHAPES = pytest.mark.parametrize("shape", [(256, 384), (131, 133), (1, 1), (0, 16)], ids=str)


def old_operand(shape: tuple[int, int], scaling: Scaling, device: torch.device) -> QuantizedTensor:
    """With NaN in all places."""
    old = quantize(torch.ones(shape, dtype=torch.bfloat16, device=device), scaling)
    old.qdata.view(torch.uint8).fill_(0xFF)
    old.scale.fill_(torch.nan)
    return old


@SHAPES
@KINDS
def test_bits_and_addresses(kind: str, shape: tuple[int, int], device: torch.device) -> None:
    scaling = Scaling.of_kind(kind)
    for _ in range(2):  # the second launch of a shape goes by addresses
        x = generate("heavy_tailed", shape, torch.bfloat16).to(device)
        fresh, columns = quantize_both(x, scaling)
        for has_columns in (False, True):
            old = old_operand(shape, scaling, device)
            places = old.qdata.data_ptr(), old.scale.data_ptr(), old.qdata.stride(), old.scale.stride()
            found = quantize_both(x, scaling, out=old) if has_columns else (quantize(x, scaling, out=old),)
            assert found[0] is old
            assert (old.qdata.data_ptr(), old.scale.data_ptr(), old.qdata.stride(), old.scale.stride()) == places
            for got, want in zip(found, (fresh, columns), strict=False):
                assert_codes(got, want)


@KINDS
def test_a_place_that_kernels_cannot_write_to(kind: str, device: torch.device) -> None:
    """Odd addresses and strides of its own: it gets the values all the same."""
    scaling, x = Scaling.of_kind(kind), generate("normal", (256, 384), torch.bfloat16).to(device)
    fresh = quantize(x, scaling)
    odd = torch.empty(256 * 384 + 1, dtype=torch.uint8, device=device)[1:].view(256, 384).view(scaling.dtype)
    wide = torch.empty(256, 400, dtype=torch.uint8, device=device)[:, :384].view(scaling.dtype)
    scale = fresh.scale.clone(memory_format=torch.contiguous_format)
    for codes in (odd, wide):
        out = QuantizedTensor(codes, scale, scaling)
        assert quantize(x, scaling, out=out) is out
        assert_codes(out, fresh)


def test_a_known_scale_and_its_amax(device: torch.device) -> None:
    x = generate("normal", (131, 133), torch.bfloat16).to(device)
    scaling, known = Scaling.per_tensor(), torch.full((1,), 3.0, device=device)
    amax = torch.zeros(1, device=device)
    old = old_operand((131, 133), scaling, device)
    found = quantize(x, scaling, quant_scale=known, amax_out=amax, out=old)
    assert_codes(found, quantize(x, scaling, quant_scale=known))
    assert amax == x.abs().max()


def test_another_operands_place_is_refused() -> None:
    x, scaling = torch.ones(256, 384, dtype=torch.bfloat16), Scaling()
    before = old_operand((256, 384), scaling, x.device)
    for out in (
        old_operand((256, 256), scaling, x.device),
        old_operand((256, 384), Scaling(torch.float8_e5m2), x.device),
        old_operand((256, 384), dataclasses.replace(scaling, scale_format="e8m0"), x.device),
        QuantizedTensor(before.qdata.to("meta"), before.scale.to("meta"), scaling),
    ):
        for run in (quantize, quantize_both):
            assert_raises(ShapeError, "out must be a", run, x, scaling, out=out)
