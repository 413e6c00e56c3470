"""Grouped GEMMs through torch on a GPU, which takes offsets where they are: nothing waits for the device.

torch._grouped_mm takes bf16; torch._scaled_grouped_mm takes E4M3 codes with one scale a row. What torch has no grouped
GEMM for runs through our own (triton.py), or one group after the other (reference.py).
"""

import torch

from octavo.numerics.quantized import QuantizedTensor

ALIGNMENT = 16  # rows: torch asks it of groups that are summed over, and of the codes' widths


def takes(*tensors: torch.Tensor) -> bool:
    """Whether torch._grouped_mm takes these operands."""
    return all(x.is_cuda and x.dtype == torch.bfloat16 and _is_wide(*x.shape) for x in tensors)


def takes_codes(*operands: QuantizedTensor) -> bool:
    """Whether torch._scaled_grouped_mm takes these operands."""
    return all(
        q.qdata.is_cuda
        and q.qdata.dtype == torch.float8_e4m3fn
        and q.scaling.kind == "per_row"
        and _is_wide(*q.qdata.shape)
        for q in operands
    )


def takes_rows(a: QuantizedTensor, whole: QuantizedTensor, num_groups: int) -> bool:
    """Whether torch._scaled_grouped_mm takes a [R, K] and one operand [E * N, K] of all groups."""
    return takes_codes(a, whole) and _is_wide(whole.shape[0] // num_groups)


def _is_wide(*sizes: int) -> bool:
    return all(size and size % ALIGNMENT == 0 for size in sizes[-2:])


def grouped_mm(x: torch.Tensor, weights: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """x [R, K] and weights [E, N, K] in bf16 -> [R, N] bf16."""
    out: torch.Tensor = torch._grouped_mm(x.contiguous(), weights.transpose(-2, -1), offs=offsets)
    return _without_tail(out, offsets)


def grouped_mm_columns(a: torch.Tensor, b: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """a [N, R] and b [K, R] in bf16 -> [E, N, K] bf16."""
    return torch._grouped_mm(a, b.t(), offs=offsets)


def scaled_grouped_mm(a: QuantizedTensor, whole: QuantizedTensor, offsets: torch.Tensor) -> torch.Tensor:
    """Codes [R, K] and one operand [E * N, K] of all groups -> [R, N] bf16, without fast accumulation."""
    num_groups = offsets.shape[0]
    out: torch.Tensor = torch._scaled_grouped_mm(
        a.qdata,
        whole.qdata.view(num_groups, -1, whole.shape[1]).transpose(-2, -1),
        a.scale.reshape(-1),
        whole.scale.view(num_groups, -1),
        offs=offsets,
        out_dtype=torch.bfloat16,
        use_fast_accum=False,
    )
    return _without_tail(out, offsets)


def scaled_grouped_mm_columns(
    a: QuantizedTensor, b: QuantizedTensor, offsets: torch.Tensor, fast_accum: bool
) -> torch.Tensor:
    """Codes [N, R] and [K, R] -> [E, N, K] bf16; both have one scale a row for all groups."""
    scale_a, scale_b = (q.scale.reshape(-1).repeat(offsets.shape[0]) for q in (a, b))
    out: torch.Tensor = torch._scaled_grouped_mm(
        a.qdata, b.qdata.t(), scale_a, scale_b, offs=offsets, out_dtype=torch.bfloat16, use_fast_accum=fast_accum
    )
    return out


def _without_tail(out: torch.Tensor, offsets: torch.Tensor) -> torch.Tensor:
    """Zeros in the rows of no group, which the library leaves as it found them."""
    from octavo.ops.gemm.grouped_mm import triton

    return triton.clear_tail(out, offsets)
