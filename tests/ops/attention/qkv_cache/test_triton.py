"""The fused kernel writes and returns, bit for bit, what the separate ops do."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import Scaling, quantize_reference
from octavo.ops.attention import PAGE_SIZE, KVScaleTable, allocate_kv_layer
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation, qkv_to_cache, qkv_to_cache_reference, reference
from octavo.ops.attention.qkv_cache import triton as kernels
from octavo.ops.attention.rope import rope_tables
from octavo.ops.norm import triton as norm
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
CASES = [(5, 4, 2, 32), (3, 6, 1, 64), (2, 2, 2, 256)] + ([] if is_interpreting() else [(777, 32, 8, 128)])


def make(tokens: int, heads: int, kv_heads: int, dim: int, name: str = "normal"):
    qkv = generate(name, (tokens, (heads + 2 * kv_heads) * dim), torch.bfloat16, device=DEVICE)
    cos, sin = (t.to(DEVICE) for t in rope_tables(dim, 2048, 10_000.0))
    positions = (torch.arange(tokens, device=DEVICE) * 37) % 2048
    slots = torch.randperm(tokens + 7, generator=torch.Generator().manual_seed(1))[:tokens].to(DEVICE)
    weights = [1.0 + 0.1 * generate("normal", (dim,), torch.bfloat16, seed=s, device=DEVICE) for s in (3, 4)]
    return qkv, slots, Rotation(positions, cos, sin), HeadNorms(weights[0], weights[1], 1e-6)


@pytest.fixture(autouse=True)
def norms_of_the_same_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    """In the interpreter the separate norm is the Triton one too, as it is on a GPU."""
    if is_interpreting():
        monkeypatch.setattr(reference, "rms_norm", triton_norm)


def triton_norm(x: torch.Tensor, weight: torch.Tensor, *, eps: float, exact: bool) -> torch.Tensor:
    return norm.norm_forward(x, weight, None, None, eps, "rms_norm", False)[0]


@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize(("tokens", "heads", "kv_heads", "dim"), CASES)
def test_fused_equals_separate(tokens: int, heads: int, kv_heads: int, dim: int, kv: str, has_norms: bool) -> None:
    qkv, slots, rotation, norms = make(tokens, heads, kv_heads, dim)
    slots[1] = -1  # fills up a batch
    found, wanted = (allocate_kv_layer(-(-(tokens + 7) // PAGE_SIZE), kv_heads, dim, kv, device=DEVICE) for _ in "ab")
    q = kernels.qkv_to_cache(qkv, found, slots, rotation, norms if has_norms else None)
    expected = qkv_to_cache_reference(qkv, wanted, slots, rotation, norms if has_norms else None)
    assert_bitwise(q, expected, "queries")
    for name in ("k", "v", "k_scale", "v_scale"):
        if getattr(wanted, name) is not None:
            assert_bitwise(getattr(found, name), getattr(wanted, name), name)
    assert wanted.k.float().abs().sum() > 0


@pytest.mark.parametrize("name", ["normal", "with_inf_nan", "near_tiny"])
@pytest.mark.parametrize("has_norms", [True, False], ids=["norms", "plain"])
def test_known_scales(has_norms: bool, name: str) -> None:
    """One scale of K and one of V: codes, scales and what is counted are the separate ops', clipped and flushed too."""
    qkv, slots, rotation, norms = make(5, 4, 2, 32, name)
    slots[1] = -1
    tables = [KVScaleTable(2, "trainer", DEVICE) for _ in "ab"]
    for table in tables:
        table.set({1: (torch.tensor(0.002), torch.tensor(3000.0))}, 0)  # K's clips, V's flushes
    found, wanted = (allocate_kv_layer(1, 2, 32, "fp8", device=DEVICE, known=table.layer(1)) for table in tables)
    assert kernels.can_fuse(qkv, found, rotation)
    q = kernels.qkv_to_cache(qkv, found, slots, rotation, norms if has_norms else None)
    expected = qkv_to_cache_reference(qkv, wanted, slots, rotation, norms if has_norms else None)
    if name != "with_inf_nan":  # queries keep NaN as they find it, each with a payload of its own
        assert_bitwise(q, expected, "queries")
    for part in ("k", "v", "k_scale", "v_scale"):
        assert_bitwise(getattr(found, part), getattr(wanted, part), part)
    assert tables[0].counts.tolist() == tables[1].counts.tolist()
    if name == "normal":
        (k_clipped, k_flushed), (v_clipped, v_flushed) = tables[0].counts[1].tolist()
        assert k_clipped > 0 and v_clipped == 0 and k_flushed == 0 and v_flushed > 0
    assert not tables[0].counts[0].any()


@pytest.mark.parametrize("name", ["normal", "near_tiny", "negative_zeros"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize(("dim", "turned"), [(32, 16), (64, 64), (256, 64)], ids=str)
def test_neighbours_as_pairs(dim: int, turned: int, kv: str, name: str) -> None:
    """GPT-J: pairs (2i, 2i + 1), and heads of which only a part turns; the rest keeps its bits, zeros' signs too."""
    is_zero = name == "negative_zeros"
    qkv, slots, rotation, norms = make(5, 4, 4, dim, "zeros" if is_zero else name)
    qkv = -qkv if is_zero else qkv
    slots[3] = -1
    cos, sin = (table.to(DEVICE) for table in rope_tables(turned, 2048, 10_000.0))
    rotation = Rotation(rotation.positions, cos, sin, interleaved=True)
    found, wanted = (allocate_kv_layer(1, 4, dim, kv, device=DEVICE) for _ in "ab")
    assert kernels.can_fuse(qkv, found, rotation)
    for some in (None, norms):
        q = kernels.qkv_to_cache(qkv, found, slots, rotation, some)
        assert_bitwise(q, qkv_to_cache_reference(qkv, wanted, slots, rotation, some), "queries")
        for part in ("k", "v", "k_scale", "v_scale"):
            if getattr(wanted, part) is not None:
                assert_bitwise(getattr(found, part), getattr(wanted, part), part)


@pytest.mark.parametrize("name", ["with_inf_nan", "zeros", "near_tiny"])
def test_inputs(name: str) -> None:
    qkv, slots, rotation, _ = make(4, 4, 2, 32, name)
    layer = allocate_kv_layer(1, 2, 32, "fp8", device=DEVICE)
    kernels.qkv_to_cache(qkv, layer, slots, rotation, None)
    v = qkv.view(4, 8, 32)[:, 6:].reshape(8, 32).cpu()
    expected = quantize_reference(v, Scaling.per_row())
    assert layer.v_scale is not None
    codes = layer.v.view(torch.uint8)[0, :, slots].transpose(0, 1).reshape(8, 32).view(layer.v.dtype)
    assert_bitwise(codes, expected.qdata)
    assert_bitwise(layer.v_scale[0, :, slots].t().reshape(8, 1), expected.scale)


def test_other_widths_are_refused() -> None:
    _, slots, rotation, _ = make(4, 4, 2, 32)
    with pytest.raises(ShapeError, match=r"qkv must be \[T, \(H \+ 2 \* 2\) \* 32\]"):
        qkv_to_cache(torch.zeros(4, 128, device=DEVICE), allocate_kv_layer(1, 2, 32, "fp8"), slots, rotation)
