"""Attention through torch where exact is off: SDPA, and FlashAttention for ragged sequences.

These are the ones that octavo.ops.attention.varlen does not take.

Which of its kernels SDPA takes is torch's choice: on Hopper cuDNN's first, from the cuDNN release on that is right at
every length, then FlashAttention's; forcing an order would go round that check.

Legend: T tokens, B sequences, Lq and Lk padded lengths, H query heads, KH kv heads, D head_dim.
"""

import functools
import inspect
from collections.abc import Callable
from typing import Any

import torch
import torch.nn.functional as F

from octavo.ops.attention.padding import PackedLengths

_MAX_FLASH_HEAD_DIM = 256


def attend_packed(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: PackedLengths,
    softmax_scale: float,
    causal: bool,
    key_lengths: PackedLengths | None = None,
) -> torch.Tensor:
    """Attention of packed sequences; differentiable. Padded to the longest only where nothing else can do it.

    Equal lengths are a batch as they lie. Ragged ones go to FlashAttention on a GPU (16 bits, D a multiple of 8 up to
    256), and are padded in other places.

    Args:
        q: [T, H, D].
        k: [Tk, KH, D], q's dtype. T > 0.
        v: as k.
        lengths: of the queries, and of the keys where key_lengths is None; else a sequence's queries are of the last
            tokens that its keys are of.
    Returns:
        [T, H, D] of q's dtype.
    """
    q, softmax_scale = _with_positive_scale(q, softmax_scale)
    if lengths.is_equal and key_lengths is None:
        q, k, v = (x.unflatten(0, (lengths.num_sequences, lengths.max_len)) for x in (q, k, v))
        return attend_batch(q, k, v, softmax_scale, causal).flatten(0, 1)
    keys = key_lengths or lengths
    if _flash_takes(q):
        return _attend_ragged(q, k, v, lengths, keys, softmax_scale, causal)
    layout = lengths.padded
    num_visible = None  # causal masking never lets a token see the padding behind it
    if not causal or key_lengths is not None:
        last = torch.diff(keys.cu_seqlens).long()  # [B]
        if causal:
            last = last - torch.diff(lengths.cu_seqlens).long() + 1
        num_visible = layout.pad(last[layout.sequence] + (layout.offset if causal else 0))
    k, v = (keys.padded.pad(x).transpose(1, 2) for x in (k, v))  # [B, KH, L, D]
    return layout.unpad(attend_library(layout.pad(q), k, v, num_visible, softmax_scale))


def attend_batch(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, softmax_scale: float, causal: bool) -> torch.Tensor:
    """Attention of a batch without padding, q [B, L, H, D] and k, v [B, L, KH, D], of which nothing is copied."""
    q, softmax_scale = _with_positive_scale(q, softmax_scale)
    q, k, v = (x.transpose(1, 2) for x in (q, k, v))
    out = F.scaled_dot_product_attention(
        q, k, v, is_causal=causal, scale=softmax_scale, enable_gqa=q.shape[1] != k.shape[1]
    )
    return out.transpose(1, 2)


def _with_positive_scale(q: torch.Tensor, softmax_scale: float) -> tuple[torch.Tensor, float]:
    """Queries and a factor > 0 that give the same scores: torch's causal masks are NaN under any other factor."""
    if softmax_scale > 0:
        return q, softmax_scale
    return q * (-1.0 if softmax_scale < 0 else 0.0), -softmax_scale or 1.0


def _flash_takes(q: torch.Tensor) -> bool:
    is_half = q.dtype in (torch.bfloat16, torch.float16)
    return q.is_cuda and is_half and q.shape[-1] % 8 == 0 and q.shape[-1] <= _MAX_FLASH_HEAD_DIM


def _attend_ragged(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    lengths: PackedLengths,
    keys: PackedLengths,
    softmax_scale: float,
    causal: bool,
) -> torch.Tensor:
    sizes = (lengths.cu_seqlens, keys.cu_seqlens, lengths.max_len, keys.max_len)
    if not torch.is_grad_enabled():
        # what varlen_attn calls, without its module, which loads torch.compile, and without its op's time on the CPU
        window_sizes = {"window_size_left": -1, "window_size_right": 0 if causal else -1}
        out: torch.Tensor = torch.ops.aten._flash_attention_forward(
            q, k, v, *sizes, 0.0, causal, False, scale=softmax_scale, **window_sizes
        )[0]
        return out
    flags = _gqa_flags() if q.shape[1] != k.shape[1] else {}
    window = (-1, 0 if causal else -1)  # of fewer queries than keys the last sees all
    return _varlen_attn()(q, k, v, *sizes, scale=softmax_scale, window_size=window, **flags)


@functools.cache
def _varlen_attn() -> Callable[..., Any]:
    # its module loads torch.compile, a second that `import octavo` does not take
    from torch.nn.attention.varlen import varlen_attn

    return varlen_attn


@functools.cache
def _gqa_flags() -> dict[str, bool]:
    """What this torch wants to be told of grouped queries: 2.12 a flag; 2.11 takes them as they come."""
    return {"enable_gqa": True} if "enable_gqa" in inspect.signature(_varlen_attn()).parameters else {}


def attend_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_visible: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """Attention of a padded batch; differentiable.

    Args:
        q: [B, Lq, H, D].
        k: [B, KH, Lk, D], q's dtype.
        v: as k.
        num_visible: [B, Lq] int64, keys that each query sees (0 for padding); None for plain causal with Lq == Lk.
    Returns:
        [B, Lq, H, D] of q's dtype.
    """
    is_causal = num_visible is None
    mask = None
    if num_visible is not None:
        # a padding query sees key 0, so that its softmax is defined; its output is cut off afterwards
        mask = (torch.arange(k.shape[2], device=q.device) < num_visible.clamp_min(1)[..., None])[
            :, None
        ]  # [B, 1, Lq, Lk]
    out = F.scaled_dot_product_attention(
        q.transpose(1, 2),
        k,
        v,
        attn_mask=mask,
        is_causal=is_causal,
        scale=softmax_scale,
        enable_gqa=q.shape[2] != k.shape[1],
    )
    return out.transpose(1, 2)
