"""The high-precision GEMM through torch; on a CPU its capabilities choose the product's dtype."""

import torch

# Whether this CPU has bf16 dot products (without them torch's bf16 matmul can be 700 times slower than fp32). A
# capability and no timing: two runs on one machine must choose alike, or a resumed run would differ in bits.
CPU_BF16_IS_FAST = bool(torch.cpu._is_avx512_bf16_supported())


def hp_mm_library(
    x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, out_dtype: torch.dtype
) -> torch.Tensor:
    """x @ weight.t() in the operands' dtype, or in fp32 where that is wanted or quicker.

    Returns:
        [M, N] of out_dtype.
    """
    if not x.is_meta and torch.is_autocast_enabled(x.device.type):  # the caller has chosen the dtypes
        with torch.autocast(x.device.type, enabled=False):
            return hp_mm_library(x, weight, bias, out_dtype)
    if x.is_cuda and out_dtype == torch.float32 and x.dtype != torch.float32:
        out = torch.mm(x, weight.t(), out_dtype=torch.float32)  # 16-bit operands, fp32 sums: no wide copies
        return out if bias is None else out + bias
    on_slow_cpu = not x.is_cuda and x.dtype == torch.bfloat16 and not CPU_BF16_IS_FAST
    if out_dtype == torch.float32 or on_slow_cpu:
        x, weight = x.float(), weight.float()
    # Not F.linear, which octavo.autocast takes for one of torch's own linears.
    out = x @ weight.t() if bias is None else torch.addmm(bias.to(x.dtype), x, weight.t())  # [M, N]
    # Not out.to(out_dtype) always: torch 2.11 compiles a Function whose output is its own .to() with zero gradients.
    return out if out.dtype == out_dtype else out.to(out_dtype)
