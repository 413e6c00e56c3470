"""FP8 GEMM for few tokens, as in decoding: libraries leave multiprocessors idle, and read the weight at half rate."""

import functools

import torch

from octavo import env
from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.gemm.scaled_mm import scaled_mm
from octavo.ops.gemm.skinny_mm.limits import FEW_TOKENS, MAX_TOKENS

__all__ = ["FEW_TOKENS", "MAX_TOKENS", "skinny_mm"]


def skinny_mm(
    a: QuantizedTensor,
    b: QuantizedTensor,
    *,
    bias: torch.Tensor | None = None,
    out_dtype: torch.dtype = torch.bfloat16,
    exact: bool = False,
) -> torch.Tensor:
    """scaled_mm of a few rows: the same arguments and errors, without exact another order of sums.

    Args:
        a: [M, K] E4M3, per row or in 1x128 blocks.
        b: [N, K] E4M3, per row, per tensor or in 128x128 blocks.
    Returns:
        [M, N] of out_dtype, rounded once from fp32. Whatever no kernel takes (other scalings, more than MAX_TOKENS
        rows, a K that is no multiple of 128, other GPUs than Hopper), and whatever the library is quicker at, goes to
        scaled_mm.
    Exactness: exact=True bitwise scaled_mm(exact=True), on a GPU; else SQNR >= 45 dB to it, the same bits from run to
    run.
    """
    if a.qdata.is_cuda and a.shape[0] <= MAX_TOKENS and _is_hopper(a.device) and not env.force_reference():
        from octavo.ops.gemm.skinny_mm import exact as exact_tiles
        from octavo.ops.gemm.skinny_mm import triton

        if not exact and triton.can_run(a, b):
            return triton.skinny_mm(a, b, bias, out_dtype)
        if exact and exact_tiles.can_run(a, b, bias, out_dtype):
            return exact_tiles.whole_sums_mm(a, b, bias, out_dtype)
    return scaled_mm(a, b, bias=bias, out_dtype=out_dtype, exact=exact)


@functools.cache
def _is_hopper(device: torch.device) -> bool:
    return torch.cuda.get_device_capability(device)[0] == 9
