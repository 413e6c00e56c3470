"""Ground truth of reading the cache: pick, decode, round. Device-free torch, which waits for no device."""

import torch

from octavo.ops.attention import PAGE_SIZE, PagedKVLayer


def read_kv_reference(
    layer: PagedKVLayer, slot_mapping: torch.Tensor, dtype: torch.dtype
) -> tuple[torch.Tensor, torch.Tensor]:
    """As octavo.ops.attention.kv_read.read_kv."""
    page, offset = slot_mapping // PAGE_SIZE, slot_mapping % PAGE_SIZE
    return _pick(layer.k, layer.k_scale, page, offset, dtype), _pick(layer.v, layer.v_scale, page, offset, dtype)


def _pick(
    cache: torch.Tensor, scale: torch.Tensor | None, page: torch.Tensor, offset: torch.Tensor, dtype: torch.dtype
) -> torch.Tensor:
    """[pages, KH, PAGE, D] -> [T, KH, D] of dtype."""
    if scale is None:
        return cache[page, :, offset].to(dtype)
    codes = cache.view(torch.uint8)[page, :, offset].view(cache.dtype)  # float8 has no gather on a CPU
    return (codes.float() * scale[page, :, offset][..., None]).to(dtype)
