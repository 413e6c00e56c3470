"""Triton FP8 GEMMs for few tokens, and which of them a product takes."""

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops.gemm.skinny_mm.limits import FEW_TOKENS
from octavo.ops.gemm.skinny_mm.triton import narrow, tiled
from octavo.ops.gemm.skinny_mm.triton.splits import BLOCK_K

PAIRS = {("per_row", "per_row"), ("per_row", "per_tensor"), ("block_1x128", "block_128x128")}


def can_run(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether a kernel takes these, and is quicker than the library."""
    return _takes(a, b) and (a.shape[0] <= FEW_TOKENS or tiled.suits(a.shape[0], b.shape[0]))


def suits_tiles(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    """Whether tiled.py takes these, and is quicker than the library."""
    return _takes(a, b) and tiled.suits(a.shape[0], b.shape[0])


def _takes(a: QuantizedTensor, b: QuantizedTensor) -> bool:
    is_known = (a.scaling.kind, b.scaling.kind) in PAIRS
    is_e4m3 = a.scaling.dtype == b.scaling.dtype == torch.float8_e4m3fn
    fits = a.shape[1] == b.shape[1] and a.shape[1] % BLOCK_K == 0 and 0 not in (*a.shape, *b.shape)
    return is_known and is_e4m3 and fits and all(q.qdata.data_ptr() % 16 == 0 for q in (a, b))


def skinny_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """As octavo.ops.gemm.skinny_mm.skinny_mm, for what can_run accepts."""
    multiply = narrow.narrow_mm if a.shape[0] <= FEW_TOKENS else tiled.tiled_mm
    return multiply(a, b, bias, out_dtype)
