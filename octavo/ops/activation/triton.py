"""Activation and quantization in one kernel, forward and backward, bit-equal to the plain kernels one after the other.

x is [T, 2F] for "swiglu" (gate half first) and [T, F] for "gelu" (with a bias [F] or none); T tokens, F a multiple of
128. OUT and RULE are those of ops/quantize. What has a known place for its scales goes through that op's `emit`. A tile
that is stored in both directions is computed once and kept in words of two rows' bf16 (or fp16) values: `emit_words`
needs 28 instructions an element where computing it for each direction takes 42, and handing it to emit_tile 50.
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops.activation.reference import ForwardColumns
from octavo.ops.gelu.triton import BIAS_TILE_ROWS, gelu_gradients, gelu_values, new_bias_sums, sum_pairs
from octavo.ops.quantize.triton import (
    NONE,
    Emission,
    Step,
    _fold,
    _known_amax,
    _largest,
    _quant_scale,
    _scale,
    _store_uniform_scale,
    _uniform_scale,
    emit,
    emit_tile,
    load_values,
    on_device_of,
)
from octavo.ops.swiglu.triton import is_inside, load_tile, rows_contiguous, swiglu_gradients, swiglu_values, tile_places

# A tile of words: TILE x TILE elements by 4 warps, 8 x 8 of each half of its columns by one thread, so that both
# directions store whole sectors of 32 bytes.
TILE = 128
NUM_WARPS = 4
SIDE = tl.constexpr(128)
PIECE = tl.constexpr(64)  # columns at a time
SPREAD = tl.constexpr(16)  # threads along a column
EACH = tl.constexpr(8)  # rows of a thread
assert TILE == BIAS_TILE_ROWS, "plain and fused bias gradients are summed tile by tile in one order"
AMAX_TOKENS = 512  # rows of a tile whose amaxes are folded
# A row that shares one scale is held in registers whole, up to this width; wider ones are read twice.
MAX_WHOLE_ROW = 16384
ROW_THREAD_ELEMENTS = 32
NO_OUT = (None,) * 8
NO_RULE = (*NONE, *NONE, False)


@triton.jit
def round_to(values, like):
    """Values as like's dtype rounds them, in fp32."""
    return values.to(like.dtype.element_ty).to(tl.float32)


# The functions *_at are emit's PRODUCE: values at rows first_t + t and columns first_f + f, 0 outside.


@triton.jit
def load_at(x, stride, first_t, first_f, t, f, is_in):
    """x there, in fp32."""
    return tl.load(x + (first_t * stride + first_f) + (t * stride + f), mask=is_in, other=0.0).to(tl.float32)


@triton.jit
def saved_at(x, scale, stride, first_t, first_f, t, f, is_in, T):
    """The saved input there: as it is, or its codes times their 1x128 scales (f stays within one block)."""
    values = load_at(x, stride, first_t, first_f, t, f, is_in)
    if scale is not None:
        values *= tl.load(scale + ((first_f // 128) * T + first_t) + t, mask=first_t + t < T, other=0.0)
    return values


@triton.jit
def biased(x, bias, first_f, f, is_in):
    """x + bias."""
    if bias is not None:
        x += tl.load(bias + first_f + f).to(tl.float32)
    return x


@triton.jit
def swiglu_at(inputs, first_t, first_f, t, f, is_in):
    """The activation of x."""
    like, x, scale, _bias, _stride_like, stride, T, F = inputs
    gate = saved_at(x, scale, stride, first_t, first_f, t, f, is_in, T)
    up = saved_at(x, scale, stride, first_t, first_f + F, t, f, is_in, T)
    return round_to(swiglu_values(gate, up), like)


@triton.jit
def gelu_at(inputs, first_t, first_f, t, f, is_in):
    """The activation of x + bias."""
    like, x, scale, bias, _stride_like, stride, T, _F = inputs
    z = biased(saved_at(x, scale, stride, first_t, first_f, t, f, is_in, T), bias, first_f, f, is_in)
    values = gelu_values(z)
    if bias is not None:
        values = tl.where(is_in, values, 0.0)
    return round_to(values, like)


@triton.jit
def grad_gate_at(inputs, first_t, first_f, t, f, is_in):
    """The gradient by gate, in the first F columns."""
    grad, x, scale, _bias, stride_grad, stride, T, F = inputs
    wide = load_at(grad, stride_grad, first_t, first_f, t, f, is_in)
    gate = saved_at(x, scale, stride, first_t, first_f, t, f, is_in, T)
    up = saved_at(x, scale, stride, first_t, first_f + F, t, f, is_in, T)
    grad_gate, _ = swiglu_gradients(wide, gate, up)
    return round_to(grad_gate, grad)


@triton.jit
def grad_up_at(inputs, first_t, first_f, t, f, is_in):
    """The gradient by up, in the last F columns."""
    grad, x, scale, _bias, stride_grad, stride, T, F = inputs
    wide = load_at(grad, stride_grad, first_t, first_f - F, t, f, is_in)
    gate = saved_at(x, scale, stride, first_t, first_f - F, t, f, is_in, T)
    _, grad_up = swiglu_gradients(wide, gate, gate)
    return round_to(grad_up, grad)


@triton.jit
def grad_gelu_at(inputs, first_t, first_f, t, f, is_in):
    """The gradient by x."""
    grad, x, scale, bias, stride_grad, stride, T, _F = inputs
    wide = load_at(grad, stride_grad, first_t, first_f, t, f, is_in)
    z = biased(saved_at(x, scale, stride, first_t, first_f, t, f, is_in, T), bias, first_f, f, is_in)
    return round_to(gelu_gradients(wide, z), grad)


@triton.jit
def low_half(word, RULE: tl.constexpr):
    """The even rows of words, in fp32."""
    if RULE[15] == tl.bfloat16:
        values = (word << 16).to(tl.float32, bitcast=True)
    else:
        values = (word & 0xFFFF).to(tl.uint16).to(RULE[15], bitcast=True).to(tl.float32)
    return values


@triton.jit
def high_half(word, RULE: tl.constexpr):
    """The odd rows of words, in fp32."""
    if RULE[15] == tl.bfloat16:
        values = (word & 0xFFFF0000).to(tl.float32, bitcast=True)
    else:
        values = (word >> 16).to(tl.uint16).to(RULE[15], bitcast=True).to(tl.float32)
    return values


@triton.jit
def even_rows():
    """The even rows of a tile in the order in which words hold them: a thread's registers step through its own rows."""
    half = tl.arange(0, SIDE // 2)
    return half % SPREAD * EACH + half // SPREAD * 2


@triton.jit
def make_words(PRODUCE: tl.constexpr, inputs, first_t, first_f, left_t, RULE: tl.constexpr):
    """Words [64, 8, 8] of 128 rows and PIECE columns."""
    # Three dims keep 8 columns a thread for every width of element.
    t = even_rows().to(RULE[16])[:, None, None]
    f = tl.arange(0, 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    everywhere = f < PIECE
    even = PRODUCE(inputs, first_t, first_f, t, f, (t < left_t) & everywhere)
    odd = PRODUCE(inputs, first_t, first_f, t + 1, f, (t + 1 < left_t) & everywhere)
    low = even.to(RULE[15]).to(tl.uint16, bitcast=True).to(tl.uint32)
    return low | (odd.to(RULE[15]).to(tl.uint16, bitcast=True).to(tl.uint32) << 16)


@triton.jit
def store_columns(word, OUT, quant_scale, first_t, first_f, left_t, T, width, RULE: tl.constexpr):
    """Codes of PIECE columns, transposed; quant_scale is used where a tile has one."""
    values = tl.reshape(tl.join(low_half(word, RULE), high_half(word, RULE)), [SIDE // 2, PIECE, 2])
    column = tl.arange(0, PIECE)
    if RULE[7] == "group":
        amax = _largest(tl.max(tl.abs(values), axis=2), 0)  # [PIECE]
        tl.store(OUT[3] + (first_t // SIDE) * width + first_f + column, _scale(amax, RULE, 7))
        codes = (values * _quant_scale(amax, RULE, 7)[None, :, None]).to(RULE[8])
    elif RULE[7] == "line":
        amax = _known_amax(OUT[5] + first_f + column, column < PIECE)
        tl.store(OUT[3] + first_f + column, _scale(amax, RULE, 7), mask=(column < PIECE) & (first_t == 0))
        codes = (values * _quant_scale(amax, RULE, 7)[None, :, None]).to(RULE[8])
    else:
        codes = (values * quant_scale).to(RULE[8])
    codes = tl.permute(tl.reshape(codes, [EACH // 2, SPREAD, PIECE, 2]), (2, 1, 0, 3))
    f = column[:, None].to(RULE[16])
    t = tl.arange(0, SIDE)[None, :]
    places = OUT[2] + (first_f * T + first_t) + (f * T + t)
    tl.store(places, tl.reshape(codes, [PIECE, SIDE]), mask=(t < left_t) & (f < PIECE))


@triton.jit
def store_rows(word, row_q, even_scale, odd_scale, first_t, first_f, left_t, width, RULE: tl.constexpr):
    """Codes of the rows of PIECE columns."""
    t = even_rows().to(RULE[16])[:, None, None]
    f = tl.arange(0, 8)[None, :, None] * 8 + tl.arange(0, 8)[None, None, :]
    places = row_q + (first_t * width + first_f) + (t * width + f)
    tl.store(places, (low_half(word, RULE) * even_scale).to(RULE[1]), mask=(t < left_t) & (f < PIECE))
    tl.store(places + width, (high_half(word, RULE) * odd_scale).to(RULE[1]), mask=(t + 1 < left_t) & (f < PIECE))


@triton.jit
def largest_of_rows(first, second):
    """Each row's largest magnitude in both pieces."""
    size = tl.maximum(tl.max(tl.abs(first), axis=2), tl.max(tl.abs(second), axis=2))
    return _largest(size, 1)


@triton.jit
def row_scales(amax, OUT, t, first_t, tile_f, left_t, T, RULE: tl.constexpr):
    """quant_scale [64, 1, 1] of rows t, from the tile's amax or the line's; stores the decode scales."""
    if RULE[0] == "line":
        amax = _known_amax(OUT[4] + first_t + t, t < left_t)
        tl.store(OUT[1] + first_t + t, _scale(amax, RULE, 0), mask=(t < left_t) & (tile_f == 0))
    else:
        tl.store(OUT[1] + tile_f.to(tl.int64) * T + first_t + t, _scale(amax, RULE, 0), mask=t < left_t)
    return _quant_scale(amax, RULE, 0)[:, None, None]


@triton.jit
def emit_words(PRODUCE: tl.constexpr, inputs, OUT, bias_sums, tile_t, tile_f, T, width, RULE: tl.constexpr):
    """emit of one 128 x 128 tile of a matrix [T, width] (width a multiple of 128) with columns, computed once.

    bias_sums: where the tile's column sums go, or None.
    """
    first_t = tile_t.to(tl.int64) * SIDE
    first_f = tile_f.to(tl.int64) * SIDE
    left_t = tl.minimum(T - first_t, SIDE).to(tl.int32)
    is_first = (tile_t == 0) & (tile_f == 0)
    SQUARE: tl.constexpr = RULE[0] == "square" or RULE[7] == "square"
    UNIFORM: tl.constexpr = RULE[7] == "tensor" or RULE[7] == "static"
    column_scale = 1.0
    if UNIFORM:
        column_scale = _uniform_scale(0.0, OUT[5], OUT[6], RULE, 7)
        _store_uniform_scale(OUT[3], column_scale, 0, is_first, RULE, 7)
    # Columns go out before the next piece comes in, where their scale allows it: fewer registers are live at once.
    word = make_words(PRODUCE, inputs, first_t, first_f, left_t, RULE)
    if bias_sums is not None:
        store_sums(bias_sums, word, tile_t, first_f, width, RULE)
    EARLY: tl.constexpr = RULE[7] != "square" and RULE[7] != "none"
    if EARLY:
        store_columns(word, OUT, column_scale, first_t, first_f, left_t, T, width, RULE)
    tl.debug_barrier()  # or the assembler would start on the next piece already, and spill
    last = make_words(PRODUCE, inputs, first_t, first_f + PIECE, left_t, RULE)
    if bias_sums is not None:
        store_sums(bias_sums, last, tile_t, first_f + PIECE, width, RULE)
    if EARLY:
        store_columns(last, OUT, column_scale, first_t, first_f + PIECE, left_t, T, width, RULE)

    even_amax = 0.0
    odd_amax = 0.0
    amax = 0.0
    if RULE[0] == "group" or SQUARE or RULE[14]:
        even_amax = largest_of_rows(low_half(word, RULE), low_half(last, RULE))
        odd_amax = largest_of_rows(high_half(word, RULE), high_half(last, RULE))
    if SQUARE or RULE[14]:
        amax = tl.max(tl.maximum(even_amax, odd_amax), axis=0)
    if RULE[14]:
        _fold(OUT[7].to(tl.pointer_type(tl.int32)), amax, None)
    if RULE[7] == "square":
        column_scale = _quant_scale(amax, RULE, 7)
        _store_uniform_scale(OUT[3], column_scale, tile_f * tl.cdiv(T, SIDE) + tile_t, is_first, RULE, 7)
        store_columns(word, OUT, column_scale, first_t, first_f, left_t, T, width, RULE)
        store_columns(last, OUT, column_scale, first_t, first_f + PIECE, left_t, T, width, RULE)

    if RULE[0] == "group" or RULE[0] == "line":
        t = even_rows()
        even_scale = row_scales(even_amax, OUT, t, first_t, tile_f, left_t, T, RULE)
        odd_scale = row_scales(odd_amax, OUT, t + 1, first_t, tile_f, left_t, T, RULE)
        store_rows(word, OUT[0], even_scale, odd_scale, first_t, first_f, left_t, width, RULE)
        store_rows(last, OUT[0], even_scale, odd_scale, first_t, first_f + PIECE, left_t, width, RULE)
    elif RULE[0] != "none":
        row_scale = _uniform_scale(amax, OUT[4], OUT[6], RULE, 0)
        _store_uniform_scale(OUT[1], row_scale, tile_t * (width // SIDE) + tile_f, is_first, RULE, 0)
        store_rows(word, OUT[0], row_scale, row_scale, first_t, first_f, left_t, width, RULE)
        store_rows(last, OUT[0], row_scale, row_scale, first_t, first_f + PIECE, left_t, width, RULE)
    tl.debug_barrier()


@triton.jit
def store_sums(bias_sums, word, tile_t, first_f, width, RULE: tl.constexpr):
    """Column sums of PIECE columns, rows added in the order of gelu's column_sums: neighbours first."""
    sums = tl.reshape(low_half(word, RULE) + high_half(word, RULE), [EACH // 2, SPREAD, PIECE])
    sums = tl.reshape(tl.permute(sums, (1, 0, 2)), [SIDE // 2, PIECE])  # by rows
    tl.store(bias_sums + tile_t.to(tl.int64) * width + first_f + tl.arange(0, PIECE), sum_pairs(sums, 6, PIECE))


@triton.jit
def forward_tiles(
    OUT, COPY_OUT, x, bias, stride, T, F,
    KIND: tl.constexpr, IN_WORDS: tl.constexpr, RULE: tl.constexpr, COPY_RULE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Emit a tile of the activation of x, and x's FP8 copy."""
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    tile_t = tl.program_id(0) // num_tiles_f
    tile_f = tl.program_id(0) % num_tiles_f
    PRODUCE: tl.constexpr = swiglu_at if KIND == "swiglu" else gelu_at
    inputs = (x, x, None, bias, stride, stride, T, F)
    if IN_WORDS:
        emit_words(PRODUCE, inputs, OUT, None, tile_t, tile_f, T, F, RULE)
    else:
        emit(PRODUCE, inputs, OUT, tile_t, tile_f, T, F, RULE, BLOCK_T, BLOCK_F)
    if COPY_RULE[0] != "none":
        if KIND == "swiglu":
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, 2 * F, COPY_RULE, BLOCK_T, BLOCK_F)
            tile_f += num_tiles_f
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, 2 * F, COPY_RULE, BLOCK_T, BLOCK_F)
        else:
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, F, COPY_RULE, BLOCK_T, BLOCK_F)


@triton.jit
def backward_tiles(
    OUT, COLUMNS_OUT, bias_sums, grad, x, scale, bias, stride_grad, stride, T, F,
    KIND: tl.constexpr, IN_WORDS: tl.constexpr, RULE: tl.constexpr, COLUMNS_RULE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Emit a tile of the gradient in x's place (of both halves), and one of the activation recomputed from x."""
    num_tiles_f = F // BLOCK_F
    tile_t = tl.program_id(0) // num_tiles_f
    tile_f = tl.program_id(0) % num_tiles_f
    inputs = (grad, x, scale, bias, stride_grad, stride, T, F)
    # Each reads its inputs anew, from the cache: all that the three share does not fit into registers.
    if IN_WORDS:
        if RULE[7] != "none":
            if KIND == "swiglu":
                emit_words(grad_gate_at, inputs, OUT, None, tile_t, tile_f, T, 2 * F, RULE)
                emit_words(grad_up_at, inputs, OUT, None, tile_t, tile_f + num_tiles_f, T, 2 * F, RULE)
            else:
                emit_words(grad_gelu_at, inputs, OUT, bias_sums, tile_t, tile_f, T, F, RULE)
        if COLUMNS_RULE[7] != "none":
            PRODUCE: tl.constexpr = swiglu_at if KIND == "swiglu" else gelu_at
            emit_words(PRODUCE, inputs, COLUMNS_OUT, None, tile_t, tile_f, T, F, COLUMNS_RULE)
    else:
        if RULE[7] != "none":
            if KIND == "swiglu":
                emit(grad_gate_at, inputs, OUT, tile_t, tile_f, T, 2 * F, RULE, BLOCK_T, BLOCK_F)
                emit(grad_up_at, inputs, OUT, tile_t, tile_f + num_tiles_f, T, 2 * F, RULE, BLOCK_T, BLOCK_F)
            else:
                emit(grad_gelu_at, inputs, OUT, tile_t, tile_f, T, F, RULE, BLOCK_T, BLOCK_F)
        if COLUMNS_RULE[7] != "none":
            PRODUCE: tl.constexpr = swiglu_at if KIND == "swiglu" else gelu_at
            emit(PRODUCE, inputs, COLUMNS_OUT, tile_t, tile_f, T, F, COLUMNS_RULE, BLOCK_T, BLOCK_F)


@triton.jit
def whole_rows(
    OUT, COPY_OUT, x, bias, stride, T, F,
    KIND: tl.constexpr, RULE: tl.constexpr, COPY_RULE: tl.constexpr, BLOCK_F: tl.constexpr,
):  # fmt: skip
    """Emit one row, which shares a scale, and its FP8 copy."""
    t = tl.program_id(0).to(tl.int64)
    is_in = is_inside(t, 0, T, F, 1, BLOCK_F)
    first = load_tile(x, stride, t, 0, is_in, 1, BLOCK_F)
    if KIND == "swiglu":
        up = load_tile(x, stride, t, F, is_in, 1, BLOCK_F)
        if COPY_RULE[0] != "none":
            copy_row(first, COPY_OUT, t, 0, T, 2 * F, F, is_in, COPY_RULE, BLOCK_F)
            copy_row(up, COPY_OUT, t, F, T, 2 * F, F, is_in, COPY_RULE, BLOCK_F)
        values = swiglu_values(first, up)
    else:
        if COPY_RULE[0] != "none":
            copy_row(first, COPY_OUT, t, 0, T, F, F, is_in, COPY_RULE, BLOCK_F)
        cols = tl.arange(0, BLOCK_F)[None, :]
        if bias is not None:
            first += tl.load(bias + cols, mask=cols < F, other=0.0).to(tl.float32)
        values = gelu_values(first)
    emit_tile(round_to(values, x), OUT, tl.program_id(0), tl.program_id(0) * 0, T, F, RULE, 1, BLOCK_F)


@triton.jit
def copy_row(values, OUT, t, f, T, width, F, is_in, RULE: tl.constexpr, BLOCK_F: tl.constexpr):
    """The FP8 copy of F elements of row t of x [T, width] from column f on."""
    GROUPS: tl.constexpr = BLOCK_F // RULE[6]
    grouped = tl.reshape(values, [GROUPS, RULE[6]])
    amax = _largest(grouped, 1)  # [GROUPS]
    codes = tl.reshape((grouped * _quant_scale(amax, RULE, 0)[:, None]).to(RULE[1]), [1, BLOCK_F])
    tl.store(tile_places(OUT[0], width, t, f, 1, BLOCK_F), codes, mask=is_in)
    group = tl.arange(0, GROUPS)
    tl.store(OUT[1] + (f // RULE[6] + group) * T + t, _scale(amax, RULE, 0), mask=group * RULE[6] < F)


def can_fuse(x: torch.Tensor, width: int, *scalings: Scaling | None) -> bool:
    """Whether these kernels take x's dtype, F = width and the scalings; else the ops run one after the other."""
    is_mx = any(scaling is not None and scaling.kind == "mx_1x32" for scaling in scalings)
    return x.element_size() == 2 and width % TILE == 0 and not is_mx and x.numel() > 0


def activation_quantize(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None,
    scaling: Scaling,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    store_scaling: Scaling | None,
) -> tuple[QuantizedTensor, QuantizedTensor | None, QuantizedTensor | None]:
    """As reference.activation_quantize, for what can_fuse accepts."""
    x = rows_contiguous(x)
    T, F = x.shape[0], x.shape[1] // (2 if kind == "swiglu" else 1)
    copy = None
    if store_scaling is not None:
        copy = Emission(
            T, x.shape[1], x.dtype, x.device, store_scaling, in_pieces=True, longest_stride=x.stride(0)
        )  # fmt: skip
    if scaling.kind == "per_row" and column_scaling is None and F <= MAX_WHOLE_ROW:
        return _whole_rows(x, kind, bias, scaling, copy), None, copy.rows if copy is not None else None
    emission = Emission(
        T, F, x.dtype, x.device, scaling, column_scaling, quant_scale=quant_scale, amax_out=amax_out,
        aligned=_is_aligned(x), in_pieces=True, longest_stride=x.stride(0),
    )  # fmt: skip
    with on_device_of(x):
        for step in emission.steps:
            beside = copy.steps[0] if copy is not None and _has_rows(step) else None
            in_words = _has_rows(step) and (step.rule[7] != "none" or step.rule[14])
            block_t, block_f = _forward_tile(step, in_words, beside is not None)
            forward_tiles[(triton.cdiv(T, block_t) * triton.cdiv(F, block_f),)](
                step.out, _out(beside), x, bias, x.stride(0), T, F,
                KIND=kind, IN_WORDS=in_words, RULE=step.rule, COPY_RULE=_rule(beside),
                BLOCK_T=block_t, BLOCK_F=block_f, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    return emission.row_codes, emission.columns, None if copy is None else copy.rows


def activation_backward_quantize(
    grad: torch.Tensor,
    stored: torch.Tensor | QuantizedTensor,
    kind: str,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    forward_columns: ForwardColumns | None,
) -> tuple[QuantizedTensor, QuantizedTensor, torch.Tensor | None, QuantizedTensor | None]:
    """As reference.activation_backward_quantize, for what can_fuse accepts; the bias's gradient is in fp32."""
    grad = rows_contiguous(grad)
    x, scale = (stored.qdata, stored.scale) if isinstance(stored, QuantizedTensor) else (rows_contiguous(stored), None)
    scale = None if scale is None else scale.t().contiguous()  # [width / 128, T]: no copy, as quantize lays it out
    T, F = grad.shape
    longest = max(grad.stride(0), x.stride(0))
    gradient = Emission(
        T, x.shape[1], grad.dtype, grad.device, scaling, scaling, quant_scale=quant_scale, amax_out=amax_out,
        in_pieces=True, longest_stride=longest,
    )  # fmt: skip
    output = Emission(
        T, F, grad.dtype, grad.device, None, None if forward_columns is None else forward_columns[0],
        quant_scale=None if forward_columns is None else forward_columns[1],
        in_pieces=True, longest_stride=longest,
    )  # fmt: skip
    sums = new_bias_sums(grad, bias)
    with on_device_of(grad):
        for step, column_step in _pairs(gradient.steps, output.steps):
            in_words = not any(_rule(s)[7].startswith("amax") for s in (step, column_step))
            block_t = TILE if in_words else AMAX_TOKENS
            sums_bias = bias is not None and in_words
            backward_tiles[(triton.cdiv(T, block_t) * (F // TILE),)](
                _out(step), _out(column_step), sums if sums_bias else None, grad, x, scale, bias,
                grad.stride(0), x.stride(0), T, F,
                KIND=kind, IN_WORDS=in_words, RULE=_rule(step), COLUMNS_RULE=_rule(column_step),
                BLOCK_T=block_t, BLOCK_F=TILE, num_warps=NUM_WARPS, enable_fp_fusion=False,
            )  # fmt: skip
    grad_bias = None if bias is None else sums.sum(dim=0)
    return gradient.row_codes, gradient.column_codes, grad_bias, output.columns


def _whole_rows(
    x: torch.Tensor, kind: str, bias: torch.Tensor | None, scaling: Scaling, copy: Emission | None
) -> QuantizedTensor:
    """Rows alone with one scale a row, from one read."""
    T, F = x.shape[0], x.shape[1] // (2 if kind == "swiglu" else 1)
    width = triton.next_power_of_2(F)
    num_warps = max(1, min(16, width // (32 * ROW_THREAD_ELEMENTS)))
    emission = Emission(T, F, x.dtype, x.device, scaling, tile=(1, width, num_warps))
    step, beside = emission.steps[0], None if copy is None else copy.steps[0]
    rule = (*step.rule[:6], width, *step.rule[7:])  # the row is one group
    with on_device_of(x):
        whole_rows[(T,)](
            step.out, _out(beside), x, bias, x.stride(0), T, F,
            KIND=kind, RULE=rule, COPY_RULE=_rule(beside), BLOCK_F=width, num_warps=num_warps, enable_fp_fusion=False,
        )  # fmt: skip
    return emission.row_codes


def _pairs(first: list[Step], second: list[Step]) -> list[tuple[Step | None, Step | None]]:
    """Launches of two emissions: amax passes together, then what they allow to be stored together."""
    passes = [next((s for s in steps if s.rule[7].startswith("amax")), None) for steps in (first, second)]
    stores = [next((s for s in steps if not s.rule[7].startswith("amax")), None) for steps in (first, second)]
    found = sum(step is not None for step in (*passes, *stores))
    assert found == len(first) + len(second), "each emission stores in one launch where tokens are a multiple of 16"
    return [(a, b) for a, b in (passes, stores) if a is not None or b is not None]


def _out(step: Step | None) -> tuple[torch.Tensor | None, ...]:
    return NO_OUT if step is None else step.out


def _rule(step: Step | None) -> tuple[Any, ...]:
    return NO_RULE if step is None else step.rule


def _has_rows(step: Step) -> bool:
    """Whether the step stores codes of rows."""
    return step.rule[0] != "none" and not step.rule[0].startswith("amax")


def _forward_tile(step: Step, in_words: bool, stores: bool) -> tuple[int, int]:
    """BLOCK_T and BLOCK_F; 128 columns where x is stored too, so that a tile ends with its half."""
    if in_words:
        return TILE, TILE
    return (TILE // 2, TILE) if stores else (step.block_m, step.block_k)


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row of x starts at a multiple of 16 bytes, as Triton sees it."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0
