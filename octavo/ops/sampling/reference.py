"""Ground truth of sampling: hashed noise, so a token depends on its row, seed and position alone."""

import torch

_GOLDEN = -7046029254386353131  # 0x9E3779B97F4A7C15 as a signed 64-bit integer
_MIX_1 = -4658895280553007687  # 0xBF58476D1CE4E5B9
_MIX_2 = -7723592293110705685  # 0x94D049BB133111EB


def mix64(x: torch.Tensor) -> torch.Tensor:
    """SplitMix64's finalizer on int64 (wrapping), elementwise (Steele, Lea and Flood 2014)."""
    x = (x ^ _shift_right(x, 30)) * _MIX_1
    x = (x ^ _shift_right(x, 27)) * _MIX_2
    return x ^ _shift_right(x, 31)


def _shift_right(x: torch.Tensor, bits: int) -> torch.Tensor:
    """Logical shift of int64."""
    return (x >> bits) & ((1 << (64 - bits)) - 1)


def uniform_noise(seeds: torch.Tensor, positions: torch.Tensor, vocab_size: int) -> torch.Tensor:
    """Uniform numbers in (0, 1), one for each (seed, position, vocabulary index).

    Args:
        seeds: [B] int64.
        positions: [B] int64.
    Returns:
        [B, vocab_size] fp64.
    """
    index = torch.arange(vocab_size, dtype=torch.int64, device=seeds.device)
    key = mix64(mix64(seeds) + positions * _GOLDEN)  # [B]
    bits = mix64(key[:, None] + (index + 1) * _GOLDEN)  # [B, V]
    return (_shift_right(bits, 12).double() + 0.5) * 2.0**-52


def truncate(logits: torch.Tensor, top_k: torch.Tensor, top_p: torch.Tensor, min_p: torch.Tensor) -> torch.Tensor:
    """Set to -inf what top-k, top-p and min-p exclude; ties go to the lower index, the best token always stays.

    Args:
        logits: [B, V] fp32, already divided by the temperature.
        top_k: [B] int64, <= 0 for off.
        top_p: [B] fp32.
        min_p: [B] fp32.
    Returns:
        [B, V] fp32.
    """
    vocab_size = logits.shape[1]
    order = torch.argsort(logits, dim=-1, descending=True, stable=True)  # [B, V]
    ranked = logits.gather(-1, order)
    rank = torch.arange(vocab_size, device=logits.device)
    probs = torch.softmax(ranked.double(), dim=-1)
    before = probs.cumsum(dim=-1) - probs  # mass of the better tokens
    limit = torch.where(top_k > 0, top_k, vocab_size)
    is_beyond = (before >= top_p[:, None]) & (top_p < 1)[:, None]  # rounding may take `before` to 1
    drop = (rank >= limit[:, None]) | is_beyond | (probs < min_p[:, None] * probs[:, :1])
    drop[:, 0] = False
    ranked = ranked.masked_fill(drop, float("-inf"))
    return torch.empty_like(logits).scatter_(-1, order, ranked)


def sample_reference(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Gumbel-max sampling; greedy where the temperature is 0. Returns [B] int64."""
    greedy = logits.argmax(dim=-1)
    is_greedy = temperature == 0
    if bool(is_greedy.all()):
        return greedy
    z = logits / torch.where(is_greedy, 1.0, temperature)[:, None]
    if bool(((top_k > 0) | (top_p < 1) | (min_p > 0)).any()):
        z = truncate(z, top_k, top_p, min_p)
    gumbel = -torch.log(-torch.log(uniform_noise(seeds, positions, logits.shape[1])))  # [B, V] fp64
    return torch.where(is_greedy, greedy, (z.double() + gumbel).argmax(dim=-1))
