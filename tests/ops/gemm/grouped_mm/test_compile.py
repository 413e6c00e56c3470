"""Every launch of the grouped kernels compiles for Hopper without spills, on its 8-bit matrix instruction."""

import re

import pytest
import torch

from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm.grouped_mm import triton as kernels
from tests.ops.compiled import compile_all, compiled, launched

SLOW = pytest.mark.slow
REGISTERS_OF_A_PROCESSOR, SHARED_BYTES_OF_A_PROCESSOR = 1 << 16, 228 << 10  # Hopper's


def codes(rows: int, cols: int, scaling: Scaling) -> QuantizedTensor:
    scale = torch.empty(scaling.scale_shape(rows, cols))
    if scaling.kind == "block_1x128":
        scale = scale.t().contiguous().t()
    return QuantizedTensor(torch.empty(rows, cols, dtype=scaling.dtype), scale, scaling)


@pytest.mark.parametrize(
    ("kind", "num_experts", "rows"),
    [
        ("rowwise", 8, 200),
        *(("blockwise", 8, rows) for rows in (7, 200, 1000)),
        *(pytest.param("rowwise", 8, rows, marks=SLOW) for rows in (7, 64, 1000)),
        pytest.param("blockwise", 8, 64, marks=SLOW),
        *(pytest.param(k, 128, r, marks=SLOW) for k in ("rowwise", "blockwise") for r in (1024, 2048, 8192)),
    ],
)
def test_rows(kind: str, num_experts: int, rows: int) -> None:
    """Turned tiles of 32 rows where groups are small, else of 64; three programs on a processor where all have rows."""
    scalings = (Scaling.per_row(), Scaling.per_row())
    if kind == "blockwise":
        scalings = (Scaling.block_1x128(), Scaling.block_128x128())
    offsets = torch.zeros(num_experts, dtype=torch.int32)

    def multiply() -> None:
        for width in (2048, 336):
            a, whole = codes(rows, width, scalings[0]), codes(num_experts * 1536, width, scalings[1])
            kernels.scaled_grouped_mm(a, whole, offsets, torch.bfloat16)

    for launch in launched(multiply):
        is_turned, programs = rows <= 16 * num_experts, 2 if rows < num_experts else 3
        assert f"'BLOCK_M': {32 if is_turned else 64}" in str(launch)
        report = compiled(launch, 0)
        size = "m64n32k32" if is_turned else "m64n128k32"
        assert f"wgmma.mma_async.sync.aligned.{size}.f32.e4m3.e4m3" in report.ptx, launch
        assert programs * report.registers * 128 <= REGISTERS_OF_A_PROCESSOR
        assert programs * (report.shared_bytes + 1024) <= SHARED_BYTES_OF_A_PROCESSOR  # a program keeps 1 KB


@pytest.mark.parametrize(
    ("kind", "rows"),
    [("blockwise", 2048), *(pytest.param("blockwise", rows, marks=SLOW) for rows in (512, 8192))]
    + [pytest.param("rowwise", rows, marks=SLOW) for rows in (512, 2048, 8192)],
)
def test_gathered_rows(kind: str, rows: int) -> None:
    """With the registers and the loads of rows that follow each other: 16 bytes at once."""
    scalings = (Scaling.per_row(), Scaling.per_row())
    if kind == "blockwise":
        scalings = (Scaling.block_1x128(), Scaling.block_128x128())
    a, few, whole = (codes(n, 2048, scalings[n > rows]) for n in (rows, rows // 8, 128 * 1536))
    offsets, slots = torch.zeros(128, dtype=torch.int32), torch.zeros(rows, dtype=torch.int64)
    (plain,) = compile_all(lambda: kernels.scaled_grouped_mm(a, whole, offsets, torch.bfloat16), 1)
    (gathered,) = compile_all(lambda: kernels.scaled_grouped_mm(few, whole, offsets, torch.bfloat16, slots, 8), 1)
    assert gathered.registers == plain.registers
    loads = [report.ptx.count("cp.async.cg.shared.global") for report in (plain, gathered)]  # of 16 bytes
    assert loads[0] == loads[1] > 0


@pytest.mark.parametrize(
    ("kind", "is_gathered"),
    [("blockwise", False), pytest.param("blockwise", True, marks=SLOW)]
    + [pytest.param("rowwise", is_gathered, marks=SLOW) for is_gathered in (False, True)],
)
def test_pairs(kind: str, is_gathered: bool) -> None:
    """Many rows a group: two programs on a processor, and the tensor memory unit fetches what is not gathered."""
    scalings = (Scaling.per_row(), Scaling.per_row())
    if kind == "blockwise":
        scalings = (Scaling.block_1x128(), Scaling.block_128x128())
    offsets, slots = torch.zeros(128, dtype=torch.int32), torch.zeros(65536, dtype=torch.int64)

    def multiply() -> None:
        for num_out, width in ((1536, 2048), (2048, 768), (1536, 336)):
            a, whole = codes(65536, width, scalings[0]), codes(128 * num_out, width, scalings[1])
            kernels.scaled_grouped_mm(a, whole, offsets, torch.bfloat16, slots if is_gathered else None)

    for launch in launched(multiply):
        assert launch.kernel.__name__ == "row_pairs"
        report = compiled(launch, 0)
        assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in report.ptx, launch
        fetched = set(re.findall(r"cp\.async\.bulk\.tensor[^[]*\[%r\d+\], \[(%rd\d+), ", report.ptx))
        assert len(fetched) == (1 if is_gathered else 2), launch  # descriptors
        assert ("cp.async.cg.shared.global" in report.ptx) == is_gathered, launch  # 16 bytes of gathered codes
        assert 2 * report.registers * 128 <= REGISTERS_OF_A_PROCESSOR
        assert 2 * (report.shared_bytes + 1024) <= SHARED_BYTES_OF_A_PROCESSOR


def test_steps_of_other_sizes_share_their_kernels() -> None:
    offsets, weights = torch.zeros(8, dtype=torch.int32), torch.empty(8, 256, 256, dtype=torch.bfloat16)
    whole = codes(8 * 256, 256, Scaling.block_128x128())

    def multiply() -> None:
        for rows in (257, 272, 300):  # of one tile each
            kernels.scaled_grouped_mm(codes(rows, 256, Scaling.block_1x128()), whole, offsets, torch.bfloat16)
            kernels.grouped_mm_exact(torch.empty(rows, 256, dtype=torch.bfloat16), weights, offsets, torch.bfloat16)

            many = codes(4 * rows, 256, Scaling.block_1x128())
            kernels.scaled_grouped_mm(many, whole, offsets, torch.bfloat16)

    names = sorted(launch.kernel.__name__ for launch in launched(multiply))
    assert names == ["hp_row_tiles", "row_pairs", "row_tiles"]


def test_clearing_the_tail() -> None:
    rows, offsets = torch.empty(2432, 2048, dtype=torch.bfloat16), torch.zeros(128, dtype=torch.int32)
    reports = compile_all(lambda: [kernels.clear_tail(rows, offsets[:groups]) for groups in (1, 128)], 2)
    assert all("st.global.v4.b32" in report.ptx for report in reports)


@pytest.mark.parametrize("square", [True, pytest.param(False, marks=SLOW)], ids=["128x128", "1x128"])
def test_gradients(square: bool) -> None:
    grad, scaling = codes(1536, 4096, Scaling.block_1x128()), Scaling.block_1x128()
    x = codes(2048, 4096, Scaling.block_128x128() if square else scaling)
    offsets = torch.zeros(128, dtype=torch.int32)
    (report,) = compile_all(lambda: kernels.scaled_grouped_mm_columns(grad, x, offsets, torch.bfloat16), 1)
    assert "wgmma.mma_async.sync.aligned.m64n128k32.f32.e4m3.e4m3" in report.ptx


@pytest.mark.parametrize(
    ("num_experts", "rows"),
    [(8, 128), *(pytest.param(*each, marks=SLOW) for each in ((8, 1000), (8, 1024), (128, 4096)))],
)
def test_exact_rows_of_16_bits(num_experts: int, rows: int) -> None:
    """On the instruction of the exact GEMM, with its tiles."""
    x = torch.empty(rows, 2048, dtype=torch.bfloat16)
    weights = torch.empty(num_experts, 1536, 2048, dtype=torch.bfloat16)
    offsets = torch.zeros(num_experts, dtype=torch.int32)
    (launch,) = launched(lambda: kernels.grouped_mm_exact(x, weights, offsets, torch.bfloat16))
    assert ("'BLOCK_M': 128" in str(launch)) == (rows >= 128 * num_experts)
    report = compiled(launch)
    assert "wgmma.mma_async.sync.aligned.m64n128k16.f32.bf16.bf16" in report.ptx, launch
