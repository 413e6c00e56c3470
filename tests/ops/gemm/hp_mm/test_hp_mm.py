"""The high-precision GEMM: exact mode is row-local and as accurate as fp32."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_raises


@pytest.mark.parametrize("k", [16, 128, 344, 5000])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
def test_exact_is_accurate(k, dtype, generator, device):
    x = torch.randn(33, k, generator=generator).to(device, dtype)
    w = torch.randn(50, k, generator=generator).to(device, dtype)
    # a GPU's matrix units sum 16-bit products in fp32 and cut what falls off; the fixed-point sums lose nothing
    floor = 85.0 if device.type == "cuda" and dtype == torch.bfloat16 else 100.0
    assert_sqnr(hp_mm(x, w, out_dtype=torch.float32, exact=True), x.double() @ w.double().t(), floor)


@pytest.mark.parametrize("k", [128, 344])
def test_exact_rows_do_not_depend_on_the_batch(k, generator, device):
    x = torch.randn(130, k, generator=generator).to(device, torch.bfloat16)
    w = torch.randn(77, k, generator=generator).to(device, torch.bfloat16)
    bias = torch.randn(77, generator=generator).to(device)
    whole = hp_mm(x, w, bias=bias, exact=True)
    for rows in ([0], [129], [3, 80], list(range(64)), list(range(129, -1, -3))):
        assert_bitwise(hp_mm(x[rows], w, bias=bias, exact=True), whole[rows])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("out_dtype", [None, torch.float32], ids=["same", "fp32"])
def test_library_follows_exact(dtype, out_dtype, generator, device):
    x = torch.randn(40, 344, generator=generator).to(device, dtype)
    w = torch.randn(50, 344, generator=generator).to(device, dtype)
    bias = torch.randn(50, generator=generator).to(device, dtype)
    library = hp_mm(x, w, bias=bias, out_dtype=out_dtype)
    assert library.dtype == (out_dtype or dtype)
    assert_sqnr(library, hp_mm(x, w, bias=bias, out_dtype=out_dtype, exact=True), 45.0)


def test_bad_shapes_are_refused():
    assert_raises(ShapeError, "must agree in K", hp_mm, torch.ones(2, 3), torch.ones(2, 4))
