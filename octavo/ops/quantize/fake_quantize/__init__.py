"""Fake quantization: what a format that Hopper has no GEMM for leaves of a tensor, bit-equal on every device.

Results lie in memory as the input does: a transposed view is quantized along the rows of its matrix, without a copy.
"""

import math

import torch

from octavo.numerics.emulated import check_source, check_square
from octavo.numerics.emulated_config import ScaleRounding, check_scale_rounding
from octavo.numerics.hadamard import check_tokens, result_like
from octavo.ops._runtime.registry import kernel_or_reference, register
from octavo.ops.quantize.fake_quantize import reference

__all__ = ["fake_quantize_mxfp8", "fake_quantize_nvfp4", "random_hadamard"]


_mxfp8_op = register(
    "fake_quantize_mxfp8(Tensor x, ScalarType dtype, str scale_rounding) -> Tensor",
    reference=reference.mxfp8,
    fake=lambda x, dtype, scale_rounding: torch.empty_like(x),
    cuda=kernel_or_reference("quantize.fake_quantize.triton.mxfp8", reference.mxfp8),
)
_nvfp4_op = register(
    "fake_quantize_nvfp4(Tensor x, bool square_blocks, int? stochastic_seed) -> Tensor",
    reference=reference.nvfp4,
    fake=lambda x, square_blocks, stochastic_seed: torch.empty_like(x),
    cuda=kernel_or_reference("quantize.fake_quantize.triton.nvfp4", reference.nvfp4),
)
_hadamard_op = register(
    "random_hadamard(Tensor x) -> Tensor",
    reference=reference.random_hadamard,
    fake=result_like,
    cuda=kernel_or_reference("quantize.fake_quantize.triton.random_hadamard", reference.random_hadamard),
)


def fake_quantize_mxfp8(
    x: torch.Tensor, dtype: torch.dtype = torch.float8_e4m3fn, *, scale_rounding: ScaleRounding = "up"
) -> torch.Tensor:
    """What MXFP8 leaves of x: blocks of 32 along the last dim, one E8M0 scale each.

    Args:
        x: [..., K] fp32, bf16 or fp16; blocks of x.t() run along the rows of x and cost no copy.
        dtype: torch.float8_e4m3fn or torch.float8_e5m2.
        scale_rounding: "up", so that nothing saturates, or "down", OCP's.
    Returns:
        x's shape and dtype; of a matrix also its strides, where it is dense.
    Raises:
        DtypeError: x has another dtype, or dtype is another.
        ShapeError: x is a scalar.
        RecipeError: scale_rounding is another.
    Source:
        arXiv 2506.08027 and OCP Microscaling Formats 1.0; the rule is octavo.numerics.emulated's.
    Exactness: bitwise on every device.
    """
    check_source(x, dtype)
    check_scale_rounding(scale_rounding)
    out: torch.Tensor = _mxfp8_op(_matrix(x), dtype, scale_rounding)
    return out if x.dim() == 2 else out.view(x.shape)


def fake_quantize_nvfp4(
    x: torch.Tensor, *, square_blocks: bool = False, stochastic_seed: int | None = None
) -> torch.Tensor:
    """What NVFP4 leaves of x: E2M1 values, an E4M3 scale for each block of 16, one fp32 scale for the tensor.

    Args:
        x: as in fake_quantize_mxfp8.
        square_blocks: 16 x 16 blocks, for weights; x is a matrix.
        stochastic_seed: round elements stochastically, by a hash of their place in x, this seed and all of x; None
            rounds to nearest, ties to even.
    Result and exactness as fake_quantize_mxfp8.
    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is a scalar, or square_blocks and x is no matrix.
    Source:
        NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149); the rule is octavo.numerics.emulated's.
    """
    check_source(x)
    check_square(x, square_blocks)
    out: torch.Tensor = _nvfp4_op(_matrix(x), square_blocks, stochastic_seed)
    return out if x.dim() == 2 else out.view(x.shape)


def random_hadamard(x: torch.Tensor) -> torch.Tensor:
    """x with its rows transformed in blocks of 16: random_hadamard(x).t() @ random_hadamard(y) is x.t() @ y.

    Args:
        x: [T, K] fp32, bf16 or fp16.
    Returns:
        [T rounded up to 16, K], bf16 for bf16 and else fp32.
    Raises:
        DtypeError: x has another dtype.
        ShapeError: x is no matrix.
    Source:
        NVIDIA, "Pretraining LLMs with NVFP4" (arXiv 2509.25149); the rule is octavo.numerics.hadamard's.
    Exactness: bitwise on every device.
    """
    check_tokens(x)
    return _hadamard_op(x)


def _matrix(x: torch.Tensor) -> torch.Tensor:
    return x if x.dim() == 2 else x.reshape(math.prod(x.shape[:-1]), x.shape[-1])
