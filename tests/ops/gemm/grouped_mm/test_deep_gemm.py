"""The road through DeepGEMM, with a stand-in for the package that checks what the real one asks of its arguments."""

import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from octavo.errors import ConfigError
from octavo.nn import GroupedLinear, convert
from octavo.numerics import QuantizedTensor, Scaling
from octavo.ops.gemm import grouped_mm as op
from octavo.ops.gemm.grouped_mm import deep_gemm
from octavo.ops.gemm.grouped_mm.reference import scaled_grouped_mm_reference
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise, assert_sqnr
from octavo.testing.tolerances import GEMM_FAST_ACCUMULATION_DB

CPU = torch.device("cpu")
TILE_ROWS = 128
E, N, K = 3, 256, 384
SIZES = [[130, 0, 300], [128, 128, 128], [0, 0, 384], [1, 2, 3]]


class StandIn(ModuleType):
    """deep_gemm 2.6.1 on an SM90, as far as octavo calls it. calls: of its product. factor: what it gets wrong."""

    __version__ = "2.6.1"

    def __init__(self) -> None:
        super().__init__(deep_gemm.PACKAGE)
        self.calls, self.factor = 0, 1.0

    def get_mk_alignment_for_contiguous_layout(self) -> int:
        return TILE_ROWS

    def m_grouped_fp8_gemm_nt_contiguous(self, a, b, d, grouped_layout, *, disable_ue8m0_cast=False):
        (codes, scales), (weights, weight_scales) = a, b
        P, width = codes.shape
        groups, num_out, _ = weights.shape
        assert codes.dtype == weights.dtype == torch.float8_e4m3fn and d.dtype == torch.bfloat16
        assert codes.is_contiguous() and weights.is_contiguous()  # K-major, as SM90 takes nothing else
        assert scales.dtype == weight_scales.dtype == torch.float32
        assert scales.shape == (P, width // 128) and weight_scales.shape == (groups, num_out // 128, width // 128)
        aligned = (P + 3) // 4 * 4  # 16 bytes of fp32; in these strides the package copies no scales
        assert scales.stride() == (1, aligned) and weight_scales.is_contiguous()
        assert d.shape == (P, num_out) and d.stride(1) == 1 and disable_ue8m0_cast
        assert grouped_layout.shape == (P,) and grouped_layout.dtype == torch.int32 and grouped_layout.is_contiguous()
        assert P % TILE_ROWS == 0
        self.calls += 1
        d.fill_(float("nan"))  # what the package does not compute, nobody may read
        for first in range(0, P, TILE_ROWS):
            tile = grouped_layout[first : first + TILE_ROWS]
            group = int(tile[0])
            assert set(tile.tolist()) <= {group, -1}, "a tile is of one group, whose rows come first"
            rows = slice(first, first + int((tile >= 0).sum()))
            left = QuantizedTensor(codes[rows], scales[rows], Scaling.block_1x128())
            right = QuantizedTensor(weights[group], weight_scales[group], Scaling.block_128x128())
            if rows.stop > rows.start:
                d[rows] = scaled_mm(left, right, exact=True) * self.factor


@pytest.fixture
def package(monkeypatch):
    """The stand-in, importable, on a machine that passes for one with a Hopper GPU."""
    stand_in = StandIn()
    stand_in.__spec__ = type(sys.__spec__)(deep_gemm.PACKAGE, None)
    monkeypatch.setitem(sys.modules, deep_gemm.PACKAGE, stand_in)
    monkeypatch.setattr(deep_gemm, "is_hopper", lambda device: True)
    monkeypatch.setattr(deep_gemm, "_verdicts", {})
    deep_gemm._import_package.cache_clear()
    yield stand_in
    deep_gemm._import_package.cache_clear()


def operands(generator, sizes, tail=0):
    x = torch.randn(sum(sizes) + tail, K, generator=generator).bfloat16()
    weights = torch.randn(E * N, K, generator=generator).bfloat16()
    offsets = torch.tensor(sizes).cumsum(0).int()
    return quantize(x, Scaling.block_1x128()), quantize(weights, Scaling.block_128x128()), offsets


def on_gpu(a, whole, offsets, out_dtype=torch.bfloat16, exact=False):
    """The op's GPU side, on the CPU's tensors."""
    parts = (a.qdata, a.scale, a.scaling.block_size, [whole.qdata], [whole.scale], whole.scaling.block_size)
    return op._scaled_cuda(*parts, offsets, out_dtype, exact, False)


@pytest.mark.parametrize("tail", [0, 77], ids="tail{}".format)
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_every_group_gets_its_own_product(package, sizes, tail, generator):
    a, whole, offsets = operands(generator, sizes, tail)
    out = deep_gemm.scaled_grouped_mm(a, whole, offsets)
    assert_bitwise(out, scaled_grouped_mm_reference(a, [whole], offsets, torch.bfloat16, True, False))
    assert package.calls == 1


@pytest.mark.parametrize("tile_rows", [64, 128])
@pytest.mark.parametrize("sizes", SIZES, ids=str)
def test_padding_keeps_every_row_once(sizes, tile_rows):
    offsets, num_rows = torch.tensor(sizes).cumsum(0).int(), sum(sizes) + 5
    padded = deep_gemm.pad_groups(offsets, num_rows, tile_rows)
    assert padded.source.shape[0] % tile_rows == 0
    owned = padded.group >= 0
    assert sorted(padded.source[owned].tolist()) == list(range(sum(sizes)))
    rows = torch.arange(sum(sizes))
    assert torch.equal(padded.source[padded.place[: sum(sizes)]], rows)
    assert torch.equal(padded.group[padded.place[: sum(sizes)]].long(), torch.bucketize(rows, offsets, right=True))
    assert (padded.place[sum(sizes) :] == padded.source.shape[0]).all()


def test_the_op_takes_the_road_for_large_groups_alone(package, generator):
    large = operands(generator, [130, 0, 300])
    on_gpu(*large)
    assert package.calls == 2, "the check of its first product, then this one"
    assert not deep_gemm.takes(*operands(generator, [1, 2, 3])[:2], E, torch.bfloat16)
    assert not deep_gemm.takes(*large[:2], E, torch.float32)
    per_row = quantize(large[0].dequantize(torch.bfloat16), Scaling.per_row())
    assert not deep_gemm.takes(per_row, large[1], E, torch.bfloat16)
    e5m2 = quantize(large[0].dequantize(torch.bfloat16), Scaling(torch.float8_e5m2, (1, 128)))
    assert not deep_gemm.takes(e5m2, large[1], E, torch.bfloat16)


def test_exact_mode_never_takes_it(package, generator, monkeypatch):
    monkeypatch.setattr(deep_gemm, "takes", lambda *_: pytest.fail("exact mode asked for DeepGEMM"))
    a, whole, offsets = operands(generator, [130, 0, 300])
    pytest.importorskip("triton", reason="the GPU side's own kernel")
    from octavo.ops.gemm.grouped_mm import triton

    monkeypatch.setattr(triton, "can_multiply", lambda *_: False)
    out = on_gpu(a, whole, offsets, exact=True)
    assert_bitwise(out, scaled_grouped_mm_reference(a, [whole], offsets, torch.bfloat16, True, False))


def test_no_cuda_graph_is_captured_with_it(package, generator, monkeypatch):
    a, whole, _ = operands(generator, [130, 0, 300])
    assert deep_gemm.takes(a, whole, E, torch.bfloat16)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "is_current_stream_capturing", lambda: True)
    assert not deep_gemm.takes(a, whole, E, torch.bfloat16)


def test_the_switch_turns_it_off(package, generator, monkeypatch):
    a, whole, _ = operands(generator, [130, 0, 300])
    assert deep_gemm.takes(a, whole, E, torch.bfloat16)
    monkeypatch.setenv("OCTAVO_DEEP_GEMM", "0")
    assert not deep_gemm.takes(a, whole, E, torch.bfloat16)
    assert deep_gemm.road(CPU).text == "DeepGEMM is off (OCTAVO_DEEP_GEMM=0)"
    monkeypatch.setenv("OCTAVO_DEEP_GEMM", "perhaps")
    with pytest.raises(ConfigError, match="OCTAVO_DEEP_GEMM must be one of"):
        deep_gemm.road(CPU)


def test_only_a_hopper_takes_it(package, monkeypatch):
    monkeypatch.undo()
    assert deep_gemm.road(CPU).package is None
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (10, 0))
    assert not deep_gemm.is_hopper(torch.device("cuda", 0)), "later cards round the scales to powers of two"
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda device: (9, 0))
    assert deep_gemm.is_hopper(torch.device("cuda", 0))


def test_a_package_with_other_numbers_is_refused_once_and_loudly(package, generator):
    package.factor = 1.02
    a, whole, _ = operands(generator, [130, 0, 300])
    with pytest.warns(UserWarning, match="first product is 34 dB from the reference, at least 46 are due; grouped"):
        assert not deep_gemm.takes(a, whole, E, torch.bfloat16)
    assert not deep_gemm.takes(a, whole, E, torch.bfloat16)  # a second warning would be an error
    assert package.calls == 1


def test_a_package_that_raises_is_refused(package, generator, monkeypatch):
    def broken(*_, **__):
        raise RuntimeError("Assertion error (csrc): nvcc")

    monkeypatch.setattr(package, deep_gemm.PRODUCT, broken)
    a, whole, _ = operands(generator, [130, 0, 300])
    with pytest.warns(UserWarning, match=r"first product failed \(RuntimeError: Assertion error \(csrc\): nvcc\)"):
        assert not deep_gemm.takes(a, whole, E, torch.bfloat16)


def test_a_version_without_the_function_is_refused(package, monkeypatch):
    monkeypatch.setattr(package, deep_gemm.PRODUCT, None)
    with pytest.warns(UserWarning, match=f"DeepGEMM 2.6.1 has no {deep_gemm.PRODUCT}"):
        assert deep_gemm.road(CPU).package is None
    assert deep_gemm.road(CPU).package is None


def test_the_conversion_report_names_it(package):
    model = torch.nn.ModuleDict({"experts": GroupedLinear(K, N, E)})
    [row] = convert(model, "blockwise", skip=()).rows
    assert row.reason == "octavo.nn.GroupedLinear, DeepGEMM 2.6.1 from 128 rows a group on"
    for recipe, exact in (("blockwise", True), ("rowwise", False), ("bf16", False)):
        assert "DeepGEMM" not in convert(model, recipe, skip=(), exact=exact).rows[0].reason


@pytest.mark.gpu
@pytest.mark.skipif(importlib.util.find_spec(deep_gemm.PACKAGE) is None, reason="DeepGEMM is not installed")
def test_the_real_package_agrees_with_the_reference(generator):
    a, whole, offsets = (x.to("cuda") for x in operands(generator, [130, 0, 300], tail=77))
    assert deep_gemm.takes(a, whole, E, torch.bfloat16)
    out = deep_gemm.scaled_grouped_mm(a, whole, offsets)
    expected = scaled_grouped_mm_reference(a, [whole], offsets, torch.bfloat16, False, False)
    assert_sqnr(out, expected, GEMM_FAST_ACCUMULATION_DB)
    assert not out[-77:].any()


def test_without_the_package_nothing_is_said(monkeypatch):
    monkeypatch.setattr(deep_gemm, "is_hopper", lambda device: True)
    monkeypatch.setitem(sys.modules, deep_gemm.PACKAGE, None)
    deep_gemm._import_package.cache_clear()
    monkeypatch.setattr(deep_gemm.importlib.util, "find_spec", lambda name: None)
    assert deep_gemm.road(CPU) == deep_gemm.Road(None, "DeepGEMM is not installed")
    deep_gemm._import_package.cache_clear()
