"""grouped_swiglu_quantize is scaled_grouped_mm and then activation_quantize, for every scaling, on any device."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.activation import activation_quantize
from octavo.ops.gemm.grouped_mm import Gather, scaled_grouped_mm
from octavo.ops.gemm.grouped_swiglu import grouped_swiglu_quantize
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise
from tests.assertions import assert_raises

KINDS = {
    "blockwise": (Scaling.block_1x128(), Scaling.block_128x128()),
    "rowwise": (Scaling.per_row(), Scaling.per_row()),
    "tensorwise": (Scaling.per_tensor(), Scaling.per_tensor()),
}
ROWS, GROUPS, WIDTH, HALF = 21, 3, 128, 128


def operands(kind: str, device: torch.device) -> tuple[QuantizedTensor, list[QuantizedTensor], torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    x, *weights = (torch.randn(n, WIDTH, generator=generator).to(device, torch.bfloat16) for n in (7, *[2 * HALF] * 3))
    of_rows, of_weights = KINDS[kind]
    codes = [quantize(weight, of_weights) for weight in weights]
    if kind != "tensorwise":
        codes = [quantize(torch.cat(weights), of_weights)]
    return quantize(x, of_rows), codes, torch.tensor([9, 9, 19], dtype=torch.int32, device=device)


@pytest.mark.parametrize("exact", [True, False], ids=["exact", "fast"])
@pytest.mark.parametrize("kind", KINDS)
def test_bits_of_the_ops_one_after_the_other(kind: str, exact: bool, device: torch.device) -> None:
    """Rows are gathered, with a known scale where all share one; the last two rows are of no group."""
    a, weights, offsets = operands(kind, device)
    gather = Gather(torch.randperm(ROWS, generator=torch.Generator().manual_seed(1)).to(device), 3)
    known = torch.full((1,), 4.0, device=device) if kind == "tensorwise" else None
    given = {"scaling": a.scaling, "quant_scale": known}
    made = grouped_swiglu_quantize(a, weights, offsets, gather=gather, dtype=torch.float16, exact=exact, **given)
    hidden = scaled_grouped_mm(a, weights, offsets, gather=gather, out_dtype=torch.float16, exact=exact)
    wanted = activation_quantize(hidden, kind="swiglu", **given).rows
    assert made.shape == (ROWS, HALF) and made.scaling == a.scaling
    assert_bitwise(made.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
    assert_bitwise(made.scale, wanted.scale)
    assert made.qdata[:19].float().any()


def test_the_op_without_data(device: torch.device) -> None:
    a, weights, offsets = operands("blockwise", device)
    left, right = (a.qdata, a.scale, [1, 128]), ([weights[0].qdata], [weights[0].scale], [128, 128])
    slots = torch.arange(ROWS, device=device)
    given = *left, *right, offsets, slots, 3, None, a.scaling.text, torch.bfloat16, False, False
    torch.library.opcheck(torch.ops.octavo.grouped_swiglu.default, given, test_utils="test_faketensor")


def test_bad_shapes_are_refused() -> None:
    a, weights, offsets = operands("rowwise", torch.device("cpu"))
    odd = QuantizedTensor(weights[0].qdata[:-3], weights[0].scale[:-3], weights[0].scaling)
    assert_raises(
        ShapeError, "as many rows of gate as of up, got 255 a group",
        grouped_swiglu_quantize, a, [odd], offsets, scaling=a.scaling,
    )  # fmt: skip
    many = torch.arange(5, dtype=torch.int32)  # which do not share 768 rows
    assert_raises(ShapeError, "must fit", grouped_swiglu_quantize, a, weights * 2, many, scaling=a.scaling)
