"""The kernel that reads the cache compiles for Hopper without spills and moves whole words."""

import re

import pytest
import torch

from octavo.ops.attention import allocate_kv_layer
from octavo.ops.attention.kv_read import triton as kernels
from tests.ops.compiled import compile_all, launched


def read(kv_heads: int, dim: int, kv: str, *sizes: int) -> None:
    layer = allocate_kv_layer(4, kv_heads, dim, kv)
    for tokens in sizes:
        kernels.read_kv(layer, torch.zeros(tokens, dtype=torch.int64), torch.bfloat16)


@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize(("kv_heads", "dim"), [(8, 128), (16, 256)])
def test_launches(kv_heads: int, dim: int, kv: str) -> None:
    (report,) = compile_all(lambda: read(kv_heads, dim, kv, 128), 1)
    assert re.search(r"ld\.global[\w.:]*v[24]\.b32", report.ptx) and "st.global.v4.b32" in report.ptx


def test_steps_of_other_sizes_share_their_kernel() -> None:
    launched(lambda: read(1, 64, "fp8", 1, 16, 77), 1)
