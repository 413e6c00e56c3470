"""Ground truth of fake quantization: octavo.numerics.emulated, laid out in memory as the input. Device-free torch.

The ground truth of random_hadamard is octavo.numerics.hadamard as it stands.
"""

import torch

from octavo.numerics.emulated import fake_quantize_mxfp8, fake_quantize_nvfp4
from octavo.numerics.emulated_config import ScaleRounding
from octavo.numerics.hadamard import random_hadamard
from octavo.numerics.infinity import note_infinity

__all__ = ["mxfp8", "nvfp4", "random_hadamard"]


def mxfp8(x: torch.Tensor, dtype: torch.dtype, scale_rounding: ScaleRounding = "up") -> torch.Tensor:
    """What MXFP8 leaves of x [M, K]: its shape and dtype, and its strides where it is dense."""
    note_infinity(x)
    return _laid_out(fake_quantize_mxfp8(x, dtype, scale_rounding=scale_rounding), x)


def nvfp4(x: torch.Tensor, square_blocks: bool, stochastic_seed: int | None) -> torch.Tensor:
    """What NVFP4 leaves of x [M, K], laid out as by mxfp8."""
    note_infinity(x)
    return _laid_out(fake_quantize_nvfp4(x, square_blocks=square_blocks, stochastic_seed=stochastic_seed), x)


def _laid_out(values: torch.Tensor, like: torch.Tensor) -> torch.Tensor:
    out = torch.empty_like(like)
    return values if values.stride() == out.stride() else out.copy_(values)
