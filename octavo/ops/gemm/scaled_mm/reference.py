"""Ground truth of the scaled GEMM: slab by slab over K, scales applied in fp32. Device-free torch.

Legend: M tokens, N out, K in; a [M, K] and b [N, K] codes, both K-major.
"""

import torch

from octavo.numerics.quantized import QuantizedTensor

SLAB = 128  # columns of K between two applications of block scales


def scaled_mm_reference(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """a @ b.t() by the contract's order of operations.

    E4M3 x E4M3 sums are exact in fp64, so the bits depend on neither M, batch nor library; E5M2 x E4M3 sums are fp64.

    Returns:
        [M, N] of out_dtype.
    """
    is_block = a.scaling.block_size[1] == SLAB
    acc = _block_product(a, b) if is_block else _whole_product(a, b)  # [M, N] fp32
    if bias is not None:
        acc = acc + bias.float()
    return acc.to(out_dtype)


def _whole_product(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    """One sum over K, scaled once (per tensor and per row)."""
    product = a.qdata.double() @ b.qdata.double().t()  # [M, N] fp64
    return (product * (a.scale.double() * b.scale.double().t())).float()


def _block_product(a: QuantizedTensor, b: QuantizedTensor) -> torch.Tensor:
    """acc = fma(p * s1, s2, acc) a slab; s1 the scale of the 1x128 operand, s2 that of the 128x128 one."""
    a_scale, b_scale = _per_slab_scale(a), _per_slab_scale(b)  # [M, S], [N, S]
    rows_first = a.scaling.block_size[0] == 1
    a_codes, b_codes = a.qdata.double(), b.qdata.double()
    acc = torch.zeros(a.shape[0], b.shape[0], dtype=torch.float32, device=a.device)
    for slab in range(a_scale.shape[1]):
        k = slice(slab * SLAB, (slab + 1) * SLAB)
        p = (a_codes[:, k] @ b_codes[:, k].t()).float()  # [M, N]
        s_a, s_b = a_scale[:, slab, None], b_scale[None, :, slab]
        first, second = (s_a, s_b) if rows_first else (s_b, s_a)
        acc = ((p * first).double() * second.double() + acc.double()).float()
    return acc


def _per_slab_scale(q: QuantizedTensor) -> torch.Tensor:
    """Block scales with one row an operand row: [rows, ceil(K/128)] fp32."""
    block_rows = q.scaling.block_size[0]
    return q.scale if block_rows == 1 else q.scale.repeat_interleave(block_rows, dim=0)[: q.shape[0]]
