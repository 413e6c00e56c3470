"""Ground truth of rotary position embedding: fp32 tables and products, one rounding. Device-free torch."""

import math
from typing import Any

import torch


def inverse_frequencies(head_dim: int, theta: float, scaling: dict[str, Any] | None) -> torch.Tensor:
    """Angular frequencies, with Llama 3.1's or linear scaling where asked.

    Returns:
        [head_dim / 2] fp32.
    """
    exponents = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    freqs = 1.0 / (theta**exponents)
    kind = (scaling or {}).get("rope_type", (scaling or {}).get("type", "default"))
    if kind == "linear":
        return freqs / scaling["factor"]  # type: ignore[index]
    return freqs if kind == "default" else _llama3_frequencies(freqs, scaling or {})


def _llama3_frequencies(freqs: torch.Tensor, scaling: dict[str, Any]) -> torch.Tensor:
    """Llama 3.1: long wavelengths divided by factor, short ones kept, a smooth blend between."""
    factor, low, high = scaling["factor"], scaling["low_freq_factor"], scaling["high_freq_factor"]
    old_context = scaling["original_max_position_embeddings"]
    wavelength = 2 * math.pi / freqs
    smooth = (old_context / wavelength - low) / (high - low)
    blended = (1 - smooth) * freqs / factor + smooth * freqs
    scaled = torch.where(wavelength > old_context / low, freqs / factor, freqs)
    is_medium = (wavelength >= old_context / high) & (wavelength <= old_context / low)
    return torch.where(is_medium, blended, scaled)


def apply_rope_reference(
    x: torch.Tensor, positions: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor, interleaved: bool, back: bool
) -> torch.Tensor:
    """Rotate pairs (i, i + R/2), or (2i, 2i + 1), of the first R elements of each head.

    Args:
        x: [T, H, D].
        positions: [T] int64.
        cos: [P, R/2] fp32.
        sin: [P, R/2] fp32.
        back: turn by -positions.
    Returns:
        [T, H, D] of x's dtype.
    """
    c, s = cos[positions][:, None, :], sin[positions][:, None, :]  # [T, 1, R/2]
    s = -s if back else s
    turning, rest = x.split([2 * cos.shape[-1], x.shape[-1] - 2 * cos.shape[-1]], dim=-1)
    halves = (turning[..., ::2], turning[..., 1::2]) if interleaved else turning.chunk(2, dim=-1)
    first, second = (half.float() for half in halves)
    pair = (first * c - second * s, second * c + first * s)
    turned = (torch.stack(pair, dim=-1).flatten(-2) if interleaved else torch.cat(pair, dim=-1)).to(x.dtype)
    return turned if not rest.shape[-1] else torch.cat((turned, rest), dim=-1)
