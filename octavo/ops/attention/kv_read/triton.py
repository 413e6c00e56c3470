"""Triton: keys and values of given slots, decoded and packed, in one launch.

A program owns R rows, each one head of one token, of K and of V. Legend: T tokens, KH kv heads, D head_dim.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer
from octavo.ops.quantize.triton.casts import widen

ELEMENTS = 2048  # of K, and of V, a program
WARPS = 4


@triton.jit
def _copy_rows(out, cache, scale, row, place, is_row, D: tl.constexpr):
    d = tl.arange(0, D)[None, :]
    values = widen(tl.load(cache + place[:, None] * D + d, mask=is_row[:, None], other=0.0))
    if scale is not None:
        values = values * tl.load(scale + place, mask=is_row, other=0.0)[:, None]
    tl.store(out + row.to(tl.int64)[:, None] * D + d, values.to(out.dtype.element_ty), mask=is_row[:, None])


@triton.jit(do_not_specialize=("num_rows",))  # which differs from step to step
def kv_rows(
    k_out, v_out, k_cache, v_cache, k_scale, v_scale, slots, num_rows, KH,
    PAGE: tl.constexpr, D: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The heads `row % KH` of the tokens `row // KH`."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    is_row = row < num_rows
    slot = tl.load(slots + row // KH, mask=is_row, other=0).to(tl.int64)
    place = (slot // PAGE * KH + row % KH) * PAGE + slot % PAGE
    _copy_rows(k_out, k_cache, k_scale, row, place, is_row, D)
    _copy_rows(v_out, v_cache, v_scale, row, place, is_row, D)


def can_run(layer: PagedKVLayer) -> bool:
    """Whether the kernel takes this cache: heads of a power of two."""
    dim = layer.k.shape[3]
    return dim & (dim - 1) == 0 and dim <= ELEMENTS


def read_kv(layer: PagedKVLayer, slot_mapping: torch.Tensor, dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor]:
    """As octavo.ops.attention.kv_read.read_kv, for what can_run accepts."""
    (_, kv_heads, _, dim), tokens = layer.k.shape, slot_mapping.shape[0]
    k, v = (torch.empty(tokens, kv_heads, dim, dtype=dtype, device=layer.k.device) for _ in range(2))
    if not tokens:
        return k, v
    rows = ELEMENTS // dim
    cache = (layer.k, layer.v, layer.k_scale, layer.v_scale)
    with on_device_of(k):
        launch = launcher_of(kv_rows, PAGE=PAGE_SIZE, D=dim, R=rows, num_warps=WARPS)
        num_rows = tokens * kv_heads
        launch((triton.cdiv(num_rows, rows),), k, v, *cache, slot_mapping.contiguous(), num_rows, kv_heads)
    return k, v
