"""Every launch of the quantizers compiles for Hopper (and Blackwell) without spills, with the casts that they mean."""

import re

import pytest
import torch

from bench.speed.quant_cases import make_cases
from bench.speed.quantize import VARIANTS
from octavo.numerics import Scaling
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import triton as kernels
from octavo.ops.quantize.many import MatrixBatch
from octavo.ops.quantize.many import triton as many_kernels
from octavo.ops.quantize.transpose import triton as transpose_kernels
from tests.ops.compiled import Launch, assert_moves_16_bytes, compiled, launched

E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
# Triton specializes by divisibility by 16: all aligned, none, ragged rows, ragged columns.
SHAPES = [(4096, 7168), (303, 305), (303, 7168), (4096, 305)]
CAST = {E4M3: "cvt.rn.satfinite.e4m3x2.f32", E5M2: "cvt.rn.satfinite.e5m2x2.f32"}


def launches(scaling: Scaling, source: torch.dtype, shapes: list[tuple[int, int]], arch: int = 90) -> list[Launch]:
    def quantize() -> None:
        for shape in shapes:
            x = torch.empty(shape, dtype=source)
            for pair in ((scaling, None), (None, scaling), (scaling, scaling)):
                kernels.quantize_matrix(x, *pair)
                if scaling.is_per_tensor:
                    kernels.quantize_matrix(x, *pair, torch.ones(1), torch.zeros(1))

    return launched(quantize, arch=arch)


def check(launch: Launch, arch: int, dtype: torch.dtype) -> None:
    # 90 is tuned for; for sm_100a one assembler trades a few bytes for occupancy
    report = compiled(launch) if arch == 90 else launch.compile(arch)
    # Flushing would lose subnormal amaxes, scales and products; an approximate division its last bit. The start of
    # the scales' division is between 1 and 2, and corrected.
    assert ".ftz" not in report.ptx.replace("rsqrt.approx.ftz.f32", ""), f"{launch} flushes subnormals"
    assert set(re.findall(r"\bdiv\.\w+\.f32", report.ptx)) <= {"div.rn.f32"}, f"{launch} divides inexactly"
    casts = set(re.findall(r"cvt[\w.]*e[45]m[\w.]*", report.ptx))
    is_amax_pass = "amax_" in str(launch)
    assert casts == (set() if is_amax_pass else {CAST[dtype]}), f"{launch} casts otherwise"


@pytest.mark.parametrize("kind", ["block_1x128", "block_128x128"])
def test_aligned_launches_compile_for_hopper(kind: str) -> None:
    """The quick part of test_every_combination_compiles."""
    found = launches(Scaling.of_kind(kind, E4M3), torch.bfloat16, SHAPES[:1])
    assert len(found) == 3
    for launch in found:
        check(launch, 90, E4M3)


def test_aligned_tiles_move_16_bytes_at_once() -> None:
    x = torch.empty(4096, 7168, dtype=torch.bfloat16)
    group, square = Scaling(), Scaling.block_128x128()
    pairs = ((group, None), (group, group), (square, square), (group, square))
    for launch in launched(lambda: [kernels.quantize_matrix(x, *pair) for pair in pairs]):
        assert_moves_16_bytes(launch, launch.compile().ptx, stored=r"v[24]\.b32")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("dtype", "source", "arch", "shapes"),
    [
        (E4M3, torch.bfloat16, 90, SHAPES),
        pytest.param(E4M3, torch.float32, 90, SHAPES, marks=pytest.mark.largest),
        # A 16-bit source takes the same registers whichever it is: the two share the shapes.
        (E5M2, torch.float16, 90, SHAPES[:2]),
        pytest.param(E5M2, torch.bfloat16, 90, SHAPES[2:], marks=pytest.mark.largest),
        # No registers are checked here, and the instructions are those of every shape.
        pytest.param(E4M3, torch.bfloat16, 100, SHAPES[:2], marks=pytest.mark.largest),
    ],
    ids=["e4m3-bf16-90", "e4m3-fp32-90", "e5m2-fp16-90", "e5m2-bf16-90", "e4m3-bf16-100"],
)
@KINDS
def test_every_combination_compiles(kind, dtype, source, arch, shapes):
    scale_format = "e8m0" if dtype == E5M2 else "fp32"
    floor = 0.0 if (dtype, source, arch) == (E4M3, torch.bfloat16, 90) else 1e-12
    scaling = Scaling.of_kind(kind, dtype, scale_format=scale_format, amax_floor=floor)
    for launch in launches(scaling, source, shapes, arch):
        check(launch, arch, dtype)


@pytest.mark.slow
@pytest.mark.parametrize(("name", "case"), list(VARIANTS), ids=lambda n: n.replace(" ", "_"))
def test_plans_that_the_benchmark_offers(name: str, case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    assert case in {each.name for each in make_cases()}
    kinds = re.findall(r"128x128|1x128|per row|per tensor", case)
    scalings = [Scaling.of_kind(f"block_{k}" if "x" in k else k.replace(" ", "_")) for k in kinds]
    x = torch.empty(4096, 4096, dtype=torch.bfloat16)
    for plan in VARIANTS[name, case]:
        monkeypatch.setitem(kernels.PLANS, name, plan)
        kernels.clear_plans()
        given: tuple = (scalings[0], scalings[-1], torch.ones(1) if "known" in case else None)
        if case.endswith(" rows"):
            given = (scalings[0], None)
        elif case.endswith(" columns") and len(scalings) == 1:
            given = (None, scalings[0])
        for launch in launched(lambda given=given: kernels.quantize_matrix(x, *given)):
            check(launch, 90, E4M3)
    monkeypatch.undo()
    kernels.clear_plans()


def test_transposed_codes_compile_for_hopper() -> None:
    def transpose_all() -> None:
        for shape in SHAPES:
            transpose_kernels.transpose(torch.empty(shape, dtype=torch.uint8), None)

    for launch in launched(transpose_all):
        compiled(launch)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
def test_many_matrices_compile_for_hopper(dtype: torch.dtype) -> None:
    def quantize_all(shapes: list[tuple[int, int]]) -> None:
        matrices = [torch.empty(shape, dtype=dtype) for shape in shapes]
        many_kernels.quantize(MatrixBatch(matrices, Scaling.block_128x128()), None, None)
        batch, known = MatrixBatch(matrices, Scaling.per_tensor()), torch.ones(len(shapes))
        many_kernels.quantize(batch, known, None)
        many_kernels.quantize(batch, known, [torch.zeros(1)] * len(shapes))
        many_kernels.fold_amaxes(batch, torch.zeros(len(shapes)))

    for launch in launched(lambda: quantize_all(SHAPES[:1] * 2), 4):
        check(launch, 90, E4M3)
        if "amax_" not in str(launch):
            assert_moves_16_bytes(launch, launch.compile().ptx)
    for launch in launched(lambda: quantize_all(SHAPES[1:]), 4):
        check(launch, 90, E4M3)
