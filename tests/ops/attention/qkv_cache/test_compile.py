"""The fused cache write compiles for Hopper without spills and moves whole words."""

import re

import pytest
import torch

from octavo.ops.attention import KVScaleTable, allocate_kv_layer
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.qkv_cache import triton as kernels
from octavo.testing.tolerances import MAX_SPILL_BYTES
from tests.ops.compiled import compile_all, launched


def write(tokens: int, heads: int, kv_heads: int, dim: int, kv: str, *, turned=None, has_norms=False) -> None:
    """Turned: of GPT-J's heads, whose pairs are neighbours."""
    known = KVScaleTable(1, "_fixed").layer(0) if "known" in kv else None
    layer = allocate_kv_layer(4, kv_heads, dim, kv.partition(",")[0], known=known)
    qkv = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    positions, table = torch.zeros(tokens, dtype=torch.int64), torch.empty(4096, (turned or dim) // 2)
    rotation = Rotation(positions, table, table.clone(), interleaved=turned is not None)
    weight = torch.empty(dim, dtype=torch.bfloat16)
    kernels.qkv_to_cache(qkv, layer, positions, rotation, HeadNorms(weight, weight, 1e-6) if has_norms else None)


@pytest.mark.parametrize("kv", ["fp8", "bf16"])
def test_neighbours_as_pairs(kv: str) -> None:
    """GPT-J-6B: 16 heads of 256, of which 64 turn."""
    (report,) = compile_all(lambda: write(128, 16, 16, 256, kv, turned=64), 1, MAX_SPILL_BYTES)
    assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx)
    assert re.search(r"st\.global[\w.:]*v[24]\.b(8|16|32|64)", report.ptx)


@pytest.mark.parametrize("has_norms", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["norms", "plain"])
@pytest.mark.parametrize("kv", ["fp8", "fp8, known scales", "bf16"])
def test_launches(kv: str, has_norms: bool) -> None:
    (report,) = compile_all(lambda: write(128, 32, 8, 128, kv, has_norms=has_norms), 1, MAX_SPILL_BYTES)
    assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx)


def test_steps_of_other_sizes_share_their_kernel() -> None:
    launched(lambda: [write(tokens, 3, 1, 64, "fp8") for tokens in (1, 16, 77)], 1)
