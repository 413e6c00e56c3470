"""The fused kernel against the ops one after the other, whatever the groups: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.numerics.infinity import take_infinity
from octavo.ops.activation import triton as activation_kernels
from octavo.ops.gemm.grouped_mm import triton as grouped_kernels
from octavo.ops.gemm.grouped_swiglu import triton as kernels
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
BLOCK, SQUARE = Scaling.block_1x128(), Scaling.block_128x128()
SHAPES = [(256, 128), (512, 256)] if is_interpreting() else [(1536, 2048), (512, 256)]
SCALINGS = [BLOCK, Scaling.block_1x128(scale_format="e8m0"), Scaling.block_1x128(amax_floor=1.0)]
# Rows of each group; the last number is rows of no group.
GROUPS = [[16, 0, 33, 1, 64, 5], [0, 0, 70, 0], [0, 3, 0, 40], [2, 32, 31, 0]]


def make(shape: tuple[int, int], scaling: Scaling, seed: int, dtype: torch.dtype = torch.bfloat16) -> QuantizedTensor:
    return quantize_reference(generate("normal", shape, dtype, seed=seed, device=DEVICE), scaling)


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def one_by_one(a, whole, offsets, slots, per_row, scaling, dtype) -> QuantizedTensor:
    """The kernels that it stands for."""
    hidden = grouped_kernels.scaled_grouped_mm(a, whole, offsets, dtype, slots, per_row)
    return activation_kernels.activation_quantize(hidden, "swiglu", None, scaling, None, None, None, None)[0]


def assert_same(found: QuantizedTensor, wanted: QuantizedTensor) -> None:
    assert_bitwise(found.qdata.view(torch.uint8), wanted.qdata.view(torch.uint8))
    assert_bitwise(found.scale, wanted.scale)
    assert found.scale.stride() == wanted.scale.stride()


@pytest.mark.parametrize("fewest_rows", [0, 10**6], ids=["32 rows a tile", "16"])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_bits(shape, sizes, fewest_rows, monkeypatch) -> None:
    monkeypatch.setattr(kernels, "FEWEST_ROWS", fewest_rows)
    (both, width), groups = shape, sizes[:-1]
    a, whole = make((sum(sizes), width), BLOCK, 0), make((len(groups) * both, width), SQUARE, 1)
    arguments = a, whole, ends(groups), None, 1, BLOCK, torch.bfloat16
    found = kernels.grouped_swiglu(*arguments)
    assert found.shape == (sum(sizes), both // 2)
    assert_same(found, one_by_one(*arguments))
    assert found.qdata[: sum(groups)].float().any() and not found.qdata[sum(groups) :].float().any()


@pytest.mark.parametrize("scaling", SCALINGS)
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_gathered_rows_and_other_scales(dtype, scaling) -> None:
    """Of three slots a row; the last rows are of no group."""
    a, whole = make((20, 128), BLOCK, 0, dtype), make((4 * 256, 128), SQUARE, 1, dtype)
    slots = torch.randperm(60, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    arguments = a, whole, ends([17, 0, 30, 9]), slots, 3, scaling, dtype
    assert_same(kernels.grouped_swiglu(*arguments), one_by_one(*arguments))


def test_an_infinity_is_noted() -> None:
    """As the quantizer notes it, and no row that a tile reads past its group is."""
    a, whole = make((40, 128), BLOCK, 0), make((2 * 256, 128), SQUARE, 1)
    a.scale[33] = 1e30  # of gate times up no number is left
    take_infinity(torch.device(DEVICE))
    kernels.grouped_swiglu(a, whole, ends([20, 13]), None, 1, BLOCK, torch.bfloat16)
    assert not take_infinity(torch.device(DEVICE))
    kernels.grouped_swiglu(a, whole, ends([20, 14]), None, 1, BLOCK, torch.bfloat16)
    assert take_infinity(torch.device(DEVICE))


def test_what_it_takes() -> None:
    a, whole = make((40, 128), BLOCK, 0), make((4 * 256, 128), SQUARE, 1)
    assert kernels.can_fuse(a, whole, 40, 4, BLOCK)
    assert kernels.can_fuse(a, whole, 64, 4, BLOCK) and not kernels.can_fuse(a, whole, 65, 4, BLOCK)
    assert not kernels.can_fuse(a, whole, 0, 4, BLOCK)
    assert not kernels.can_fuse(a, whole, 40, 8, BLOCK)  # 64 columns of gate
    assert not kernels.can_fuse(a, whole, 40, 4, Scaling.per_row())
    rows = Scaling.per_row()
    assert not kernels.can_fuse(make((40, 128), rows, 0), make((4 * 256, 128), rows, 1), 40, 4, BLOCK)
    assert not kernels.can_fuse(make((40, 64), BLOCK, 0), make((4 * 256, 64), SQUARE, 1), 40, 4, BLOCK)
