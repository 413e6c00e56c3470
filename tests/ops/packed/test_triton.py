"""The Triton kernels on pieces of blocks against the reference, bit for bit, in the interpreter and on a GPU."""

from types import ModuleType

import pytest
import torch

from octavo.ops.packed import reference
from octavo.ops.packed import triton as kernels
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting
from tests.ops.packed.cases import buffer

DEVICE = "cpu" if is_interpreting() else "cuda"
# (pieces, elements of a piece): one, a ragged block, several programs, many pieces
SMALL = [(1, 1), (2, 131), (3, 33 * 128), (8, 256)]
SHAPES = SMALL if is_interpreting() else [*SMALL, (2, 63 * 431), (4, 4096 * 1792)]
DTYPES = [torch.float32, torch.bfloat16]


def run_all(run: ModuleType, x: torch.Tensor, start: int, device: str) -> dict[str, torch.Tensor]:
    """What each op writes; outputs start as NaN, residuals as x's own lower bits."""
    x = x.to(device)
    num_pieces, numel = x.shape
    num_blocks = -(-numel // 128)
    left = {}
    for name in ("plain", "fed back"):
        residual = (x.float() * 2.0**-5).to(x.dtype).contiguous() if name == "fed back" else None
        codes, scales = buffer(num_pieces, num_blocks, device)
        run.quantize_pieces(x, codes, scales, residual)
        left |= {f"{name} codes": codes, f"{name} scales": scales}
        for average in (False, True):
            one_codes, one_scales = buffer(1, num_blocks, device)
            own = None if residual is None else residual[-1:].clone()
            run.requantize_pieces(codes, scales, one_codes, one_scales, average, own)
            left |= {f"{name} sum's codes {average}": one_codes, f"{name} sum's scales {average}": one_scales}
            left |= {} if own is None else {f"own residual {average}": own}
        left |= {} if residual is None else {"residual": residual}
    for num_out in (1, num_pieces):
        for dtype in DTYPES:
            out = torch.full((num_out, numel + 5), torch.nan, dtype=dtype, device=device)
            run.decode_pieces(codes, scales, out[:, :numel])
            left[f"{num_out} decoded {dtype}"] = out
    codes, scales = buffer(num_pieces, num_blocks, device)
    run.round_pieces(x, codes, scales, torch.tensor(-5, dtype=torch.int32, device=device), start)
    return left | {"rounded codes": codes, "rounded scales": scales}


def check(x: torch.Tensor, start: int = 0) -> None:
    ours, theirs = run_all(kernels, x, start, DEVICE), run_all(reference, x, start, "cpu")
    for name, expected in theirs.items():
        is_nan = expected.float().isnan()  # whose bits are a device's own
        found = ours[name].cpu()
        assert torch.equal(found.float().isnan(), is_nan), name
        assert_bitwise(found.float()[~is_nan], expected.float()[~is_nan], name)


@pytest.mark.parametrize("shape", SHAPES, ids=lambda shape: "x".join(map(str, shape)))
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_shapes(shape: tuple[int, int], dtype: torch.dtype) -> None:
    check(generate("normal", shape, dtype))


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("name", GENERATORS)
def test_values(name: str, dtype: torch.dtype) -> None:
    check(generate(name, (3, 520), dtype))


@pytest.mark.parametrize("start", [1, 2**31 - 100, 2**32 - 100, 2**33 + 7])
def test_places_beyond_32_bits(start: int) -> None:
    check(generate("normal", (2, 300)), start)


def test_columns_of_a_larger_matrix() -> None:
    check(generate("normal", (4, 700))[:, 100:400])
    check(generate("normal", (300, 4)).t())
