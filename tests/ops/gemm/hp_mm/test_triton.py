"""The exact 16-bit GEMM: close to fp64, and a row's bits depend on that row alone."""

import pytest
import torch

from octavo.ops.gemm.hp_mm import triton as kernels
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = [(150, 136, 200), (3, 40, 64)] + ([] if is_interpreting() else [(4096, 6144, 4096), (700, 4000, 12288)])


def make(M: int, N: int, K: int, dtype: torch.dtype = torch.bfloat16) -> tuple[torch.Tensor, ...]:
    generator = torch.Generator().manual_seed(0)
    return tuple(torch.randn(*s, generator=generator).to(DEVICE, dtype) for s in ((M, K), (N, K), (N,)))


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
@pytest.mark.parametrize("out_dtype", [torch.float32, torch.bfloat16], ids=["fp32", "bf16"])
def test_it_is_the_product(M: int, N: int, K: int, out_dtype: torch.dtype) -> None:
    x, weight, bias = make(M, N, K)
    wanted = x.double() @ weight.double().t()
    floor = 90.0 if out_dtype == torch.float32 else 45.0
    assert_sqnr(kernels.hp_mm_exact(x, weight, None, out_dtype), wanted, floor)
    assert_sqnr(kernels.hp_mm_exact(x, weight, bias, out_dtype), wanted + bias.double(), floor)


@pytest.mark.parametrize(("M", "N", "K"), SHAPES)
def test_a_row_depends_on_itself_alone(M: int, N: int, K: int) -> None:
    x, weight, bias = make(M, N, K)
    whole = kernels.hp_mm_exact(x, weight, bias, torch.float32)
    order = torch.randperm(M, generator=torch.Generator().manual_seed(1)).to(DEVICE)
    for count in (1, 2, 17, 64, 65, 128, 129, M):
        rows = order[:count]
        assert_bitwise(kernels.hp_mm_exact(x[rows], weight, bias, torch.float32), whole[rows], f"{count} rows")


def test_strides() -> None:
    x, weight, _ = make(20, 48, 96)
    wanted = kernels.hp_mm_exact(x, weight, None, torch.float32)
    wide = torch.cat((x, x), dim=1)[:, :96]
    assert_bitwise(kernels.hp_mm_exact(wide, weight.t().contiguous().t(), None, torch.float32), wanted)


@pytest.mark.skipif(is_interpreting(), reason="the interpreter knows no MMA instructions")
def test_small_and_large_tiles_give_the_same_bits(monkeypatch: pytest.MonkeyPatch) -> None:
    x, weight, bias = make(512, 4096, 4096)
    large = kernels.hp_mm_exact(x, weight, bias, torch.float32)
    monkeypatch.setattr(kernels, "LARGE", kernels.SMALL)
    assert_bitwise(kernels.hp_mm_exact(x, weight, bias, torch.float32), large)
