"""The paged KV cache of one layer: its tensors, its allocation, and the quantizing write.

Legend: T tokens, KH kv heads, D head_dim; a page holds PAGE_SIZE tokens.
"""

import dataclasses

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize

PAGE_SIZE = 64
KV_SCALING = Scaling.per_row(torch.float8_e4m3fn)  # one scale a token and kv head


@dataclasses.dataclass(frozen=True)
class PagedKVLayer:
    """One layer's cache.

    Attributes:
        k, v: [pages, KH, PAGE_SIZE, D], E4M3 codes or the model's dtype.
        k_scale, v_scale: [pages, KH, PAGE_SIZE] fp32 decode scales, or None for a high-precision cache.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None

    @property
    def is_fp8(self) -> bool:
        return self.k_scale is not None

    @property
    def num_bytes(self) -> int:
        tensors = (self.k, self.v, self.k_scale, self.v_scale)
        return sum(t.numel() * t.element_size() for t in tensors if t is not None)


def allocate_kv_layer(
    num_pages: int,
    num_kv_heads: int,
    head_dim: int,
    kv_cache_dtype: str,
    model_dtype: torch.dtype = torch.bfloat16,
    device: torch.device | str = "cpu",
) -> PagedKVLayer:
    """An empty cache of num_pages pages.

    Args:
        kv_cache_dtype: "fp8" (codes and scales) or "bf16" (the model's dtype).
    """
    shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    if kv_cache_dtype not in ("fp8", "bf16"):
        raise DtypeError(f"kv_cache_dtype must be 'fp8' or 'bf16', got {kv_cache_dtype!r}")
    if kv_cache_dtype == "bf16":
        return PagedKVLayer(
            torch.zeros(shape, dtype=model_dtype, device=device),
            torch.zeros(shape, dtype=model_dtype, device=device),
            None,
            None,
        )
    codes = [torch.zeros(shape, dtype=torch.uint8, device=device).view(KV_SCALING.dtype) for _ in range(2)]
    scales = [torch.ones(shape[:3], dtype=torch.float32, device=device) for _ in range(2)]
    return PagedKVLayer(*codes, *scales)


def quantize_kv(x: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys or values, one scale a token and head.

    Args:
        x: [T, KH, D].
    Returns:
        (codes [T, KH, D] E4M3, scale [T, KH] fp32).
    """
    tokens, heads, dim = x.shape
    q = quantize(x.reshape(tokens * heads, dim), KV_SCALING)
    return q.qdata.view(tokens, heads, dim), q.scale.view(tokens, heads)


def write_kv(layer: PagedKVLayer, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values into their slots, quantized where the cache is FP8.

    Args:
        k, v: [T, KH, D] in the model's dtype, after RoPE. slot_mapping: [T] int64, page * PAGE_SIZE + offset.
    Raises:
        ShapeError: if k, v and slot_mapping disagree with each other or with the cache.
    """
    expected = (slot_mapping.shape[0], layer.k.shape[1], layer.k.shape[3])
    if tuple(k.shape) != expected or tuple(v.shape) != expected:
        raise ShapeError(f"k and v must be [T, KH, D] = {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    page, offset = slot_mapping // PAGE_SIZE, slot_mapping % PAGE_SIZE
    if not layer.is_fp8:
        layer.k[page, :, offset] = k
        layer.v[page, :, offset] = v
        return
    for x, codes, scale in ((k, layer.k, layer.k_scale), (v, layer.v, layer.v_scale)):
        x_codes, x_scale = quantize_kv(x)
        codes.view(torch.uint8)[page, :, offset] = x_codes.view(torch.uint8)  # float8 has no index_put on a CPU
        scale[page, :, offset] = x_scale  # type: ignore[index]


__all__ = ["KV_SCALING", "PAGE_SIZE", "PagedKVLayer", "allocate_kv_layer", "quantize_kv", "write_kv"]
