"""Sampling of next tokens with seeded, batch-independent noise."""

import torch

from octavo import env
from octavo.errors import DtypeError
from octavo.ops.sampling.reference import sample_reference

__all__ = ["request_seed", "sample"]

_MASK = (1 << 64) - 1


def request_seed(seed: int, request_index: int, sample_index: int) -> int:
    """One 64-bit seed a sequence, from the engine's or request's seed and the sequence's place.

    Returns:
        A signed 64-bit integer.
    """
    x = seed & _MASK
    for part in (request_index, sample_index):
        x = (x + (part + 1) * 0x9E3779B97F4A7C15) & _MASK
        x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
        x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & _MASK
        x ^= x >> 31
    return x - (1 << 64) if x >= 1 << 63 else x


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """Draw one token a row from softmax(logits / temperature), truncated by top-k, then top-p, then min-p.

    Args:
        logits: [B, V] fp32.
        temperature: [B] fp32, 0 is greedy.
        top_k: [B] int64, <= 0 is off.
        top_p: [B] fp32, 1 is off.
        min_p: [B] fp32, 0 is off.
        seeds: [B] int64 (request_seed).
        positions: [B] int64, index of the token being drawn in its sequence.
    Returns:
        [B] int64.
    Raises:
        DtypeError: for logits that are not fp32.
    Exactness: a row's token depends on that row, its seed and its position alone. A GPU is not waited for.
    """
    if logits.dtype != torch.float32:
        raise DtypeError(f"logits must be float32, got {logits.dtype}")
    if logits.is_cuda and not env.force_reference():
        from octavo.ops.sampling import triton

        return triton.sample(logits, temperature, top_k, top_p, min_p, seeds, positions)
    return sample_reference(logits, temperature, top_k, top_p, min_p, seeds, positions)
