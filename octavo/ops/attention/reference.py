"""Ground truth of attention in exact mode: every sum is exact, so prefill and decode, any chunking and padding agree.

The FP8 level (attention_dtype) rounds queries and probabilities to E4M3; docs/numerics.md has its rule.

Legend: B sequences, Lq and Lk padded query and key lengths, H query heads, KH kv heads, G = H / KH, D head_dim.
"""

import math

import torch

from octavo.numerics.fixed_point import FP64_BITS, to_fixed
from octavo.numerics.scaling import Scaling
from octavo.ops.quantize import quantize

SPLIT = 2048  # keys a split; boundaries lie at fixed token positions
_V_BITS = 20  # E4M3 codes span 18 bits; a high-precision row is rounded to 20
_P_BITS = FP64_BITS - _V_BITS - int(math.log2(SPLIT))
_SUM_BITS = 30
P_BLOCK = 64  # keys that share a scale of a row's probabilities, from position 0
P_SCALING = Scaling.per_row(torch.float8_e4m3fn)  # of each block as a row of its own
_MAX_SCORES = 1 << 26  # scores held at once; rows are independent, so chunking them changes no bit


def as_fixed_rows(x: torch.Tensor, scale: torch.Tensor | None) -> tuple[torch.Tensor, torch.Tensor]:
    """Keys or values as (numbers of at most 20 significant places, scale a row).

    Args:
        x: [..., D] E4M3 codes with scale [...], or high precision with None.
    Returns:
        (fp64 [..., D], fp32 [...]).
    """
    if scale is not None:
        return x.double(), scale
    integers, unit = to_fixed(x, _V_BITS)
    return integers, unit[..., 0].float()


def attend(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    k_scale: torch.Tensor,
    v_scale: torch.Tensor,
    num_visible: torch.Tensor,
    softmax_scale: float,
    q_scale: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Attention of a padded batch; query i of a sequence sees its first num_visible keys.

    Args:
        q: [B, Lq, H, D] bf16 or fp32; with q_scale [B, Lq, H] fp32, E4M3 codes as fp64.
        k: [B, KH, Lk, D] fp64 (as_fixed_rows).
        v: as k.
        k_scale: [B, KH, Lk] fp32 (as_fixed_rows).
        v_scale: as k_scale.
        num_visible: [B, Lq] int64, 0 for padding.
        q_scale: where given, both products run in FP8: the probabilities are quantized too.
    Returns:
        (out [B, Lq, H, D] fp32, lse [B, Lq, H] fp32).
    """
    batch, q_len, heads, dim = q.shape
    kv_heads, group = k.shape[1], heads // k.shape[1]
    if q_scale is None:
        q_int, q_unit = to_fixed(q, min(24, FP64_BITS - _V_BITS - math.ceil(math.log2(dim))))
    else:
        q_int, q_unit = q, q_scale.double()[..., None]
    rows, units = _by_kv_head(q_int, kv_heads), _by_kv_head(q_unit, kv_heads)
    visible = num_visible.repeat_interleave(group, dim=1)  # [B, Lq*G]
    step = max(1, _MAX_SCORES // max(1, batch * kv_heads * k.shape[2]))
    pieces = [
        _attend_rows(
            (rows[:, :, i : i + step], units[:, :, i : i + step]),
            (k, v, k_scale, v_scale),
            visible[:, None, i : i + step, None],
            softmax_scale,
            is_fp8=q_scale is not None,
        )
        for i in range(0, rows.shape[2], step)
    ]
    out = torch.cat([o for o, _ in pieces], dim=2)  # [B, KH, Lq*G, D]
    lse = torch.cat([s for _, s in pieces], dim=2)  # [B, KH, Lq*G, 1]
    out = out.view(batch, kv_heads, q_len, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, q_len, heads, dim)
    return out, lse.view(batch, kv_heads, q_len, group).permute(0, 2, 1, 3).reshape(batch, q_len, heads)


def _by_kv_head(x: torch.Tensor, kv_heads: int) -> torch.Tensor:
    """[B, Lq, H, X] -> [B, KH, Lq*G, X]."""
    batch, q_len, heads, width = x.shape
    x = x.view(batch, q_len, kv_heads, heads // kv_heads, width).permute(0, 2, 1, 3, 4)
    return x.reshape(batch, kv_heads, -1, width)


def _attend_rows(
    queries: tuple[torch.Tensor, torch.Tensor],
    cache: tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor],
    visible: torch.Tensor,
    softmax_scale: float,
    is_fp8: bool,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Walk the splits of the keys from position 0, then merge them in order."""
    q_int, q_unit = queries  # [B, KH, R, D], [B, KH, R, 1]
    k, v, k_scale, v_scale = cache
    partial = []
    for start in range(0, k.shape[2], SPLIT):
        keys = slice(start, start + SPLIT)
        product = ((q_int @ k[:, :, keys].transpose(-1, -2)) * q_unit).float()  # [B, KH, R, S], exact sums
        scores = product * k_scale[:, :, None, keys] * softmax_scale
        is_visible = torch.arange(start, start + scores.shape[-1], device=k.device) < visible
        partial.append(_softmax_product(scores, is_visible, v[:, :, keys], v_scale[:, :, None, keys], is_fp8))
    return _merge(partial)


def _softmax_product(
    scores: torch.Tensor, is_visible: torch.Tensor, v: torch.Tensor, v_scale: torch.Tensor, is_fp8: bool
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """One split: (row maximum, sum of exponentials, unnormalised output), all fp32; V's scale folds into P."""
    maximum = scores.masked_fill(~is_visible, float("-inf")).amax(dim=-1, keepdim=True)
    shifted = scores - torch.where(maximum == float("-inf"), 0.0, maximum)
    p = torch.where(is_visible, torch.exp(shifted), 0.0)  # [B, KH, R, S]
    total = (torch.round(p.double() * 2.0**_SUM_BITS).sum(dim=-1, keepdim=True) * 2.0**-_SUM_BITS).float()
    weights = p * v_scale
    weights, unit = to_fixed(_round_weights(weights) if is_fp8 else weights, _P_BITS)
    return maximum, total, ((weights @ v) * unit).float()


def _round_weights(weights: torch.Tensor) -> torch.Tensor:
    """Probabilities times V's scales [B, KH, R, S] as E4M3 gives them back (fp64), a scale a row and P_BLOCK keys.

    What a row does not see is zero, so its amax, as everything else, is of the keys up to its own position. The rule is
    blind to a factor that a row's block has in common: whichever maximum a softmax subtracts, these are its codes.
    """
    keys = weights.shape[-1]
    blocks = torch.nn.functional.pad(weights, (0, -keys % P_BLOCK)).reshape(-1, P_BLOCK)
    q = quantize(blocks, P_SCALING)
    return (q.qdata.double() * q.scale.double()).view(*weights.shape[:-1], -1)[..., :keys]


def _merge(partial: list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]) -> tuple[torch.Tensor, torch.Tensor]:
    """Combine splits in the order of their positions; an empty split adds nothing."""
    maximum = torch.stack([m for m, _, _ in partial]).amax(dim=0)
    safe = torch.where(maximum == float("-inf"), 0.0, maximum)
    total, out = torch.zeros_like(partial[0][1]), torch.zeros_like(partial[0][2])
    for split_max, split_total, split_out in partial:
        factor = torch.exp(split_max - safe)
        total = total + split_total * factor
        out = out + split_out * factor
    return out / torch.where(total == 0, 1.0, total), safe + torch.log(total)


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    num_visible: torch.Tensor,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient through the decoded K and V (straight-through for their quantization), in fp32.

    Args:
        grad_out: [B, Lq, H, D].
        q: [B, Lq, H, D].
        out: [B, Lq, H, D].
        k: [B, Lk, KH, D] decoded.
        v: as k.
        lse: [B, Lq, H].
        num_visible: [B, Lq].
    Returns:
        (grad_q [B, Lq, H, D], grad_k, grad_v [B, Lk, KH, D]) fp32.
    """
    batch, q_len, heads, dim = q.shape
    kv_heads, group = k.shape[2], heads // k.shape[2]

    def by_head(x: torch.Tensor) -> torch.Tensor:  # [B, Lq, H, X] -> [B, KH, Lq*G, X]
        return _by_kv_head(x.float(), kv_heads)

    q_rows, grad_rows, lse_rows = by_head(q), by_head(grad_out), by_head(lse[..., None])
    delta = (grad_rows * by_head(out)).sum(dim=-1, keepdim=True)
    keys, values = (x.float().permute(0, 2, 1, 3) for x in (k, v))  # [B, KH, Lk, D]
    visible = num_visible.repeat_interleave(group, dim=1)[:, None, :, None]
    is_visible = torch.arange(keys.shape[2], device=q.device) < visible
    scores = (q_rows @ keys.transpose(-1, -2)) * softmax_scale
    p = torch.where(is_visible, torch.exp(scores - lse_rows), 0.0)  # [B, KH, Lq*G, Lk]
    grad_v = p.transpose(-1, -2) @ grad_rows
    grad_scores = p * (grad_rows @ values.transpose(-1, -2) - delta) * softmax_scale
    grad_q = grad_scores @ keys
    grad_k = grad_scores.transpose(-1, -2) @ q_rows
    grad_q = grad_q.view(batch, kv_heads, q_len, group, dim).permute(0, 2, 1, 3, 4).reshape(batch, q_len, heads, dim)
    return grad_q, grad_k.permute(0, 2, 1, 3), grad_v.permute(0, 2, 1, 3)
