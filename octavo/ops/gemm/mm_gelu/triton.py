"""Triton FP8 GEMM with bias, GeLU and quantization in its epilogue; its rounding points are those of separate ops.

A program owns a BLOCK_M x BLOCK_N tile and walks K in order. Legend: M tokens, N out, K in; a [M, K], b [N, K] codes.
"""

import torch
import triton
import triton.language as tl

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.activation.gelu.triton import gelu_values
from octavo.ops.gemm.hp_mm.triton import GROUP_M, Tile
from octavo.ops.quantize.triton.casts import round_to

SMALL = Tile(64, 128, 128, 4, 4)
LARGE = Tile(128, 128, 128, 8, 4)
ALIGNMENT = 16  # of K: narrower loads spill


@triton.jit
def gelu_tiles(
    out, out_scale, a, b, a_scale, b_scale, bias, quant_scale, M, N, K,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP_M: tl.constexpr, STAGES: tl.constexpr,
    HIDDEN: tl.constexpr,
):  # fmt: skip
    """One tile of out = quantize(gelu(a @ b.t() + bias))."""
    tiles_m = tl.cdiv(M, BLOCK_M)
    in_group = GROUP_M * tl.cdiv(N, BLOCK_N)
    group = tl.program_id(0) // in_group
    rows_in_group = tl.minimum(tiles_m - group * GROUP_M, GROUP_M)
    tile_m = group * GROUP_M + tl.program_id(0) % in_group % rows_in_group
    tile_n = tl.program_id(0) % in_group // rows_in_group
    m = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    n = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    # Rows past the end read the last one: their results are not stored, and no load needs a mask along them.
    a_rows = a + tl.minimum(m, M - 1).to(tl.int64)[:, None] * K
    b_rows = b + tl.minimum(n, N - 1).to(tl.int64)[:, None] * K
    acc = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
    for start in tl.range(0, K, BLOCK_K, num_stages=STAGES):
        is_k = (k < K - start)[None, :]
        x = tl.load(a_rows + start + k[None, :], mask=is_k, other=0.0)
        w = tl.load(b_rows + start + k[None, :], mask=is_k, other=0.0)
        acc = tl.dot(x, tl.trans(w), acc)
    hidden = round_to(acc * (tl.load(a_scale) * tl.load(b_scale)), HIDDEN)
    if bias is not None:
        hidden += tl.load(bias + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    factor = tl.load(quant_scale)
    codes = (round_to(gelu_values(hidden), HIDDEN) * factor).to(out.dtype.element_ty)
    places = out + m.to(tl.int64)[:, None] * N + n[None, :]
    tl.store(places, codes, mask=(m < M)[:, None] & (n < N)[None, :])
    if tl.program_id(0) == 0:
        tl.store(out_scale, tl.div_rn(1.0, factor))


HIDDEN_TYPES = {torch.bfloat16: tl.bfloat16, torch.float16: tl.float16, torch.float32: tl.float32}


def can_run(a: QuantizedTensor, b: QuantizedTensor, scaling: Scaling) -> bool:
    """Whether the kernel takes these: E4M3 with one scale a tensor, K a multiple of ALIGNMENT, none empty."""
    scalings = (a.scaling, b.scaling, scaling)
    is_known = all(s.is_per_tensor and s.dtype == torch.float8_e4m3fn for s in scalings)
    return is_known and a.shape[1] % ALIGNMENT == 0 and 0 not in (*a.shape, *b.shape)


def mm_gelu(
    a: QuantizedTensor,
    b: QuantizedTensor,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor,
    hidden_dtype: torch.dtype,
) -> QuantizedTensor:
    """As octavo.ops.gemm.mm_gelu.mm_gelu, for what can_run accepts."""
    (M, K), N = a.shape, b.shape[0]
    out = torch.empty(M, N, dtype=scaling.dtype, device=a.device)
    scale = torch.empty(1, 1, dtype=torch.float32, device=a.device)
    tile = SMALL if SMALL.block_m >= M else LARGE
    grid = (triton.cdiv(M, tile.block_m) * triton.cdiv(N, tile.block_n),)
    with on_device_of(out):
        launch = launcher_of(
            gelu_tiles, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_K=tile.block_k, GROUP_M=GROUP_M,
            STAGES=tile.stages, HIDDEN=HIDDEN_TYPES[hidden_dtype], num_warps=tile.num_warps, enable_fp_fusion=False,
        )  # fmt: skip
        operands = (a.qdata.contiguous(), b.qdata.contiguous(), a.scale, b.scale, bias, quant_scale)
        launch(grid, out, scale, *operands, M, N, K)
    return QuantizedTensor(out, scale, scaling)
