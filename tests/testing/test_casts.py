"""What kernels rely on (casts, products, fma) equals torch: in the corrected interpreter, and on a GPU."""

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")
import triton
import triton.language as tl

from octavo.numerics.formats import all_values
from octavo.numerics.scaling import encode
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import correct_interpreter, is_interpreting

pytestmark = [] if is_interpreting() else pytest.mark.gpu
DEVICE = "cpu" if is_interpreting() else "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
BLOCK = 4096

if is_interpreting():
    correct_interpreter()


@triton.jit
def cast_kernel(out, x, size, BLOCK: tl.constexpr):
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    values = tl.load(x + at, mask=at < size)
    tl.store(out + at, values.to(out.dtype.element_ty), mask=at < size)


@triton.jit
def dot_kernel(out, a, b, acc, SIZE: tl.constexpr):
    at = tl.arange(0, SIZE)
    places = at[:, None] * SIZE + at[None, :]
    product = tl.dot(tl.load(a + places), tl.load(b + places), acc=tl.load(acc + places))
    tl.store(out + places, product)


@triton.jit
def bf16_kernel(out, x, y, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    left, right = tl.load(x + at), tl.load(y + at)
    tl.store(out + at, tl.where(left > right, left + right, left * right))


@triton.jit
def fma_kernel(out, x, y, z, BLOCK: tl.constexpr):
    at = tl.arange(0, BLOCK)
    tl.store(out + at, tl.fma(tl.load(x + at), tl.load(y + at), tl.load(z + at)))


def cast(x: torch.Tensor, dtype: torch.dtype) -> torch.Tensor:
    x = x.to(DEVICE)
    out = torch.empty(x.shape, dtype=dtype, device=DEVICE)
    cast_kernel[(triton.cdiv(x.numel(), BLOCK),)](out, x, x.numel(), BLOCK=BLOCK)
    return out.cpu()


def every_16_bit_value(dtype: torch.dtype) -> torch.Tensor:
    return torch.arange(-(1 << 15), 1 << 15, dtype=torch.int32).to(torch.int16).view(dtype)


def ties_and_neighbours(dtype: torch.dtype) -> torch.Tensor:
    """fp32 values midway between neighbouring codes, just beside them, and past the largest."""
    values = all_values(dtype)
    finite = values[values.isfinite()].sort().values
    edges = torch.cat([(finite[1:] + finite[:-1]) / 2, finite, 2 * finite, finite * 1e30, finite * 1e-30])
    up, down = torch.tensor(torch.inf), torch.tensor(-torch.inf)
    return torch.cat([edges, edges.nextafter(up), edges.nextafter(down), up[None], down[None]])


@FP8
def test_every_code_decodes(dtype: torch.dtype) -> None:
    codes = torch.arange(256, dtype=torch.int16).to(torch.uint8).view(dtype)
    decoded = cast(codes, torch.float32)
    expected = all_values(dtype)
    assert torch.equal(decoded.isnan(), expected.isnan())
    assert_bitwise(decoded.nan_to_num(7.0, torch.inf, -torch.inf), expected.nan_to_num(7.0, torch.inf, -torch.inf))


@FP8
@pytest.mark.parametrize("source", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_every_16_bit_value_encodes(dtype: torch.dtype, source: torch.dtype) -> None:
    x = every_16_bit_value(source)
    # Through fp32, as in every kernel of ours.
    assert_bitwise(cast(cast(x, torch.float32), dtype), encode(x, torch.ones(()), dtype))


@FP8
def test_ties_saturation_and_any_fp32_encode(dtype: torch.dtype) -> None:
    bits = torch.randint(-(1 << 31), 1 << 31, (1 << 16,), generator=torch.Generator().manual_seed(0))
    x = torch.cat([ties_and_neighbours(dtype), bits.to(torch.int32).view(torch.float32), generate("normal", (4096,))])
    assert_bitwise(cast(x, dtype), encode(x, torch.ones(()), dtype))


def test_bf16_is_rounded_to_nearest_even() -> None:
    bits = torch.arange(0x3F7F0000, 0x3F820000, 0x1000, dtype=torch.int32).view(torch.float32)
    x = torch.cat([bits, -bits, generate("heavy_tailed", (4096,)), generate("near_tiny", (4096,))])
    assert_bitwise(cast(x, torch.bfloat16), x.to(torch.bfloat16))


def test_bf16_arithmetic() -> None:
    x, y = (generate("normal", (256,), torch.bfloat16, seed) for seed in (0, 1))
    out = torch.empty(256, dtype=torch.bfloat16, device=DEVICE)
    bf16_kernel[(1,)](out, x.to(DEVICE), y.to(DEVICE), BLOCK=256)
    assert_bitwise(out.cpu(), torch.where(x > y, x + y, x * y))


@pytest.mark.parametrize("dtypes", [(torch.bfloat16,) * 2, (E4M3,) * 2, (E5M2, E4M3)], ids=str)
def test_products_of_small_numbers_are_exact(dtypes: tuple[torch.dtype, torch.dtype]) -> None:
    generator = torch.Generator().manual_seed(0)
    a, b, acc = (torch.randint(-3, 4, (64, 64), generator=generator).float() for _ in range(3))
    out = torch.empty(64, 64, device=DEVICE)
    dot_kernel[(1,)](out, a.to(DEVICE, dtypes[0]), b.to(DEVICE, dtypes[1]), acc.to(DEVICE), SIZE=64)
    assert_bitwise(out.cpu(), a @ b + acc)


def test_fma_rounds_once() -> None:
    x, y, z = (generate("heavy_tailed", (256,), seed=seed) for seed in range(3))
    z[:128] = -(x * y)[:128]  # leaves the product's rounding error alone
    out = torch.empty(256, device=DEVICE)
    fma_kernel[(1,)](out, x.to(DEVICE), y.to(DEVICE), z.to(DEVICE), BLOCK=256)
    assert_bitwise(out.cpu(), (x.double() * y.double() + z.double()).float())
