"""The fake-quantization kernels equal the reference in every bit: in the interpreter, on small shapes, and on a GPU."""

import pytest
import torch

from octavo.ops.quantize.fake_quantize import reference
from octavo.ops.quantize.fake_quantize import triton as kernels
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
DTYPES = [torch.bfloat16, torch.float16, torch.float32]
# More than one tile each way, with and without 16-byte alignment, single lines and a single element.
SMALL = [(144, 160), (63, 431), (1, 77), (77, 1), (1, 1)]
SHAPES = SMALL if is_interpreting() else [*SMALL, (300, 5000), (4096, 7168), (1, 70_000), (70_000, 1)]
FORMATS = {
    "mxfp8-e4m3": ("mxfp8", torch.float8_e4m3fn),
    "mxfp8-e5m2": ("mxfp8", torch.float8_e5m2),
    "mxfp8-e4m3-down": ("mxfp8", torch.float8_e4m3fn, "down"),
    "mxfp8-e5m2-down": ("mxfp8", torch.float8_e5m2, "down"),
    "nvfp4": ("nvfp4", False, None),
    "nvfp4-square": ("nvfp4", True, None),
    "nvfp4-noise": ("nvfp4", False, 7),
}
EACH_FORMAT = pytest.mark.parametrize("name", list(FORMATS))


def check(x: torch.Tensor, name: str, *, columns: bool = True) -> None:
    """Blocks along x's rows, and along its columns from x as it lies in memory."""
    function, *arguments = FORMATS[name]
    for source in (x, x.t()) if columns else (x,):
        expected = getattr(reference, function)(source, *arguments)
        found = getattr(kernels, function)(source.to(DEVICE), *arguments)
        assert found.stride() == expected.stride()
        assert_bitwise(found, expected, f"{name} of {tuple(source.shape)} {source.dtype} {source.stride()}")


@EACH_FORMAT
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"M{s[0]}-K{s[1]}")
def test_shapes(shape: tuple[int, int], name: str) -> None:
    check(generate("heavy_tailed", shape, torch.bfloat16), name)


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
@EACH_FORMAT
def test_inputs(name: str, dtype: torch.dtype) -> None:
    for generator in GENERATORS:
        check(generate(generator, (18, 50), dtype), name)


@EACH_FORMAT
def test_every_bf16_number(name: str) -> None:
    """Neighbours share blocks of one binade; shuffled, most values lie far below their block's largest."""
    every = torch.arange(1 << 16, dtype=torch.int32).to(torch.int16).view(torch.bfloat16)
    finite = torch.where(every.isfinite(), every, 0.0)  # an infinity would decide NVFP4's tensor scale
    shuffled = finite[torch.randperm(1 << 16, generator=torch.Generator().manual_seed(0))]
    for numbers in (every, finite, shuffled):
        check(numbers.view(512, 128), name, columns=False)


@EACH_FORMAT
def test_every_power_of_two(name: str) -> None:
    """One block a row, its largest value at each exponent of fp32, subnormal ones too, beside all smaller ones."""
    exponents = torch.arange(-149, 128, dtype=torch.float64)  # [277]
    largest = torch.ldexp(torch.ones(277, dtype=torch.float64), exponents.int()).float()
    steps = torch.cat([1 - torch.arange(20) / 19, torch.tensor([1.0, 1.75, 1.8, 1.875, 1.9, 1.9375, 1.96, 1.99])])
    fine = torch.ldexp(torch.ones(4), torch.tensor([-9, -15, -17, -24]))
    x = largest[:, None] * torch.cat([steps, fine])  # [277, 32]
    check(x, name)
    check(x[150:], name)  # NVFP4's tensor scale at another address
    check(x[:150], name)


@EACH_FORMAT
def test_nan_alone_and_infinities(name: str) -> None:
    for dtype in DTYPES:
        check(torch.full((17, 33), torch.nan, dtype=dtype), name)
        x = generate("normal", (33, 70), dtype)
        x[3], x[:, 5] = torch.nan, -torch.nan
        check(x, name)
        x[7, 9], x[20, 60] = torch.inf, -torch.inf
        check(x, name)


@EACH_FORMAT
def test_views_that_are_not_dense(name: str) -> None:
    x = generate("heavy_tailed", (40, 96), torch.bfloat16)
    check(x[:, :50], name)
    check(x[::2, 3:], name)
    check(x[:1].expand(33, 96), name)
    assert kernels.mxfp8(x[:0].to(DEVICE), torch.float8_e4m3fn).shape == (0, 96)


@pytest.mark.parametrize("seed", [1, -(2**40) - 3], ids=["one", "wide"])
@pytest.mark.parametrize("square", [False, True], ids=["1x16", "16x16"])
def test_seeds(square: bool, seed: int) -> None:
    """Triton makes a constant of 1; of others the low 32 bits count."""
    x = generate("normal", (180, 250), torch.bfloat16)  # more than one program's
    for source in (x, x.t()):
        assert_bitwise(kernels.nvfp4(source.to(DEVICE), square, seed), reference.nvfp4(source, square, seed))
    assert not torch.equal(reference.nvfp4(x, square, seed), reference.nvfp4(x, square, seed + 1))


def check_hadamard(x: torch.Tensor) -> None:
    expected = reference.random_hadamard(x)
    found = kernels.random_hadamard(x.to(DEVICE))
    assert found.is_contiguous()
    assert_bitwise(found, expected, f"transform of {tuple(x.shape)} {x.dtype} {x.stride()}")


@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"M{s[0]}-K{s[1]}")
def test_hadamard_shapes(shape: tuple[int, int]) -> None:
    check_hadamard(generate("heavy_tailed", shape, torch.bfloat16))


@pytest.mark.parametrize("dtype", DTYPES, ids=["bf16", "fp16", "fp32"])
def test_hadamard_inputs(dtype: torch.dtype) -> None:
    for generator in GENERATORS:
        check_hadamard(generate(generator, (18, 50), dtype))
    x = generate("heavy_tailed", (40, 96), dtype)
    for view in (x.t(), x[:, :50], x[::2, 3:], x[:1].expand(33, 96)):
        check_hadamard(view)
    assert kernels.random_hadamard(x[:0].to(DEVICE)).shape == (0, 96)
    assert kernels.random_hadamard(x[:5, :0].to(DEVICE)).shape == (16, 0)
