"""Rotary position embedding with precomputed fp32 tables, shared by trainer and sampler."""

from typing import Any

import torch

from octavo.errors import ConfigError, ShapeError
from octavo.ops.attention.rope.reference import apply_rope_reference, inverse_frequencies

__all__ = ["ROPE_TYPES", "apply_rope", "rope_tables"]

ROPE_TYPES = ("default", "linear", "llama3")


def rope_tables(
    head_dim: int, max_positions: int, theta: float, scaling: dict[str, Any] | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Cosine and sine of every position's angles, as Hugging Face computes them.

    Args:
        head_dim: even.
        max_positions: rows of the tables.
        theta: base.
        scaling: None, or a dict with rope_type "default", "linear" (factor) or "llama3" (factor, low_freq_factor,
            high_freq_factor, original_max_position_embeddings).
    Returns:
        (cos, sin), each [max_positions, head_dim / 2] fp32 on the CPU.
    Raises:
        ShapeError: for an odd head_dim.
        ConfigError: for another rope_type.
    """
    if head_dim % 2:
        raise ShapeError(f"head_dim must be even for RoPE, got {head_dim}")
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind not in ROPE_TYPES:
        raise ConfigError(f"rope_type must be one of {ROPE_TYPES}, got {kind!r}")
    freqs = inverse_frequencies(head_dim, theta, scaling)
    angles = torch.arange(max_positions, dtype=torch.float32)[:, None] * freqs  # [P, D/2]
    return angles.cos(), angles.sin()


def apply_rope(
    x: torch.Tensor,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    *,
    interleaved: bool = False,
    back: bool = False,
) -> torch.Tensor:
    """Rotate queries or keys by their positions.

    Args:
        x: [T, H, D].
        positions: [T] int64, below the tables' length.
        cos: [P, R/2] fp32 with R <= D: the first R elements of each head turn, the others stay.
        sin: as cos.
        interleaved: the pairs are (2i, 2i + 1), as in GPT-J; otherwise (i, i + R/2), as Hugging Face lays out Llama.
        back: turn the other way, as the gradient is turned.
    Returns:
        [T, H, D] of x's dtype; computed in fp32, rounded once.
    Raises:
        ShapeError: tables wider than a head.
    Source:
        Su et al. 2021.
    Exactness: bitwise within a device.
    """
    if 2 * cos.shape[-1] > x.shape[-1]:
        raise ShapeError(f"RoPE's tables turn {2 * cos.shape[-1]} elements, a head has {x.shape[-1]}")
    return apply_rope_reference(x, positions, cos, sin, interleaved, back)
