"""The grouped GEMM of gate and up for few rows a group, with SwiGLU and the quantizer in it: codes leave, no product.

A program owns the same 128 columns of gate and of up, which are one block of the activation's codes. Sums, roundings
and scales are those of the three kernels one after the other, instruction by instruction.
Legend: E groups, R rows of all groups, F width of gate, of up and of out, K in; a [R, K], b [E * 2F, K], out [R, F].
"""

import torch
import triton
import triton.language as tl

from octavo.numerics.infinity import infinity_flag
from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.activation.swiglu.triton import swiglu_values
from octavo.ops.gemm.grouped_mm.triton import (
    LEAST_GROUPS,
    SLAB,
    clear_tile,
    num_tiles,
    place_of,
    rows_of_tile,
)
from octavo.ops.quantize.triton.casts import round_to
from octavo.ops.quantize.triton.device import amax_over, decode_scale_of, note_infinite, quant_scale_of
from octavo.ops.quantize.triton.plan import SOURCE_TYPES, Output, rule_of_rows

# Rows a group on average up to which it is taken: two products fit no tiles of more than 32 rows.
FEW_ROWS = 16
FEWEST_ROWS = 8  # a group on average: up to here most have no more than 16
WARPS, STAGES = 4, 3


@triton.jit(do_not_specialize=("stride_sa_slab", "R"))  # which differ from step to step
def gated_row_tiles(
    out, out_scale, infinite, a, a_scale, b, b_scale, offsets, slots, stride_sa, stride_sa_slab, R, F, K, E,
    SLOTS: tl.constexpr, GROUPS: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_F: tl.constexpr, SLAB: tl.constexpr,
    STAGES: tl.constexpr, DTYPE: tl.constexpr, RULE: tl.constexpr,
):  # fmt: skip
    """One tile of out and its scales; where rows are of no group, codes of zeros. See row_tiles of grouped_mm.

    The tile is turned: the weight is on the matrix instruction's first side.
    """
    num_blocks = F // BLOCK_F
    tile, block = tl.program_id(0) // num_blocks, tl.program_id(0) % num_blocks
    column = block * BLOCK_F
    # A group's tiles follow each other, so that one of many rows finds its weight in the cache.
    group, first, end = place_of(offsets, tile, R, E, GROUPS, BLOCK_M)
    m, n, k = tl.arange(0, BLOCK_M), tl.arange(0, BLOCK_F), tl.arange(0, SLAB)
    is_row = m < end - first
    scale_places = out_scale + block.to(tl.int64) * R + first + m
    if (group < E) & (first < end):
        a_tile, a_scales = rows_of_tile(a, a_scale, slots, stride_sa, first, end, K, SLOTS, BLOCK_M, SLAB)
        slabs = K // SLAB
        gate_tile = b + (group.to(tl.int64) * 2 * F + column) * K + (n[:, None] * K + k[None, :])
        up_tile = gate_tile + F.to(tl.int64) * K
        gate_scales = b_scale + (group.to(tl.int64) * 2 * num_blocks + block) * slabs  # a block is a tile's width
        up_scales = gate_scales + num_blocks * slabs
        gate = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
        up = tl.zeros([BLOCK_F, BLOCK_M], tl.float32)
        for slab in tl.range(0, slabs, num_stages=STAGES):
            x = tl.load(a_tile + slab * SLAB, mask=is_row[:, None], other=0.0)
            gate_codes, up_codes = tl.load(gate_tile + slab * SLAB), tl.load(up_tile + slab * SLAB)
            of_rows = tl.load(a_scales + slab * stride_sa_slab)[None, :]
            of_slab = tl.dot(gate_codes, tl.trans(x)) * of_rows
            gate = tl.fma(of_slab, tl.load(gate_scales + slab), gate)
            of_slab = tl.dot(up_codes, tl.trans(x)) * of_rows
            up = tl.fma(of_slab, tl.load(up_scales + slab), up)
        values = tl.trans(round_to(swiglu_values(round_to(gate, DTYPE), round_to(up, DTYPE)), DTYPE))
        amaxes = amax_over(values, 1)
        note_infinite(infinite, amaxes)
        tl.store(scale_places, decode_scale_of(amaxes, RULE, 0), mask=is_row)
        codes = (values * quant_scale_of(amaxes, RULE, 0)[:, None]).to(RULE[1])
        places = out + first.to(tl.int64) * F + column + (m[:, None] * F + n[None, :])
        tl.store(places, codes, mask=is_row[:, None])
    else:
        tl.store(scale_places, decode_scale_of(tl.zeros([BLOCK_M], tl.float32), RULE, 0), mask=is_row)
        clear_tile(out, first, end, column, F, BLOCK_M, BLOCK_F)


def can_fuse(a: QuantizedTensor, whole: QuantizedTensor, num_rows: int, num_groups: int, scaling: Scaling) -> bool:
    """Whether grouped_swiglu takes rows of a [.., K] times one operand [E * 2F, K] of all groups, and is quicker.

    Args:
        num_rows: R.
    """
    kinds = (a.scaling.kind, whole.scaling.kind, scaling.kind)
    if kinds != ("block_1x128", "block_128x128", "block_1x128") or num_rows > FEW_ROWS * num_groups:
        return False
    both, K = whole.shape[0] // num_groups, a.shape[1]
    return 0 not in (num_rows, both) and both % (2 * SLAB) == 0 and K % SLAB == 0


def tile_rows(num_rows: int, num_groups: int) -> int:
    """BLOCK_M that is the quickest on an H200 by the rows that groups have on average."""
    return 16 if num_rows <= FEWEST_ROWS * num_groups else 32


def grouped_swiglu(
    a: QuantizedTensor,
    whole: QuantizedTensor,
    offsets: torch.Tensor,
    slots: torch.Tensor | None,
    slots_per_row: int,
    scaling: Scaling,
    dtype: torch.dtype,
) -> QuantizedTensor:
    """Codes [R, F] of what can_fuse accepts."""
    R, K, E = a.shape[0] if slots is None else slots.shape[0], a.shape[1], offsets.shape[0]
    F = whole.shape[0] // E // 2
    made = Output.of(R, F, scaling).allocate(a.device, False)
    block_m = tile_rows(R, E)
    grid = (num_tiles(R, E, block_m) * (F // SLAB),)
    with on_device_of(made.qdata):
        launch = launcher_of(
            gated_row_tiles, SLOTS=slots_per_row, GROUPS=max(LEAST_GROUPS, triton.next_power_of_2(E)), BLOCK_M=block_m,
            BLOCK_F=SLAB, SLAB=SLAB, STAGES=STAGES, DTYPE=SOURCE_TYPES[dtype],
            RULE=rule_of_rows(scaling, dtype), num_warps=WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        flag, scales = infinity_flag(made.qdata.device), (a.scale.stride(0), a.scale.stride(1))
        operands = (a.qdata, a.scale, whole.qdata, whole.scale.contiguous(), offsets, slots)
        launch(grid, made.qdata, made.scale, flag, *operands, *scales, R, F, K, E)
    return made
