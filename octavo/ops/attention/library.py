"""Attention through torch's scaled_dot_product_attention, where exact is off.

Legend: B sequences, Lq and Lk padded lengths, H query heads, KH kv heads, D head_dim.
"""

import torch
import torch.nn.functional as F


def attend_library(
    q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, num_visible: torch.Tensor | None, softmax_scale: float
) -> torch.Tensor:
    """Attention of a padded batch; differentiable.

    Args:
        q: [B, Lq, H, D]. k, v: [B, KH, Lk, D], q's dtype.
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
