"""The bias after a library's GEMM has the bits of torch's two steps: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.numerics import Scaling, quantize_reference
from octavo.ops.gemm.scaled_mm import library
from octavo.ops.gemm.scaled_mm import triton as kernels
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
SMALL = [(1, 1), (3, 131), (37, 128), (5, 1030)]
SHAPES = SMALL if is_interpreting() else [*SMALL, (63, 431), (8191, 4096), (300, 16384)]
DTYPES = (torch.bfloat16, torch.float16, torch.float32)


def check(x: torch.Tensor, bias: torch.Tensor, out_dtype: torch.dtype) -> None:
    found, expected = kernels.add_bias(x, bias, out_dtype), (x + bias.float()).to(out_dtype)
    assert found.is_contiguous()
    assert torch.equal(found.isnan(), expected.isnan())  # whose bits are a device's own
    assert_bitwise(found.masked_fill(found.isnan(), 0.0), expected.masked_fill(expected.isnan(), 0.0))


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
@pytest.mark.parametrize(("M", "N"), SHAPES)
@pytest.mark.parametrize("cut", [(0, 0), (7, 0), (61, 1), (61, 128)], ids=str)
def test_it_is_the_two_steps(cut, M, N, bias_dtype, out_dtype):
    """Of whole matrices and of what is left of padded ones."""
    whole = generate("normal", (M + cut[0], N + cut[1]), torch.float32, device=DEVICE)
    check(whole[:M, :N], generate("normal", (N,), bias_dtype, seed=1, device=DEVICE), out_dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
@pytest.mark.parametrize("bias_dtype", DTYPES, ids=str)
def test_halves_limits_and_what_is_not_finite(bias_dtype: torch.dtype, out_dtype: torch.dtype) -> None:
    values = [0.0, -0.0, 1.0, -1.0, 2.0**-9, 2.0**-25, 1e-40, -1e-45, 65504.0, 65520.0, 3.3e38, -3.4e38]
    values += [torch.inf, -torch.inf]
    column = torch.tensor(values, device=DEVICE)
    x = column[:, None] * torch.tensor([1.0, 1.00390625, 1.01171875, 0.99999994], device=DEVICE)
    x = x.repeat(1, len(values))
    check(x, column.repeat_interleave(4).to(bias_dtype), out_dtype)


@pytest.mark.parametrize("out_dtype", DTYPES, ids=str)
def test_not_a_number_stays_one(out_dtype: torch.dtype) -> None:
    x, bias = torch.zeros(3, 5, device=DEVICE), torch.zeros(5, device=DEVICE)
    x[1, 2] = bias[4] = torch.nan
    expected = torch.zeros(3, 5, dtype=torch.bool)
    expected[1, 2] = expected[:, 4] = True
    assert torch.equal(kernels.add_bias(x, bias, out_dtype).isnan().cpu(), expected)


def test_nothing_to_add_to() -> None:
    assert kernels.add_bias(torch.empty(0, 5, device=DEVICE), torch.empty(5, device=DEVICE), DTYPES[0]).shape == (0, 5)


@pytest.mark.skipif(is_interpreting(), reason="a GPU's library")
@pytest.mark.parametrize("kind", ["block", "row"])
@pytest.mark.parametrize(("M", "N"), [(128, 256), (77, 256), (77, 200)])
def test_after_a_product(M: int, N: int, kind: str) -> None:
    scalings = (Scaling.block_1x128(), Scaling.block_128x128()) if kind == "block" else (Scaling.per_row(),) * 2
    a, b = (
        quantize_reference(generate("normal", (rows, 384), torch.bfloat16, seed=rows, device=DEVICE), scaling)
        for rows, scaling in zip((M, N), scalings, strict=True)
    )
    bias = generate("normal", (N,), torch.float32, device=DEVICE)
    product = library.scaled_mm_cuda(a, b, None, torch.float32)
    for out_dtype in DTYPES:
        expected = (product + bias).to(out_dtype)
        assert_bitwise(library.scaled_mm_cuda(a, b, bias, out_dtype), expected)
