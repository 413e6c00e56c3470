"""Reading the cache gives back what was written, as the cache rounds it."""

import pytest
import torch

from octavo.errors import ShapeError
from octavo.ops.attention import PAGE_SIZE, allocate_kv_layer, quantize_kv, write_kv
from octavo.ops.attention.kv_read import read_kv, read_kv_reference
from octavo.testing import assert_bitwise
from tests.assertions import assert_all_bitwise


@pytest.mark.parametrize("dim", [64, 80])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
def test_what_was_written(kv: str, dim: int, device: torch.device, generator: torch.Generator) -> None:
    layer = allocate_kv_layer(3, 2, dim, kv, device=device)
    slots = torch.randperm(3 * PAGE_SIZE, generator=generator)[:90].to(device)
    k, v = (torch.randn(90, 2, dim, generator=generator).to(device, torch.bfloat16) for _ in range(2))
    write_kv(layer, k, v, slots)
    for found, source in zip(read_kv(layer, slots, torch.bfloat16), (k, v), strict=True):
        codes, scale = quantize_kv(source)
        rounded = (codes.float() * scale[..., None]).bfloat16()
        assert_bitwise(found, rounded if kv == "fp8" else source)
    wide, expected = (read(layer, slots, torch.float32) for read in (read_kv, read_kv_reference))
    assert_all_bitwise(wide, expected)


def test_no_tokens_and_wrong_shapes(device: torch.device) -> None:
    layer = allocate_kv_layer(1, 2, 64, "fp8", device=device)
    k, v = read_kv(layer, torch.zeros(0, dtype=torch.int64, device=device), torch.bfloat16)
    assert k.shape == v.shape == (0, 2, 64)
    with pytest.raises(ShapeError, match=r"slot_mapping must be \[T\]"):
        read_kv(layer, torch.zeros(1, 2, dtype=torch.int64, device=device), torch.bfloat16)
