"""Exact mode for few tokens: tiles with a whole sum over K each, where they have the library's bits.

On an H200 they had them for the shapes that were tried; no document promises it. So a product's shape is compared
before its first one, as exact.py of scaled_mm does with the library's own sizes, and without them the library goes on.
"""

import functools
import logging

import torch

from octavo.numerics.quantized import QuantizedTensor
from octavo.ops._runtime.kernel_requests import leaves_out_launches
from octavo.ops.gemm.scaled_mm.exact import GemmProblem, describe, find_dependent_rows
from octavo.ops.gemm.skinny_mm.triton import suits_tiles, tiled

# one of each number of tiles of tokens, which decides the shape of the tiles, with a last one that is not full
CHECKED_ROWS = (33, 64, 100, 128, 160, 192, 250, 256)

logger = logging.getLogger(__name__)
_has_bits: dict[GemmProblem, bool] = {}


def can_run(a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype) -> bool:
    """Whether the tiles take these, are quicker than the library, and have its bits."""
    if not suits_tiles(a, b):
        return False
    N, K = b.shape
    bias_dtype = None if bias is None else bias.dtype
    product = GemmProblem(a.scaling, b.scaling, N, K, out_dtype, bias_dtype, a.device)
    known = _has_bits.get(product)
    if known is None:
        if torch.cuda.is_available() and torch.cuda.is_current_stream_capturing():
            return False  # the library's check says what to do
        differing = find_dependent_rows(product, CHECKED_ROWS, whole_sums_mm)
        if leaves_out_launches():
            return True  # the tiles were named, not run
        known = _has_bits[product] = not differing
        if differing:
            sizes = ", ".join(map(str, differing))
            logger.warning("exact mode: %s goes by the library, our bits differ at M = %s", describe(product), sizes)
    return known


whole_sums_mm = functools.partial(tiled.tiled_mm, splits_k=False)
