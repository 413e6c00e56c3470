"""The fused cache write compiles for Hopper without spills and moves whole words."""

import re

import pytest
import torch

from octavo.ops.attention import KVScaleTable, allocate_kv_layer
from octavo.ops.attention.qkv_cache import HeadNorms, Rotation
from octavo.ops.attention.qkv_cache import triton as kernels
from tests.ops.compiled import compiled, record_launches


@pytest.mark.parametrize("kv", ["fp8", "bf16"])
def test_neighbours_as_pairs(kv: str) -> None:
    """GPT-J-6B: 16 heads of 256, of which 64 turn."""
    qkv = torch.empty(128, 3 * 16 * 256, dtype=torch.bfloat16)
    positions = torch.zeros(128, dtype=torch.int64)
    rotation = Rotation(positions, torch.empty(2048, 32), torch.empty(2048, 32), interleaved=True)
    with record_launches() as found:
        kernels.qkv_to_cache(qkv, allocate_kv_layer(4, 16, 256, kv), positions, rotation, None)
    (launch,) = found
    report = compiled(launch)
    assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), launch
    assert re.search(r"st\.global[\w.:]*v[24]\.b(8|16|32|64)", report.ptx), launch


@pytest.mark.parametrize("has_norms", [True, pytest.param(False, marks=pytest.mark.slow)], ids=["norms", "plain"])
@pytest.mark.parametrize("kv", ["fp8", "fp8, known scales", "bf16"])
def test_launches(kv: str, has_norms: bool) -> None:
    heads, kv_heads, dim = 32, 8, 128
    known = KVScaleTable(1, "_fixed").layer(0) if "known" in kv else None
    layer = allocate_kv_layer(4, kv_heads, dim, kv.partition(",")[0], known=known)
    qkv = torch.empty(128, (heads + 2 * kv_heads) * dim, dtype=torch.bfloat16)
    positions = torch.zeros(128, dtype=torch.int64)
    rotation = Rotation(positions, torch.empty(4096, dim // 2), torch.empty(4096, dim // 2))
    weight = torch.empty(dim, dtype=torch.bfloat16)
    norms = HeadNorms(weight, weight, 1e-6) if has_norms else None
    with record_launches() as found:
        kernels.qkv_to_cache(qkv, layer, positions, rotation, norms)
    (launch,) = found
    report = compiled(launch)
    assert re.search(r"ld\.global[\w.:]*v4\.b32", report.ptx), launch


def test_steps_of_other_sizes_share_their_kernel() -> None:
    layer, table = allocate_kv_layer(4, 1, 64, "fp8"), torch.empty(128, 32)
    with record_launches() as found:
        for tokens in (1, 16, 77):
            positions = torch.zeros(tokens, dtype=torch.int64)
            qkv = torch.empty(tokens, 5 * 64, dtype=torch.bfloat16)
            kernels.qkv_to_cache(qkv, layer, positions, Rotation(positions, table, table), None)
    assert len(found) == 1
