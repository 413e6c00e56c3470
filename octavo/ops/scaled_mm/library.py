"""The scaled GEMM through libraries: cuBLASLt by torch.nn.functional.scaled_mm, or decoded fp32 products.

Same quantization as the reference, another order of sums. The layout rules of cuBLASLt on Hopper live here alone.
Legend: M tokens, N out, K in; a [M, K] and b [N, K] codes, both K-major.
"""

import torch
import torch.nn.functional as F

from octavo.numerics.quantized import QuantizedTensor


def decoded_mm(
    a: QuantizedTensor, b: QuantizedTensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """Decode both operands to fp32 and multiply: any device, any scaling, any pair of formats.

    Returns:
        [M, N] of out_dtype.
    """
    with torch.autocast(a.device.type, enabled=False):
        out = a.dequantize() @ b.dequantize().t()
    if bias is not None:
        out += bias.float()
    return out.to(out_dtype)


def scaled_mm_cuda(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    out_dtype: torch.dtype,
    *,
    fast_accum: bool = False,
) -> torch.Tensor:
    """F.scaled_mm with explicit recipes; operands padded to what cuBLASLt takes, the result cut back.

    Zero-size products and what torch refuses (E5M2 x E5M2, E5M2 with block scales) are decoded.

    Returns:
        [M, N] of out_dtype.
    """
    rows, cols = a.shape[0], b.shape[0]
    is_block = a.scaling.block_size[1] == 128
    num_e5m2 = [a.scaling.dtype, b.scaling.dtype].count(torch.float8_e5m2)
    if 0 in (rows, cols, a.shape[1]) or num_e5m2 > (0 if is_block else 1):
        return decoded_mm(a, b, bias, out_dtype)
    quantum = 128 if is_block else 16
    a_codes, b_codes = _pad(a.qdata, 64 if is_block else 16, quantum), _pad(b.qdata, quantum, quantum)
    both_per_tensor = a.scaling.is_per_tensor and b.scaling.is_per_tensor
    recipe_a, scale_a = _recipe(a, a_codes.shape[0], by_row=not both_per_tensor)
    recipe_b, scale_b = _recipe(b, b_codes.shape[0], by_row=not both_per_tensor)
    if recipe_b is F.ScalingType.RowWise:
        scale_b = scale_b.t()  # [1, N]
    in_epilogue = out_dtype == torch.bfloat16 and (bias is None or _adds_bias(bias, cols, b_codes.shape[0], is_block))
    out = F.scaled_mm(
        a_codes,
        b_codes.t(),
        scale_a,
        recipe_a,
        scale_b,
        recipe_b,
        bias=bias if in_epilogue else None,
        output_dtype=torch.bfloat16 if in_epilogue else torch.float32,
        use_fast_accum=fast_accum and not is_block,
    )
    if out.shape != (rows, cols):
        out = out[:rows, :cols].contiguous()  # [M, N]
    if bias is not None and not in_epilogue:
        out = out + bias.float()  # rounded once, after the bias
    return out.to(out_dtype)


def _adds_bias(bias: torch.Tensor, cols: int, padded_cols: int, is_block: bool) -> bool:
    """Whether the library's epilogue takes this bias: bf16, as long as the product is wide, and no block scales."""
    return bias.dtype == torch.bfloat16 and cols == padded_cols and not is_block


def _pad(codes: torch.Tensor, row_quantum: int, col_quantum: int) -> torch.Tensor:
    """Zero codes up to multiples of the quanta."""
    pad_rows, pad_cols = -codes.shape[0] % row_quantum, -codes.shape[1] % col_quantum
    if not pad_rows and not pad_cols:
        return codes
    return F.pad(codes.view(torch.uint8), (0, pad_cols, 0, pad_rows)).view(codes.dtype)


def _recipe(q: QuantizedTensor, padded_rows: int, *, by_row: bool) -> tuple["F.ScalingType", torch.Tensor]:
    """torch's name of q's scaling and its scale in the strides that cuBLASLt wants."""
    kind, missing = q.scaling.kind, padded_rows - q.shape[0]
    if kind == "per_tensor":
        if by_row:  # the other operand has one scale a row
            return F.ScalingType.RowWise, q.scale.expand(padded_rows, 1).contiguous()
        return F.ScalingType.TensorWise, q.scale
    if kind == "block_128x128":
        scale = q.scale if q.scale.shape[1] % 4 == 0 else F.pad(q.scale, (0, -q.scale.shape[1] % 4), value=1.0)
        return F.ScalingType.BlockWise128x128, scale.contiguous().t()  # [roundup4(K/128), N/128]
    scale = F.pad(q.scale, (0, 0, 0, missing), value=1.0) if missing else q.scale
    if kind == "per_row":
        return F.ScalingType.RowWise, scale
    return F.ScalingType.BlockWise1x128, scale.t().contiguous().t()  # strides (1, M), as quantize lays them out
