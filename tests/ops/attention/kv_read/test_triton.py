"""The kernel that reads the cache against the reference, bit for bit: in the interpreter and on a GPU."""

import pytest
import torch

from octavo.ops.attention import PAGE_SIZE, allocate_kv_layer, write_kv
from octavo.ops.attention.kv_read import read_kv_reference
from octavo.ops.attention.kv_read import triton as kernels
from octavo.testing import assert_bitwise, generate
from octavo.testing.interpreter import is_interpreting

DEVICE = "cpu" if is_interpreting() else "cuda"
CASES = [(5, 2, 32), (90, 3, 64), (7, 16, 256)] + ([] if is_interpreting() else [(4099, 8, 128)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize(("tokens", "kv_heads", "dim"), CASES)
def test_rows(tokens: int, kv_heads: int, dim: int, kv: str, dtype: torch.dtype) -> None:
    pages = -(-tokens // PAGE_SIZE) + 1
    layer = allocate_kv_layer(pages, kv_heads, dim, kv, device=DEVICE)
    slots = torch.randperm(pages * PAGE_SIZE, generator=torch.Generator().manual_seed(0))[:tokens].to(DEVICE)
    k, v = (generate("normal", (tokens, kv_heads * dim), torch.bfloat16, seed=s, device=DEVICE) for s in (0, 1))
    write_kv(layer, k.view(tokens, kv_heads, dim), v.view(tokens, kv_heads, dim), slots)
    assert kernels.can_run(layer)
    for some in (slots, slots.flip(0), slots[:1]):
        found, expected = kernels.read_kv(layer, some, dtype), read_kv_reference(layer, some, dtype)
        for ours, theirs in zip(found, expected, strict=True):
            assert_bitwise(ours, theirs)
            assert ours.any()


def test_odd_heads_are_left_to_the_reference() -> None:
    assert not kernels.can_run(allocate_kv_layer(1, 2, 80, "fp8", device=DEVICE))
