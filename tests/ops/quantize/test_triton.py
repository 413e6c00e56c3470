"""The Triton quantizers equal the reference in every bit: in the interpreter, on small shapes, and on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from bench.speed.quantize import VARIANTS
from octavo.numerics import Scaling, quantize_reference
from octavo.numerics.scaling import BLOCK_SIZES
from octavo.ops.quantize import reference
from octavo.ops.quantize import triton as kernels
from octavo.ops.quantize.triton.device import emit, emit_tile, load_values
from octavo.testing import GENERATORS, assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting
from tests.assertions import assert_codes

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
E4M3, E5M2 = torch.float8_e4m3fn, torch.float8_e5m2
FP8 = pytest.mark.parametrize("dtype", [E4M3, E5M2], ids=["e4m3", "e5m2"])
ALL_KINDS = list(BLOCK_SIZES)
KINDS = pytest.mark.parametrize("kind", list(BLOCK_SIZES))
# Every kind takes its own path to the one rule, so numbers and formats need few of them where time is short.
FEW_KINDS = ["block_1x128", "per_tensor"] if is_interpreting() else ALL_KINDS
# Every pair of these four is compiled again for every alignment, so only two of them meet every shape.
FORMATS = pytest.mark.parametrize(
    ("source", "dtype", "scale_format"),
    [(torch.bfloat16, E4M3, "fp32"), (torch.float32, E5M2, "e8m0")],
    ids=["bf16-e4m3", "fp32-e5m2-e8m0"],
)
# Scalings of rows and columns, None for rows alone: all on a GPU, those that take different paths in the interpreter.
PAIRS: list[tuple[str, str | None]] = [(kind, other) for kind in ALL_KINDS for other in (*ALL_KINDS, None)]
if is_interpreting():
    PAIRS = [
        ("per_tensor", "per_tensor"),
        ("per_row", "block_1x128"),
        ("block_1x128", "block_128x128"),
        ("block_128x128", "mx_1x32"),
        ("mx_1x32", "per_row"),
        ("block_1x128", None),
    ]
# More than one tile each way, with and without 16-byte alignment, and a single element.
SMALL = [(144, 160), (131, 133), (1, 1)]
LARGE = [(303, 300), (305, 256), (129, 1), (63, 431), (256, 272), (256, 5000), (4096, 7168)]
SHAPES = SMALL if is_interpreting() else SMALL + LARGE


def check(
    x: torch.Tensor, scaling: Scaling, quant_scale: torch.Tensor | None = None, columns: Scaling | None = None
) -> None:
    """Rows alone, columns alone and both against the reference."""
    columns = scaling if columns is None else columns
    row, column = quantize_reference(x, scaling, quant_scale), quantize_reference(x.t(), columns, quant_scale)
    x, known = x.to(DEVICE), None if quant_scale is None else quant_scale.to(DEVICE)
    expected = {"row": row, "column": column}
    amaxes = [None if known is None else torch.full((1,), 0.5, device=DEVICE) for _ in range(3)]
    both = kernels.quantize_matrix(x, scaling, columns, known, amaxes[0])
    found = [
        ("row", "alone", kernels.quantize_matrix(x, scaling, None, known, amaxes[1])[0]),
        ("column", "alone", kernels.quantize_matrix(x, None, columns, known, amaxes[2])[1]),
        ("row", "in both", both[0]),
        ("column", "in both", both[1]),
    ]
    for direction, where, q in found:
        assert_codes(q, expected[direction], f"{direction} codes {where}")
    if known is not None:
        wanted = torch.full((1,), 0.5)
        reference.fold_amax(wanted, x.cpu())
        for amax in amaxes:
            assert amax is not None
            assert_bitwise(amax, wanted, "amax_out")


@KINDS
@pytest.mark.parametrize("has_columns", [False, True], ids=["rows", "both"])
def test_a_given_place(has_columns: bool, kind: str) -> None:
    scaling, x = Scaling.of_kind(kind), generate("heavy_tailed", (144, 160), torch.bfloat16).to(DEVICE)
    place, _ = kernels.quantize_matrix(torch.zeros_like(x), scaling, None)
    place.scale.fill_(torch.nan)
    rows, _ = kernels.quantize_matrix(x, scaling, scaling if has_columns else None, out=place)
    expected = quantize_reference(x.cpu(), scaling)
    assert rows is place
    assert_codes(place, expected)


@FORMATS
@KINDS
@pytest.mark.parametrize("shape", SHAPES, ids=lambda s: f"M{s[0]}-K{s[1]}")
def test_shapes(shape: tuple[int, int], kind: str, scale_format: str, dtype: torch.dtype, source: torch.dtype) -> None:
    x = generate("heavy_tailed", shape, source)
    check(x, Scaling.of_kind(kind, dtype, scale_format=scale_format))


@KINDS
def test_a_ragged_last_block_has_no_part_of_its_neighbours(kind: str) -> None:
    """Larger numbers lie behind each row's end and behind the last row; tests/testing runs this in the fast lane."""
    wide = torch.full((512, 512), 1e4, dtype=torch.bfloat16, device=DEVICE)
    x = generate("normal", (131, 133), torch.bfloat16)
    wide[:131, :133] = x.to(DEVICE)
    rows, columns = kernels.quantize_matrix(wide[:131, :133], Scaling.of_kind(kind), Scaling.of_kind(kind))
    for found, source in ((rows, x), (columns, x.t())):
        expected = quantize_reference(source, Scaling.of_kind(kind))
        assert_codes(found, expected)


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("name", [n for n in GENERATORS if n != "heavy_tailed"])
def test_inputs(name: str, kind: str) -> None:
    check(generate(name, (18, 133), torch.bfloat16), Scaling.of_kind(kind, E4M3))
    check(generate(name, (10, 144), torch.float32), Scaling.of_kind(kind, E5M2, scale_format="e8m0"))


@FP8
@pytest.mark.parametrize("scale_format", ["fp32", "e8m0"])
def test_every_pair_of_formats(scale_format: str, dtype: torch.dtype) -> None:
    for kind in FEW_KINDS:
        for source in (torch.bfloat16, torch.float32):
            check(generate("near_tiny", (16, 144), source), Scaling.of_kind(kind, dtype, scale_format=scale_format))


@KINDS
@pytest.mark.filterwarnings("ignore:All-NaN slice")
def test_lines_of_nan_alone(kind: str) -> None:
    x = generate("normal", (144, 160), torch.bfloat16)
    x[3], x[:, 5], x[128:, 128:] = torch.nan, -torch.nan, torch.nan
    check(x, Scaling.of_kind(kind))
    check(torch.full((17, 33), torch.nan), Scaling.of_kind(kind))


@KINDS
def test_fp16(kind: str) -> None:
    for name in ("heavy_tailed", "subnormal", "format_max"):
        check(generate(name, (16, 144), torch.float16), Scaling.of_kind(kind))


@pytest.mark.parametrize(("kind", "column_kind"), [pair for pair in PAIRS if pair[1] is not None])
def test_columns_of_another_scaling(kind: str, column_kind: str) -> None:
    for dtype, shape in ((E4M3, (144, 160)), (E5M2, (19, 33))):
        for name in ("heavy_tailed", "with_inf_nan"):
            x = generate(name, shape, torch.bfloat16)
            check(x, Scaling.of_kind(kind, E4M3), columns=Scaling.of_kind(column_kind, dtype, amax_floor=1e-3))


def test_scales_lie_as_gemms_take_them() -> None:
    x = generate("normal", (144, 160), torch.bfloat16, device=DEVICE)
    for scaling in (Scaling(), Scaling.of_kind("mx_1x32")):
        rows, columns = (q.scale for q in kernels.quantize_matrix(x, scaling, scaling))
        assert rows.stride() == (1, 144)
        assert columns.stride() == (1, 160)
        assert reference.rows(x, scaling)[1].stride() == (1, 144)


@triton.jit
def halved(inputs, first_m, first_k, m, k, is_in):
    return load_values(inputs, first_m, first_k, m, k, is_in) * 0.5


@triton.jit
def halved_in_pieces(OUT, x, stride_xm, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    emit(halved, (x, stride_xm), OUT, pid // num_tiles_k, pid % num_tiles_k, M, K, RULE, BLOCK_M, BLOCK_K)


@triton.jit
def halved_tiles(OUT, x, stride_xm, M, K, RULE: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_K: tl.constexpr):
    pid = tl.program_id(0)
    num_tiles_k = tl.cdiv(K, BLOCK_K)
    tile_m, tile_k = pid // num_tiles_k, pid % num_tiles_k
    rows = (tile_m * BLOCK_M + tl.arange(0, BLOCK_M))[:, None].to(tl.int64)
    cols = (tile_k * BLOCK_K + tl.arange(0, BLOCK_K))[None, :].to(tl.int64)
    values = tl.load(x + rows * stride_xm + cols, mask=(rows < M) & (cols < K), other=0.0).to(tl.float32)
    emit_tile(values * 0.5, OUT, tile_m, tile_k, M, K, RULE, BLOCK_M, BLOCK_K)


@pytest.mark.parametrize(("kind", "column_kind"), PAIRS)
def test_what_another_kernel_emits(kind: str, column_kind: str | None) -> None:
    columns = None if column_kind is None else Scaling.of_kind(column_kind, E5M2)
    scaling = Scaling.of_kind(kind)
    is_known = scaling.is_per_tensor and (columns is None or columns.is_per_tensor)
    for shape in ((144, 144), (19, 33)):
        x = generate("with_inf_nan", shape, torch.bfloat16)
        y, on_device = x * 0.5, x.to(DEVICE)
        for quant_scale in (None, torch.tensor(3.0)) if is_known else (None,):
            known = None if quant_scale is None else quant_scale.to(DEVICE)
            amax = None if known is None else torch.zeros(1, device=DEVICE)
            emission = kernels.Emission(
                *shape, x.dtype, on_device.device, scaling, columns,
                quant_scale=known, amax_out=amax, longest_stride=x.stride(0),
            )  # fmt: skip
            for step in emission.steps:
                halved_in_pieces[step.grid](
                    step.out, on_device, x.stride(0), *shape,
                    RULE=step.rule, BLOCK_M=step.block_m, BLOCK_K=step.block_k, num_warps=step.num_warps,
                )  # fmt: skip
            wanted = [quantize_reference(y, scaling, quant_scale)]
            found = [emission.row_codes]
            if columns is not None:
                wanted.append(quantize_reference(y.t(), columns, quant_scale))
                found.append(emission.column_codes)
            for q, right in zip(found, wanted, strict=True):
                assert_codes(q, right)
            if amax is not None:
                assert_bitwise(
                    amax, torch.maximum(torch.zeros(1), y.nan_to_num(0.0, torch.inf, -torch.inf).abs().max().float())
                )


@pytest.mark.parametrize("kind", ["per_tensor", "per_row", "block_1x128", "mx_1x32"])
def test_whole_rows_in_a_tile(kind: str) -> None:
    scaling = Scaling.of_kind(kind)
    x = generate("with_inf_nan", (18, 200), torch.bfloat16)
    quant_scale = torch.tensor(3.0) if scaling.is_per_tensor else None
    known = None if quant_scale is None else quant_scale.to(DEVICE)
    emission = kernels.Emission(18, 200, x.dtype, torch.device(DEVICE), scaling, quant_scale=known, tile=(4, 256, 4))
    (step,) = emission.steps
    halved_tiles[step.grid](
        step.out, x.to(DEVICE), 200, 18, 200,
        RULE=step.rule, BLOCK_M=step.block_m, BLOCK_K=step.block_k, num_warps=step.num_warps,
    )  # fmt: skip
    wanted = quantize_reference(x * 0.5, scaling, quant_scale)
    assert_codes(emission.row_codes, wanted)


@FP8
@pytest.mark.parametrize("known", [37.5, 1e-38, 3e38])
def test_a_known_quant_scale(known: float, dtype: torch.dtype) -> None:
    for shape in SHAPES[:2]:
        check(generate("with_inf_nan", shape), Scaling.per_tensor(dtype), torch.tensor(known))


@pytest.mark.parametrize("kind", FEW_KINDS)
@pytest.mark.parametrize("floor", [1e-4, 1.0])
def test_the_floor(kind: str, floor: float) -> None:
    check(generate("half_zero", (32, 144)) * 0.01, Scaling.of_kind(kind, amax_floor=floor))


@KINDS
def test_strides(kind: str) -> None:
    wide = generate("normal", (40, 160))
    for x in (wide[:20, 3:150], wide.t()[5:25], wide[::2, ::3], wide[:1].expand(7, 160)):
        check(x, Scaling.of_kind(kind))


@KINDS
@pytest.mark.parametrize("shape", [(0, 128), (128, 0), (0, 0), (0, 5), (5, 0)], ids=str)
def test_empty_matrices(kind: str, shape: tuple[int, int]) -> None:
    check(torch.ones(shape), Scaling.of_kind(kind))


@pytest.mark.parametrize("kind", FEW_KINDS)
def test_64_bit_offsets(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kernels, "OFFSET_LIMIT", 0)
    check(generate("heavy_tailed", (144, 160), torch.bfloat16), Scaling.of_kind(kind))


@pytest.mark.slow
@pytest.mark.skipif(not is_interpreting(), reason="the GPU's time goes to the plan that ships")
@pytest.mark.parametrize("name", sorted({name for name, _ in VARIANTS}))
def test_plans_that_the_benchmark_offers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    kinds = {"square": "block_128x128", "lines both": "per_row", "amax of lines": "per_row"}
    kinds |= {"both": "per_tensor", "amax of all": "per_tensor"}
    scaling = Scaling.of_kind(kinds.get(name, "block_1x128"))
    columns = Scaling.block_128x128() if name == "group and square" else scaling
    for plan in next(plans for (key, _), plans in VARIANTS.items() if key == name):
        monkeypatch.setitem(kernels.PLANS, name, plan)
        kernels.clear_plans()
        check(generate("with_inf_nan", (272, 288), torch.bfloat16), scaling, columns=columns)
        check(generate("heavy_tailed", (131, 133), torch.bfloat16), scaling, columns=columns)
    monkeypatch.undo()
    kernels.clear_plans()


@pytest.mark.skipif(is_interpreting(), reason="needs more than 2**31 elements")
def test_offsets_past_32_bits() -> None:
    x = torch.ones(1, 4096, device=DEVICE, dtype=torch.bfloat16).expand(600_000, 4096)
    q, _ = kernels.quantize_matrix(x, Scaling(), None)
    codes, scale = q.qdata, q.scale
    assert (codes[-1].float() == 448).all()
    assert (scale[-1] == scale[0]).all()
    _, q = kernels.quantize_matrix(x, None, Scaling())
    assert (q.qdata[-1, -4096:].float() == 448).all()
