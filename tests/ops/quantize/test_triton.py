"""The Triton quantizers equal the reference in every bit: in the interpreter, on small shapes, and on a GPU."""

from collections.abc import Iterator

import pytest
import torch

pytest.importorskip("triton", reason="triton is only packaged for Linux")

from octavo.numerics import Scaling, quantize_reference
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import triton as kernels
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import correct_interpreter, is_interpreting

pytestmark = [] if is_interpreting() else pytest.mark.gpu
DEVICE = "cpu" if is_interpreting() else "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
# Every pair of these four is compiled anew for every alignment, so only two of them meet every shape.
FORMATS = pytest.mark.parametrize(
    ("source", "dtype", "scale_format"),
    [(torch.bfloat16, E4M3, "fp32"), (torch.float32, E5M2, "e8m0")],
    ids=["bf16-e4m3", "fp32-e5m2-e8m0"],
)
# More than one tile each way, with and without 16-byte alignment, and a single element.
SMALL = [(144, 160), (131, 133), (1, 1)]
LARGE = [(303, 300), (305, 256), (129, 1), (63, 431), (256, 272), (256, 5000), (4096, 7168)]
SHAPES = SMALL if is_interpreting() else SMALL + LARGE

if is_interpreting():
    correct_interpreter()


@pytest.fixture(autouse=True)
def poisoned_outputs(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """New tensors start as NaN, so that what a kernel leaves out is seen."""
    empty = torch.empty

    def poisoned(*args, **kwargs):  # type: ignore[no-untyped-def]
        made = empty(*args, **kwargs)
        made.view(torch.uint8).fill_(0xFF)
        return made

    with monkeypatch.context() as patch:
        patch.setattr(torch, "empty", poisoned)
        yield


def check(x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None) -> None:
    """Rows alone, columns alone and both against the reference."""
    rows, columns = quantize_reference(x, scaling, quant_scale), quantize_reference(x.t(), scaling, quant_scale)
    x, known = x.to(DEVICE), None if quant_scale is None else quant_scale.to(DEVICE)
    expected = {"row": (rows.qdata, rows.scale), "column": (columns.qdata, columns.scale)}
    row_q, row_s, col_q, col_s = kernels.quantize_both(x, scaling, known)
    found = [
        ("row", "alone", kernels.quantize_rows(x, scaling, known)),
        ("column", "alone", kernels.quantize_columns(x, scaling, known)),
        ("row", "in both", (row_q, row_s)),
        ("column", "in both", (col_q, col_s)),
    ]
    for direction, where, (qdata, scale) in found:
        assert_bitwise(scale, expected[direction][1], f"{direction} scale {where}")
        assert_bitwise(qdata, expected[direction][0], f"{direction} codes {where}")


@FORMATS
@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"M{s[0]}-K{s[1]}")
def test_shapes(shape: tuple[int, int], kind: str, scale_format: str, dtype: torch.dtype, source: torch.dtype) -> None:
    x = generate("heavy_tailed", shape, source)
    check(x, Scaling.of_kind(kind, dtype, scale_format=scale_format))


@KINDS
@pytest.mark.parametrize("name", [n for n in GENERATORS if n != "heavy_tailed"])
def test_inputs(name: str, kind: str) -> None:
    check(generate(name, (18, 133), torch.bfloat16), Scaling.of_kind(kind, E4M3))
    check(generate(name, (10, 144), torch.float32), Scaling.of_kind(kind, E5M2, scale_format="e8m0"))


@FP8
@pytest.mark.parametrize("scale_format", ["fp32", "e8m0"])
def test_every_pair_of_formats(scale_format: str, dtype: torch.dtype) -> None:
    for kind in BLOCK_SIZES:
        for source in (torch.bfloat16, torch.float32):
            check(generate("near_tiny", (16, 144), source), Scaling.of_kind(kind, dtype, scale_format=scale_format))


@KINDS
def test_fp16(kind: str) -> None:
    for name in ("heavy_tailed", "subnormal", "format_max"):
        check(generate(name, (16, 144), torch.float16), Scaling.of_kind(kind))


@FP8
@pytest.mark.parametrize("known", [37.5, 1e-38, 3e38])
def test_a_known_quant_scale(known: float, dtype: torch.dtype) -> None:
    for shape in SHAPES[:2]:
        check(generate("with_inf_nan", shape), Scaling.per_tensor(dtype), torch.tensor(known))


@KINDS
@pytest.mark.parametrize("floor", [1e-4, 1.0])
def test_the_floor(kind: str, floor: float) -> None:
    check(generate("half_zero", (32, 144)) * 0.01, Scaling.of_kind(kind, amax_floor=floor))


@KINDS
def test_strides(kind: str) -> None:
    wide = generate("normal", (40, 160))
    for x in (wide[:20, 3:150], wide.t()[5:25], wide[::2, ::3], wide[:1].expand(7, 160)):
        check(x, Scaling.of_kind(kind))


@KINDS
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0)], ids=str)
def test_empty_matrices(kind: str, shape: tuple[int, int]) -> None:
    check(torch.ones(shape), Scaling.of_kind(kind))


@pytest.mark.skipif(is_interpreting(), reason="needs more than 2**31 elements")
def test_offsets_past_32_bits() -> None:
    x = torch.ones(1, 4096, device=DEVICE, dtype=torch.bfloat16).expand(600_000, 4096)
    codes, scale = kernels.quantize_rows(x, Scaling())
    assert (codes[-1].float() == 448).all()
    assert (scale[-1] == scale[0]).all()
    codes, _ = kernels.quantize_columns(x, Scaling())
    assert (codes[-1, -4096:].float() == 448).all()
