"""The high-precision GEMM through torch; on a CPU its capabilities choose the product's dtype."""

import functools

import torch


def hp_mm_library(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x @ weight.t() in the operands' dtype, or in fp32 where that is wanted or quicker.

    Returns:
        [M, N] of out_dtype.
    """
    is_cpu = x.device.type == "cpu"
    wide = out_dtype == torch.float32 or (is_cpu and x.dtype == torch.bfloat16 and not cpu_bf16_is_fast())
    if wide:
        x, weight = x.float(), weight.float()
    out = x @ weight.t()  # [M, N]
    if bias is not None:
        out = out + bias.to(out.dtype)
    return out.to(out_dtype)


@functools.cache
def cpu_bf16_is_fast() -> bool:
    """Whether this CPU has bf16 dot products (without them torch's bf16 matmul can be 700 times slower than fp32).

    A capability and no timing: two runs on one machine must choose alike, or a resumed run would differ in bits.
    """
    return bool(torch.cpu._is_avx512_bf16_supported())
