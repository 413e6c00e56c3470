"""The kernel that quantizes many matrices equals the reference in every bit, at whole, ragged and unaligned tiles."""

import pytest
import torch

from octavo.numerics import Scaling
from octavo.ops.quantize.many import MatrixBatch, reference, triton
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
SHAPES = {"aligned": [(144, 272), (16, 16), (32, 128)], "ragged": [(131, 133), (1, 1), (63, 260)]}
if not is_interpreting():
    SHAPES["real"] = [(4096, 7168), (512, 4096), (14336, 2048)]


def check(matrices: list[torch.Tensor], scaling: Scaling) -> None:
    kernels = MatrixBatch([x.to(DEVICE) for x in matrices], scaling)
    known = torch.tensor([0.25, 1.0, 448.0])[: len(matrices)] if scaling.is_per_tensor else None
    for observes in (False, True) if scaling.is_per_tensor else (False,):
        amaxes = [[torch.full((1,), 0.5, device=d) for _ in matrices] if observes else None for d in ("cpu", DEVICE)]
        expected = reference.quantize(MatrixBatch(matrices, scaling), known, amaxes[0])
        found = triton.quantize(kernels, None if known is None else known.to(DEVICE), amaxes[1])
        for what, ours, theirs in zip(("codes", "scales"), found, expected, strict=True):
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert_bitwise(a, b, f"{what} {i}")
        for ours, theirs in zip(amaxes[1] or [], amaxes[0] or [], strict=True):
            assert_bitwise(ours, theirs, "amaxes")
    if scaling.is_per_tensor:
        folded = [torch.zeros(len(matrices), device=d) for d in ("cpu", DEVICE)]
        reference.fold_amaxes(MatrixBatch(matrices, scaling), folded[0])
        triton.fold_amaxes(kernels, folded[1])
        assert_bitwise(folded[1], folded[0], "amaxes")


@pytest.mark.parametrize("kind", ["block_128x128", "per_tensor"])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("shapes", SHAPES)
def test_shapes(shapes: str, dtype: torch.dtype, kind: str) -> None:
    check([generate("heavy_tailed", shape, dtype) for shape in SHAPES[shapes]], Scaling.of_kind(kind))


@pytest.mark.parametrize("kind", ["block_128x128", "per_tensor"])
@pytest.mark.parametrize("name", [n for n in GENERATORS if n != "heavy_tailed"])
def test_inputs(name: str, kind: str) -> None:
    for dtype in (torch.bfloat16, torch.float32):
        check([generate(name, (32, 144), dtype), generate(name, (16, 16), dtype)], Scaling.of_kind(kind))


def test_lines_of_nan_alone() -> None:
    x = generate("normal", (144, 160), torch.float32)
    x[3], x[:, 5], x[128:, 128:] = torch.nan, -torch.nan, torch.nan
    for kind in ("block_128x128", "per_tensor"):
        check([x, torch.full((16, 32), torch.nan)], Scaling.of_kind(kind))


def test_other_formats() -> None:
    matrices = [generate("near_tiny", (16, 144), torch.bfloat16)]
    for kind in ("block_128x128", "per_tensor"):
        check(matrices, Scaling.of_kind(kind, torch.float8_e5m2, scale_format="e8m0"))
