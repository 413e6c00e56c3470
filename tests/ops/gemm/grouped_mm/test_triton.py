"""The grouped kernels against the reference, whatever the groups: in the interpreter and on a GPU."""

import pytest
import torch
import triton
import triton.language as tl

from octavo.numerics import QuantizedTensor, Scaling, quantize_reference
from octavo.ops.gemm import grouped_mm as ops
from octavo.ops.gemm.grouped_mm import grouped_mm, library
from octavo.ops.gemm.grouped_mm import triton as kernels
from octavo.ops.gemm.grouped_mm.reference import (
    column_slice,
    gather_codes,
    groups,
    scaled_grouped_mm_columns_reference,
    scaled_grouped_mm_reference,
)
from octavo.ops.gemm.grouped_mm.triton import place_of
from octavo.ops.gemm.hp_mm import hp_mm
from octavo.ops.gemm.hp_mm import triton as hp_kernels
from octavo.ops.gemm.scaled_mm import scaled_mm_reference
from octavo.testing import assert_bitwise, assert_sqnr, generate, tolerances
from octavo.testing.interpreter import is_interpreting

pytestmark = pytest.mark.usefixtures("poisoned_outputs")
DEVICE = "cpu" if is_interpreting() else "cuda"
# Rows of each group; the last number is rows of no group. Groups of one tile, of several, of none, of one row.
GROUPS = [[16, 0, 130, 1, 64, 5], [0, 0, 70, 0], [3, 200]]
SHAPES = [(128, 256), (256, 336)] if is_interpreting() else [(128, 256), (256, 336), (1536, 2048)]
LARGE_GROUPS = [] if is_interpreting() else [[700, 300, 0, 513, 1000, 50], [512] * 16 + [0]]
PAIRS = {
    "rowwise": (Scaling.per_row(), Scaling.per_row()),
    "blockwise": (Scaling.block_1x128(), Scaling.block_128x128()),
}


def make(shape: tuple[int, int], scaling: Scaling, seed: int) -> QuantizedTensor:
    return quantize_reference(generate("normal", shape, torch.bfloat16, seed=seed, device=DEVICE), scaling)


def ends(sizes: list[int]) -> torch.Tensor:
    return torch.tensor(sizes, device=DEVICE).cumsum(0).int()


def check(got: torch.Tensor, expected: torch.Tensor, kind: str) -> None:
    if is_interpreting() and kind == "blockwise":  # whose dot sums exactly, as the reference does
        assert_bitwise(got, expected)
    elif is_interpreting():  # a rounding more: the product of the scales, which the reference takes in fp64
        assert_sqnr(got, expected, 50.0 if got.dtype == torch.bfloat16 else 130.0)
    else:
        assert_sqnr(got, expected, tolerances.GEMM_FAST_ACCUMULATION_DB)


@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_rows(pair: str, shape: tuple[int, int], sizes: list[int], out_dtype: torch.dtype) -> None:
    (num_out, width), groups = shape, sizes[:-1]
    a = make((sum(sizes), width), PAIRS[pair][0], 0)
    whole = make((len(groups) * num_out, width), PAIRS[pair][1], 1)
    assert kernels.can_multiply(a, whole, len(groups))
    out = kernels.scaled_grouped_mm(a, whole, ends(groups), out_dtype)
    expected = scaled_grouped_mm_reference(a, [whole], ends(groups), out_dtype, True, False)
    check(out[: sum(groups)], expected[: sum(groups)], pair)
    assert not out[sum(groups) :].any()


@pytest.mark.parametrize("fast_accum", [False, True], ids=["precise", "fast"])
@pytest.mark.parametrize("exact", [False, True], ids=["any", "exact"])
def test_precise_sums_are_the_librarys(exact: bool, fast_accum: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Ours are fast ones, which no call that asks for precise sums gets; exact mode has them on every side."""
    monkeypatch.setattr(library, "takes_rows", lambda *_: True)
    monkeypatch.setattr(library, "scaled_grouped_mm", lambda *_: "library")
    monkeypatch.setattr(kernels, "scaled_grouped_mm", lambda *_: "ours")
    a, whole = make((5, 128), PAIRS["rowwise"][0], 0), make((2 * 16, 128), PAIRS["rowwise"][1], 1)
    left = (a.qdata, a.scale, list(a.scaling.block_size))
    right = ([whole.qdata], [whole.scale], list(whole.scaling.block_size))
    taken = ops._scaled_cuda(*left, *right, ends([3, 2]), None, 1, torch.bfloat16, exact, fast_accum)
    assert taken == ("ours" if exact or fast_accum else "library")


@pytest.mark.parametrize("turned_group", [0, 10**6], ids=["straight", "turned"])
@pytest.mark.parametrize(
    "sizes", [[0, 0, 0, 200], [70, 0, 129, 0], [1, 1, 1, 300], [64, 64, 128, 64], [0, 2, 0, 0], [0, 1, 0, 2]], ids=str
)
def test_rows_of_no_group_are_cleared(sizes, turned_group, monkeypatch):
    """Every one, wherever tiles end, in memory that held something else."""
    monkeypatch.setattr(kernels, "TURNED_GROUP", turned_group)
    groups = sizes[:-1]
    a, whole = make((sum(sizes), 128), Scaling.per_row(), 0), make((3 * 136, 128), Scaling.per_row(), 1)
    out = kernels.scaled_grouped_mm(a, whole, ends(groups), torch.bfloat16)
    assert not out[: sum(groups)].isnan().any()
    assert not out[sum(groups) :].any()
    wide = torch.full((sum(sizes), 136), torch.nan, device=DEVICE)
    cleared = kernels.clear_tail(wide[:, :120], ends(groups))
    assert cleared[: sum(groups)].isnan().all()
    assert not cleared[sum(groups) :].any()
    assert wide[:, 120:].isnan().all()


@pytest.mark.parametrize("pair", PAIRS)
def test_a_row_does_not_see_its_neighbours(pair: str) -> None:
    a, whole = make((300, 256), PAIRS[pair][0], 0), make((3 * 128, 256), PAIRS[pair][1], 1)
    together = kernels.scaled_grouped_mm(a, whole, ends([10, 150, 140]), torch.bfloat16)
    for row, group in ((0, 0), (9, 0), (10, 1), (159, 1), (160, 2), (299, 2)):
        alone = QuantizedTensor(a.qdata[row : row + 1], a.scale[row : row + 1], a.scaling)
        sizes = [int(group == index) for index in range(3)]
        assert_bitwise(kernels.scaled_grouped_mm(alone, whole, ends(sizes), torch.bfloat16)[0], together[row])


@pytest.mark.parametrize(
    "shape", [(136, 336)] if is_interpreting() else [(1536, 2048), (2048, 768), (1536, 336)], ids=str
)
@pytest.mark.parametrize("sizes", [[0, 200, 1, 128, 70], [3, 31, 32, 33, 0, 65, 1], [1] * 9 + [0] * 40], ids=str)
@pytest.mark.parametrize("pair", PAIRS)
def test_turned_tiles_have_the_bits_of_the_others(pair, sizes, shape, monkeypatch):
    """A sampler takes the ones, a trainer the others: exact mode rests on this."""
    num_out, width = (shape[0] + 127) // 128 * 128 if pair == "blockwise" else shape[0], shape[1]
    a = make((sum(sizes) + 30, width), PAIRS[pair][0], 0)
    whole = make((len(sizes) * num_out, width), PAIRS[pair][1], 1)
    found = []
    for rows in (0, 10**6):
        monkeypatch.setattr(kernels, "TURNED_GROUP", rows)
        found.append(kernels.scaled_grouped_mm(a, whole, ends(sizes), torch.float32))
    assert found[0].any()
    assert_bitwise(*found)


@pytest.mark.parametrize("num_rows", [1, 5, 6, 7, 40, 129])
@pytest.mark.parametrize("block_m", [16, 64])
def test_every_row_has_one_tile(block_m, num_rows):
    """Whatever the groups, those of few rows and the rows of no group too; a row that two tiles write is a race."""
    generator = torch.Generator().manual_seed(num_rows)
    for num_groups in (1, 3, 6, 40):
        for _ in range(4):
            cuts = torch.randint(num_rows + 1, (num_groups,), generator=generator).sort().values.to(torch.int32)
            tiles = kernels.num_tiles(num_rows, num_groups, block_m)
            owners = torch.full((num_rows,), -1, dtype=torch.int32, device=DEVICE)
            writes = torch.zeros(num_rows, dtype=torch.int32, device=DEVICE)
            _own_rows[(tiles,)](owners, writes, cuts.to(DEVICE), num_rows, num_groups, GROUPS=64, BLOCK_M=block_m)
            wanted = torch.searchsorted(cuts, torch.arange(num_rows, dtype=torch.int32), right=True)
            assert owners.tolist() == wanted.tolist()
            assert writes.tolist() == [1] * num_rows


@triton.jit(do_not_specialize=("R", "E"))
def _own_rows(owners, writes, offsets, R, E, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr):
    """Note each tile's group at its rows."""
    group, first, end = place_of(offsets, tl.program_id(0), R, E, GROUPS, BLOCK_M)
    rows = first + tl.arange(0, BLOCK_M)
    tl.store(owners + rows, group, mask=rows < end)
    tl.atomic_add(writes + rows, 1, mask=rows < end)


@pytest.mark.parametrize("turned_group", [0, 10**6], ids=["straight", "turned"])
@pytest.mark.parametrize("pair", PAIRS)
def test_gathered_rows_have_the_bits_of_copied_ones(pair, turned_group, monkeypatch):
    """Of three slots a row, sorted by group; some rows are of no group."""
    monkeypatch.setattr(kernels, "TURNED_GROUP", turned_group)
    sizes = [70, 0, 1, 65, 33, 131]
    a, whole = make((100, 336), PAIRS[pair][0], 0), make((5 * 256, 336), PAIRS[pair][1], 1)
    slots = torch.randperm(300, generator=torch.Generator().manual_seed(0)).to(DEVICE)
    copied = gather_codes(a, slots, 3)
    assert_bitwise(copied.dequantize(), a.dequantize()[slots // 3])
    found = kernels.scaled_grouped_mm(a, whole, ends(sizes[:-1]), torch.bfloat16, slots, 3)
    assert_bitwise(found, kernels.scaled_grouped_mm(copied, whole, ends(sizes[:-1]), torch.bfloat16))
    assert found[: sum(sizes[:-1])].any() and not found[sum(sizes[:-1]) :].any()


@pytest.mark.parametrize("is_gathered", [False, True], ids=["copied", "gathered"])
@pytest.mark.parametrize("width", [336] if is_interpreting() else [336, 768, 2048])
@pytest.mark.parametrize(
    "sizes", [[0, 65, 1, 128, 64, 40], [130, 0, 0, 200, 0], [129, 33, 0], [0, 0, 200], *LARGE_GROUPS], ids=str
)
@pytest.mark.parametrize("pair", PAIRS)
def test_pairs_of_tiles_have_the_bits_of_single_ones(pair, sizes, width, is_gathered, monkeypatch):
    """Whichever of two tiles has rows, in memory that held something else: exact mode rests on this."""
    num_out, rows, groups = 256 if pair == "blockwise" else 136, sum(sizes), len(sizes) - 1
    a = make((100 if is_gathered else rows, width), PAIRS[pair][0], 0)
    whole = make((groups * num_out, width), PAIRS[pair][1], 1)
    slots = torch.arange(rows, device=DEVICE).flip(0) * 3 % 300 if is_gathered else None
    found = []
    for many in (10**6, 0):
        monkeypatch.setattr(kernels, "MANY_ROWS", many)
        assert kernels.takes_pairs(a, whole, rows, groups) == (many == 0)
        found.append(kernels.scaled_grouped_mm(a, whole, ends(sizes[:-1]), torch.float32, slots, 3))
    assert found[0][: sum(sizes[:-1])].any() or not sum(sizes[:-1])
    assert not found[1].isnan().any()
    assert_bitwise(*found)


def test_codes_that_the_memory_unit_cannot_fetch_go_to_single_tiles() -> None:
    a, whole = make((256, 128), Scaling.per_row(), 0), make((128, 128), Scaling.per_row(), 1)
    shifted = torch.empty(256 * 128 + 8, dtype=torch.uint8, device=DEVICE)[8:].view(a.qdata.dtype).view(256, 128)
    assert kernels.takes_pairs(a, whole, 256, 1) and not kernels.takes_pairs(a, whole, 256, 3)
    assert not kernels.takes_pairs(QuantizedTensor(shifted, a.scale, a.scaling), whole, 256, 1)


@pytest.mark.parametrize("square", [True, False], ids=["128x128", "1x128"])
@pytest.mark.parametrize("sizes", [[128, 0, 256], [0, 128, 0]], ids=str)
def test_columns(sizes: list[int], square: bool) -> None:
    rows = sum(sizes) + 128  # some of no group
    a = make((200, rows), Scaling.block_1x128(), 0)
    b = make((344, rows), Scaling.block_128x128() if square else Scaling.block_1x128(), 1)
    assert kernels.can_multiply_columns(a, b)
    out = kernels.scaled_grouped_mm_columns(a, b, ends(sizes), torch.float32)
    expected = scaled_grouped_mm_columns_exact(a, b, ends(sizes))
    check(out, expected, "blockwise")


def scaled_grouped_mm_columns_exact(a: QuantizedTensor, b: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """The reference's groups by the exact product, which on a CPU the other one is not."""
    out = torch.zeros(offsets.shape[0], a.shape[0], b.shape[0], device=a.device)
    for index, columns in groups(offsets):
        out[index] = scaled_mm_reference(column_slice(a, columns), column_slice(b, columns), None, torch.float32)
    library = scaled_grouped_mm_columns_reference(a, b, offsets, torch.float32, False)
    assert_sqnr(library, out, tolerances.GEMM_ACROSS_DEVICES_DB)
    return out


HP_SHAPES = [(128, 256), (72, 100)] + ([] if is_interpreting() else [(1536, 2048), (2048, 768)])


def make_hp(num_rows: int, num_groups: int, shape: tuple[int, int], dtype: torch.dtype) -> tuple[torch.Tensor, ...]:
    x = generate("normal", (num_rows, shape[1]), dtype, seed=0, device=DEVICE)
    return x, generate("normal", (num_groups * shape[0], shape[1]), dtype, seed=1, device=DEVICE).view(-1, *shape)


@pytest.mark.parametrize("rows_of_a_large_group", [1, 10**6], ids=["large", "small"])
@pytest.mark.parametrize("out_dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("sizes", GROUPS, ids=str)
@pytest.mark.parametrize("shape", HP_SHAPES, ids=str)
def test_exact_rows_are_those_of_the_exact_gemm(shape, sizes, out_dtype, rows_of_a_large_group, monkeypatch):
    """Bit for bit, whichever tiles either takes, in memory that held something else."""
    monkeypatch.setattr(kernels, "LARGE_GROUP", rows_of_a_large_group)
    x, weights = make_hp(sum(sizes), len(sizes) - 1, shape, torch.bfloat16)
    offsets = ends(sizes[:-1])
    out = kernels.grouped_mm_exact(x, weights, offsets, out_dtype)
    wanted = torch.zeros_like(out)
    for index, rows in groups(offsets):
        wanted[rows] = hp_kernels.hp_mm_exact(x[rows], weights[index], None, out_dtype)
    assert_bitwise(out, wanted)
    assert wanted.any()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16], ids=["bf16", "fp16"])
def test_exact_strides(dtype: torch.dtype) -> None:
    x, weights = make_hp(40, 3, (48, 96), dtype)
    offsets = ends([7, 20, 10])
    assert kernels.can_multiply_hp(x, weights)
    assert not kernels.can_multiply_hp(x.float(), weights.float())
    assert not kernels.can_multiply_hp(x[:0], weights)
    wanted = kernels.grouped_mm_exact(x, weights, offsets, torch.float32)
    wide = torch.cat((x, x), dim=1)[:, :96]
    turned = weights.transpose(1, 2).contiguous().transpose(1, 2)
    assert_bitwise(kernels.grouped_mm_exact(wide, turned, offsets, torch.float32), wanted)


@pytest.mark.skipif(is_interpreting(), reason="the dispatch asks for a GPU")
def test_exact_bf16_waits_for_nothing() -> None:
    x, weights = make_hp(300, 4, (384, 256), torch.bfloat16)
    offsets = ends([100, 0, 60, 130])
    grouped_mm(x, weights, offsets, exact=True)
    torch.cuda.set_sync_debug_mode("error")
    try:
        out = grouped_mm(x, weights, offsets, exact=True)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    wanted = [hp_mm(x[rows], weights[index], exact=True) for index, rows in groups(offsets)]
    assert_bitwise(out[:290], torch.cat(wanted))
    assert not out[290:].any()
