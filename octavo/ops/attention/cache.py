"""The paged KV cache of one layer: its tensors, its allocation, and the quantizing write.

Legend: T tokens, KH kv heads, D head_dim; a page holds PAGE_SIZE tokens.
"""

import dataclasses
from typing import NamedTuple

import torch

from octavo.errors import DtypeError, ShapeError
from octavo.numerics.scaling import Scaling
from octavo.ops.attention.kv_scales import KNOWN_SCALING, LayerKVScales
from octavo.ops.attention.padding import PackedLengths
from octavo.ops.quantize import quantize

PAGE_SIZE = 64
KV_SCALING = Scaling.per_row(torch.float8_e4m3fn)  # one scale a token and kv head


class KVRounding(NamedTuple):
    """How the FP8 cache rounds one layer's K and V: under known scales, or one a token and head where they are None.

    Attributes:
        scale: [2] fp32 decode scales of K and of V.
        quant_scale: [2] fp32, their reciprocals.
    """

    scale: torch.Tensor | None = None
    quant_scale: torch.Tensor | None = None


@dataclasses.dataclass(frozen=True)
class PagedKVLayer:
    """One layer's cache.

    Attributes:
        k: [pages, KH, PAGE_SIZE, D], E4M3 codes or the model's dtype.
        v: as k.
        k_scale: [pages, KH, PAGE_SIZE] fp32 decode scales, or None for a high-precision cache.
        v_scale: as k_scale.
        attention_dtype: what attention over it multiplies in; see octavo.Numerics.
        known: the scales under which it is written, one of K and one of V; None for one a token and head.
    """

    k: torch.Tensor
    v: torch.Tensor
    k_scale: torch.Tensor | None
    v_scale: torch.Tensor | None
    attention_dtype: str = "bf16"
    known: LayerKVScales | None = None

    def __post_init__(self) -> None:
        check_attention_dtype(self.attention_dtype, "bf16" if self.k_scale is None else "fp8")

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
    attention_dtype: str = "bf16",
    known: LayerKVScales | None = None,
) -> PagedKVLayer:
    """An empty cache of num_pages pages.

    Args:
        kv_cache_dtype: "fp8" (codes and scales) or "bf16" (the model's dtype).
        attention_dtype: what attention over it multiplies in.
        known: of an FP8 cache, the scales under which it is written; None for one a token and head.
    Raises:
        DtypeError: another format, or FP8 attention over a cache in high precision.
    """
    shape = (num_pages, num_kv_heads, PAGE_SIZE, head_dim)
    if kv_cache_dtype not in ("fp8", "bf16"):
        raise DtypeError(f"kv_cache_dtype must be 'fp8' or 'bf16', got {kv_cache_dtype!r}")
    if kv_cache_dtype == "bf16":
        k, v = (torch.zeros(shape, dtype=model_dtype, device=device) for _ in range(2))
        return PagedKVLayer(k, v, None, None, attention_dtype)
    k, v = (torch.zeros(shape, dtype=torch.uint8, device=device).view(KV_SCALING.dtype) for _ in range(2))
    k_scale, v_scale = (torch.ones(shape[:3], dtype=torch.float32, device=device) for _ in range(2))
    return PagedKVLayer(k, v, k_scale, v_scale, attention_dtype, known)


def check_attention_dtype(attention_dtype: str, kv_cache_dtype: str) -> None:
    """Refuse an attention dtype that does not exist, or that this cache does not go with."""
    if attention_dtype not in ("bf16", "fp8"):
        raise DtypeError(f"attention_dtype must be 'bf16' or 'fp8', got {attention_dtype!r}")
    if attention_dtype == "fp8" and kv_cache_dtype != "fp8":
        raise DtypeError(f"attention_dtype='fp8' needs kv_cache_dtype='fp8', got {kv_cache_dtype!r}")


def quantize_kv(
    x: torch.Tensor, known: LayerKVScales | KVRounding | None = None, role: int = 0
) -> tuple[torch.Tensor, torch.Tensor]:
    """Quantize keys or values (or queries, for FP8 attention), one scale a token and head, or under known scales.

    Args:
        x: [T, KH, D].
        known: a layer's scales; None makes one a token and head.
        role: 0 for its K, 1 for its V.
    Returns:
        (codes [T, KH, D] E4M3, scale [T, KH] fp32).
    """
    tokens, heads, dim = x.shape
    scale, quant_scale = (None, None) if known is None else (known.scale, known.quant_scale)
    if scale is not None and quant_scale is not None:
        rows = quantize(x.reshape(tokens * heads, dim), KNOWN_SCALING, quant_scale=quant_scale[role])
        return rows.qdata.view(tokens, heads, dim), scale[role].expand(tokens, heads).clone()
    q = quantize(x.reshape(tokens * heads, dim), KV_SCALING)
    return q.qdata.view(tokens, heads, dim), q.scale.view(tokens, heads)


def round_kv(x: torch.Tensor, rounding: KVRounding, role: int) -> torch.Tensor:
    """Keys or values [T, KH, D] as the FP8 cache returns them; role as in quantize_kv."""
    codes, scale = quantize_kv(x, rounding, role)
    return (codes.float() * scale[..., None]).to(x.dtype)


def write_kv(layer: PagedKVLayer, k: torch.Tensor, v: torch.Tensor, slot_mapping: torch.Tensor) -> None:
    """Write new keys and values into their slots, quantized where the cache is FP8.

    Args:
        k: [T, KH, D] in the model's dtype, after RoPE.
        v: [T, KH, D] in the model's dtype.
        slot_mapping: [T] int64, page * PAGE_SIZE + offset; a negative one (a padding token) is not written. A GPU is
            waited for.
    Raises:
        ShapeError: if k, v and slot_mapping disagree with each other or with the cache.
    """
    expected = (slot_mapping.shape[0], layer.k.shape[1], layer.k.shape[3])
    if tuple(k.shape) != expected or tuple(v.shape) != expected:
        raise ShapeError(f"k and v must be [T, KH, D] = {expected}, got {tuple(k.shape)} and {tuple(v.shape)}")
    written = (slot_mapping >= 0).nonzero()[:, 0]
    k, v, slot_mapping = k[written], v[written], slot_mapping[written]
    known = layer.known
    if known is not None and known.is_calibrating:
        known.calibrate(k, v)
    if known is not None:
        known.count(k, v)
    rows = (*quantize_kv(k, known, 0), *quantize_kv(v, known, 1)) if layer.is_fp8 else (k, None, v, None)
    _store(layer, rows[0], rows[2], rows[1], rows[3], slot_mapping)


def as_pages(
    kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    lengths: PackedLengths,
    attention_dtype: str = "bf16",
) -> tuple[PagedKVLayer, torch.Tensor]:
    """Packed sequences' keys and values in pages of their own; waits for no device.

    Args:
        kv: k and v [T, KH, D], codes or high precision, and their scales [T, KH] or None.
    Returns:
        (the layer, page_tables [B, pages of the longest] int32).
    """
    k, v, k_scale, v_scale = kv
    starts = lengths.cu_seqlens.long()
    # sequence b's pages begin at start // PAGE_SIZE + b, which leaves each enough
    first_pages = starts[:-1] // PAGE_SIZE + torch.arange(lengths.num_sequences, device=k.device)
    num_pages = lengths.num_tokens // PAGE_SIZE + lengths.num_sequences
    tokens = torch.arange(lengths.num_tokens, device=k.device)
    sequence = torch.repeat_interleave(
        torch.arange(lengths.num_sequences, device=k.device), torch.diff(starts), output_size=lengths.num_tokens
    )
    slots = first_pages[sequence] * PAGE_SIZE + tokens - starts[sequence]
    kind = "bf16" if k_scale is None else "fp8"
    layer = allocate_kv_layer(num_pages, k.shape[1], k.shape[2], kind, k.dtype, k.device, attention_dtype)
    _store(layer, k, v, k_scale, v_scale, slots)
    steps = torch.arange(-(-lengths.max_len // PAGE_SIZE), device=k.device)
    tables = (first_pages[:, None] + steps).clamp_max(num_pages - 1)
    return layer, tables.to(torch.int32)


def _store(
    layer: PagedKVLayer,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor | None,
    v_scale: torch.Tensor | None,
    slots: torch.Tensor,
) -> None:
    """Rows [T, KH, D] and scales [T, KH] of both into their slots [T]."""
    page, offset = slots // PAGE_SIZE, slots % PAGE_SIZE
    for x, scale, cache, scales in ((k, k_scale, layer.k, layer.k_scale), (v, v_scale, layer.v, layer.v_scale)):
        if scales is None:
            cache[page, :, offset] = x
        else:
            cache.view(torch.uint8)[page, :, offset] = x.view(torch.uint8)  # float8 has no index_put on a CPU
            assert scale is not None, "codes come with scales"
            scales[page, :, offset] = scale


__all__ = [
    "KV_SCALING",
    "PAGE_SIZE",
    "KVRounding",
    "PagedKVLayer",
    "allocate_kv_layer",
    "quantize_kv",
    "round_kv",
    "write_kv",
]
