"""Activation and quantization in one kernel, bit-equal to the plain kernels one after the other.

x is [T, 2F] for "swiglu" (gate half first) and [T, F] for "gelu" (with a bias [F] or none); T tokens, F a multiple of
128. OUT and RULE are those of ops/quantize, whose `emit` calls the functions *_at. An activation takes too many
instructions to be computed twice, so where rows and columns are wanted a program holds its tile
(`quantize_register_tile`).
"""

from typing import Any

import torch
import triton
import triton.language as tl

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import (
    EARLY_ROWS,
    can_begin_early,
    launcher_of,
    let_next_begin,
    on_device_of,
    wait_for_last,
)
from octavo.ops.activation.gelu.triton import gelu_values
from octavo.ops.activation.swiglu.triton import (
    is_inside,
    load_tile,
    rows_contiguous,
    swiglu_gradients,
    swiglu_values,
    tile_places,
)
from octavo.ops.quantize.triton import NONE, Emission, Step
from octavo.ops.quantize.triton.casts import hold, round_to, widen
from octavo.ops.quantize.triton.device import (
    amax_over,
    decode_scale_of,
    emit,
    emit_tile,
    even_rows,
    load_values,
    quant_scale_of,
    quantize_register_tile,
)
from octavo.ops.quantize.triton.register_tile import (
    TILE,
    TILE_BUSY,
    TILE_LARGE,
    TILE_LEAN,
    TILE_PAIR,
    TILE_SMALL,
    RegisterTile,
)

NUM_WARPS = 4
# Of a launch that also copies x: it would take so many that fewer programs fit.
COPY_REGISTERS = 160
# A row that shares one scale is held in registers whole, up to this width; wider ones are read twice.
MAX_WHOLE_ROW = 16384
ROW_THREAD_ELEMENTS = 32
REGISTER_TILE_KINDS = ("per_tensor", "per_row", "block_1x128")
REGISTER_TILE_COLUMN_KINDS = (*REGISTER_TILE_KINDS, "block_128x128")
NO_OUT = (None,) * 9
NO_RULE = (*NONE, *NONE, False)


# The functions *_at are emit's PRODUCE: values at rows first_t + t and columns first_f + f, 0 outside.


@triton.jit
def load_at(x, stride, first_t, first_f, t, f, is_in):
    """x there, in fp32."""
    return widen(tl.load(x + (first_t * stride + first_f) + (t * stride + f), mask=is_in, other=0.0))


@triton.jit
def swiglu_at(inputs, first_t, first_f, t, f, is_in):
    """The activation of x."""
    x, _bias, stride, F = inputs
    gate = load_at(x, stride, first_t, first_f, t, f, is_in)
    up = load_at(x, stride, first_t, first_f + F, t, f, is_in)
    return round_to(swiglu_values(gate, up), x.dtype.element_ty)


@triton.jit
def gelu_at(inputs, first_t, first_f, t, f, is_in):
    """The activation of x + bias."""
    x, bias, stride, _F = inputs
    values = _gelu(load_at(x, stride, first_t, first_f, t, f, is_in), bias, first_f, f, is_in)
    return round_to(values, x.dtype.element_ty)


@triton.jit
def _gelu(z, bias, first_f, f, is_in):
    if bias is not None:
        z += tl.load(bias + first_f + f).to(tl.float32)
    values = gelu_values(z)
    if bias is not None:
        values = tl.where(is_in, values, 0.0)
    return values


@triton.jit
def forward_tiles(
    OUT, COPY_OUT, x, bias, stride, T, F,
    KIND: tl.constexpr, RULE: tl.constexpr, COPY_RULE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_F: tl.constexpr,
    EARLY: tl.constexpr,
):  # fmt: skip
    """Emit a tile of the activation of x, and x's FP8 copy."""
    wait_for_last(EARLY)
    let_next_begin()
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    tile_t = tl.program_id(0) // num_tiles_f
    tile_f = tl.program_id(0) % num_tiles_f
    PRODUCE: tl.constexpr = swiglu_at if KIND == "swiglu" else gelu_at
    emit(PRODUCE, (x, bias, stride, F), OUT, tile_t, tile_f, T, F, RULE, BLOCK_T, BLOCK_F)
    if COPY_RULE[0] != "none":
        tl.debug_barrier()
        if KIND == "swiglu":
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, 2 * F, COPY_RULE, BLOCK_T, BLOCK_F)
            tile_f += num_tiles_f
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, 2 * F, COPY_RULE, BLOCK_T, BLOCK_F)
        else:
            emit(load_values, (x, stride), COPY_OUT, tile_t, tile_f, T, F, COPY_RULE, BLOCK_T, BLOCK_F)


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
    emit_tile(round_to(values, x.dtype.element_ty), OUT, tl.program_id(0), tl.program_id(0) * 0, T, F, RULE, 1, BLOCK_F)


@triton.jit
def copy_row(values, OUT, t, f, T, width, F, is_in, RULE: tl.constexpr, BLOCK_F: tl.constexpr):
    """The FP8 copy of F elements of row t of x [T, width] from column f on."""
    GROUPS: tl.constexpr = BLOCK_F // RULE[6]
    grouped = tl.reshape(values, [GROUPS, RULE[6]])
    amax = amax_over(grouped, 1)  # [GROUPS]
    codes = tl.reshape((grouped * quant_scale_of(amax, RULE, 0)[:, None]).to(RULE[1]), [1, BLOCK_F])
    tl.store(tile_places(OUT[0], width, t, f, 1, BLOCK_F), codes, mask=is_in)
    group = tl.arange(0, GROUPS)
    tl.store(OUT[1] + (f // RULE[6] + group) * T + t, decode_scale_of(amax, RULE, 0), mask=group * RULE[6] < F)


@triton.jit
def _copy_groups(values, OUT, first_t, first_f, t, f, left_t, T, width, RULE: tl.constexpr):
    """The FP8 copy of a row of groups for each row t: values [rows, group]."""
    amax = amax_over(tl.abs(values), 1)
    is_in = t < left_t
    tl.store(OUT[1] + (first_f // RULE[6]) * T + first_t + t, decode_scale_of(amax, RULE, 0), mask=is_in)
    codes = (values * quant_scale_of(amax, RULE, 0)[:, None]).to(RULE[1])
    offsets = t[:, None].to(RULE[16]) * width + f
    tl.store(OUT[0] + (first_t * width + first_f) + offsets, codes, mask=is_in[:, None])


@triton.jit
def _held_rows(
    x, bias, stride, COPY_OUT, first_t, first_f, t, f, left_t, T, F,
    KIND: tl.constexpr, RULE: tl.constexpr, COPY_RULE: tl.constexpr,
):  # fmt: skip
    """The activation of rows t, and their FP8 copy on the way."""
    is_in = (t < left_t)[:, None]
    offset = t[:, None].to(RULE[16])
    first = load_at(x, stride, first_t, first_f, offset, f, is_in)
    if KIND == "swiglu":
        up = load_at(x, stride, first_t, first_f + F, offset, f, is_in)
        if COPY_RULE[0] != "none":
            _copy_groups(first, COPY_OUT, first_t, first_f, t, f, left_t, T, 2 * F, COPY_RULE)
            _copy_groups(up, COPY_OUT, first_t, first_f + F, t, f, left_t, T, 2 * F, COPY_RULE)
        values = swiglu_values(first, up)
    else:
        if COPY_RULE[0] != "none":
            _copy_groups(first, COPY_OUT, first_t, first_f, t, f, left_t, T, F, COPY_RULE)
        values = _gelu(first, bias, first_f, f, is_in)
    DTYPE: tl.constexpr = x.dtype.element_ty
    # rows in groups need a tile's registers for their scales, and take them from the values
    return hold(values, DTYPE) if RULE[0] == "group" else round_to(values, DTYPE)


@triton.jit
def forward_both(OUT, COPY_OUT, x, bias, stride, T, F, KIND: tl.constexpr, RULE: tl.constexpr, COPY_RULE: tl.constexpr):
    """Rows and columns of the activation of one tile of x, and x's FP8 copy."""
    BLOCK_T: tl.constexpr = RULE[17]
    BLOCK_F: tl.constexpr = RULE[19]
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    tile_t = tl.program_id(0) // num_tiles_f
    tile_f = tl.program_id(0) % num_tiles_f
    first_t = tile_t.to(tl.int64) * BLOCK_T
    first_f = tile_f.to(tl.int64) * BLOCK_F
    left_t = tl.minimum(T - first_t, BLOCK_T).to(tl.int32)
    t = even_rows(BLOCK_T, RULE[20])
    f = tl.arange(0, BLOCK_F)[None, :]
    even = _held_rows(
        x, bias, stride, COPY_OUT, first_t, first_f, t, f, left_t, T, F, KIND, RULE, COPY_RULE
    )  # fmt: skip
    odd = _held_rows(
        x, bias, stride, COPY_OUT, first_t, first_f, t + 1, f, left_t, T, F, KIND, RULE, COPY_RULE
    )  # fmt: skip
    quantize_register_tile(even, odd, OUT, tile_t, tile_f, T, F, RULE)


@triton.jit
def _saved_at(saved, scale, stride, first_t, first_f, t, offset, f, left_t, T):
    """Rows t of the saved input, decoded: its codes are in 1x128 blocks, of which a tile's row is one."""
    is_in = t < left_t
    values = load_at(saved, stride, first_t, first_f, offset, f, is_in[:, None])
    return values * tl.load(scale + (first_f // 128) * T + first_t + t, mask=is_in, other=0.0)[:, None]


@triton.jit
def _gradient_rows(
    grad, saved, scale, stride_grad, stride_x, first_t, first_f, t, f, left_t, T, F, RULE: tl.constexpr
):  # fmt: skip
    """The gradients of rows t by the gate half and by the up half."""
    offset = t[:, None].to(RULE[16])
    wide = load_at(grad, stride_grad, first_t, first_f, offset, f, (t < left_t)[:, None])
    gate = _saved_at(saved, scale, stride_x, first_t, first_f, t, offset, f, left_t, T)
    up = _saved_at(saved, scale, stride_x, first_t, first_f + F, t, offset, f, left_t, T)
    by_gate, by_up = swiglu_gradients(wide, gate, up)
    return hold(by_gate, grad.dtype.element_ty), hold(by_up, grad.dtype.element_ty)


@triton.jit
def swiglu_backward_both(OUT, grad, saved, scale, stride_grad, stride_x, T, F, RULE: tl.constexpr):
    """Rows and columns of the gradient by x [T, 2F]: a tile of the gate half and the same tile of the up half."""
    BLOCK_T: tl.constexpr = RULE[17]
    BLOCK_F: tl.constexpr = RULE[19]
    num_tiles_f = tl.cdiv(F, BLOCK_F)
    tile_t = tl.program_id(0) // num_tiles_f
    tile_f = tl.program_id(0) % num_tiles_f
    first_t = tile_t.to(tl.int64) * BLOCK_T
    first_f = tile_f.to(tl.int64) * BLOCK_F
    left_t = tl.minimum(T - first_t, BLOCK_T).to(tl.int32)
    t = even_rows(BLOCK_T, RULE[20])
    f = tl.arange(0, BLOCK_F)[None, :]
    operands = (grad, saved, scale, stride_grad, stride_x, first_t, first_f)
    even_gate, even_up = _gradient_rows(*operands, t, f, left_t, T, F, RULE)
    odd_gate, odd_up = _gradient_rows(*operands, t + 1, f, left_t, T, F, RULE)
    quantize_register_tile(even_gate, odd_gate, OUT, tile_t, tile_f, T, 2 * F, RULE)
    quantize_register_tile(even_up, odd_up, OUT, tile_t, tile_f + num_tiles_f, T, 2 * F, RULE)


def can_fuse(x: torch.Tensor, width: int, *scalings: Scaling | None) -> bool:
    """Whether these kernels take x's dtype, F = width and the scalings; else the ops run one after the other."""
    is_mx = any(scaling is not None and scaling.kind == "mx_1x32" for scaling in scalings)
    return x.element_size() == 2 and width % TILE == 0 and not is_mx and x.numel() > 0


def fits_register_tile(scaling: Scaling, column_scaling: Scaling, *tensors: torch.Tensor) -> bool:
    """Whether a tile in registers suits both directions' scalings, and the tensors are read in whole words.

    What no word fits takes an address for every element, more than there are registers.
    """
    is_known_kind = scaling.kind in REGISTER_TILE_KINDS and column_scaling.kind in REGISTER_TILE_COLUMN_KINDS
    return is_known_kind and all(_is_aligned(tensor) and tensor.shape[0] % 16 == 0 for tensor in tensors)


def can_fuse_backward(grad: torch.Tensor, stored: QuantizedTensor, scaling: Scaling) -> bool:
    """Whether swiglu_backward_quantize takes these."""
    fits = fits_register_tile(scaling, scaling, grad, stored.qdata)
    return fits and stored.scaling.kind == "block_1x128" and can_fuse(grad, grad.shape[1], scaling)


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
    """As reference.activation_quantize, for what can_fuse accepts; both directions where fits_register_tile."""
    x = rows_contiguous(x)
    with on_device_of(x):
        copy = None
        if store_scaling is not None:
            T, width = x.shape
            copy = Emission(T, width, x.dtype, x.device, store_scaling, longest_stride=x.stride(0))
        if column_scaling is None:
            rows, columns = _rows(x, kind, bias, scaling, quant_scale, amax_out, copy), None
        else:
            emission = _emission(x, kind, scaling, column_scaling, quant_scale, amax_out)
            _launch_both(x, kind, bias, emission, copy)
            rows, columns = emission.row_codes, emission.column_codes
    return rows, columns, None if copy is None else copy.row_codes


def swiglu_backward_quantize(
    grad: torch.Tensor,
    saved: QuantizedTensor,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> tuple[QuantizedTensor, QuantizedTensor]:
    """Rows [T, 2F] and columns of the gradient by x, for what can_fuse_backward accepts.

    Args:
        grad: [T, F].
        saved: x [T, 2F] in 1x128 blocks.
        scaling: of the gradient, as in quantize_both.
        quant_scale: of the gradient, as in quantize_both.
        amax_out: of the gradient, as in quantize_both.
    """
    T, width = saved.shape
    codes, scale = saved.qdata, saved.scale.t().contiguous()  # no copy, as quantize lays it out
    with on_device_of(grad):
        longest = max(grad.stride(0), codes.stride(0))
        emission = Emission(
            T, width, grad.dtype, grad.device, scaling, scaling,
            quant_scale=quant_scale, amax_out=amax_out, longest_stride=longest,
        )  # fmt: skip
        for step in emission.steps:
            # both halves wait in registers; where more of them fit without a spill, fewer programs run, which is slower
            tile = TILE_PAIR if step.rule[0] in ("static", "tensor") else TILE_BUSY
            launch = launcher_of(
                swiglu_backward_both, RULE=tile.rule_of(step), **tile.options, enable_fp_fusion=False
            )  # fmt: skip
            grid = (_num_register_tiles(T, width // 2),)
            launch(grid, step.out, grad, codes, scale, grad.stride(0), codes.stride(0), T, width // 2)
    return emission.row_codes, emission.column_codes


def _launch_both(
    x: torch.Tensor, kind: str, bias: torch.Tensor | None, emission: Emission, copy: Emission | None
) -> None:
    """The launches of both directions; x is copied by the first, which has the registers for it."""
    T, F = x.shape[0], _width(x, kind)
    for step in emission.steps:
        beside = copy.steps[0] if copy is not None and step is emission.steps[0] else None
        chosen = _choose_tile(step, kind, is_busy=beside is not None or bias is not None)
        rules = {"RULE": chosen.rule_of(step), "COPY_RULE": _rule(beside)}
        launch = launcher_of(forward_both, KIND=kind, **rules, **chosen.options, enable_fp_fusion=False)
        launch((_num_register_tiles(T, F),), step.out, _out(beside), x, bias, x.stride(0), T, F)


def _num_register_tiles(T: int, F: int) -> int:
    return triton.cdiv(T, TILE) * (F // TILE)


def _choose_tile(step: Step, kind: str, *, is_busy: bool) -> RegisterTile:
    """As measured: more elements a thread pay where rows have scales of their own, fewer of them beside other work.

    Beside columns that have scales of their own, SwiGLU's values take the registers of a third program.
    """
    if step.rule[0] != "group":
        return TILE_SMALL
    if is_busy:
        return TILE_BUSY
    return TILE_LARGE if kind == "swiglu" and step.rule[7] == "group" else TILE_LEAN


def _rows(
    x: torch.Tensor,
    kind: str,
    bias: torch.Tensor | None,
    scaling: Scaling,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
    copy: Emission | None,
) -> QuantizedTensor:
    """The activation's rows, and x's FP8 copy beside them."""
    if scaling.kind == "per_row" and _width(x, kind) <= MAX_WHOLE_ROW:
        return _whole_rows(x, kind, bias, scaling, copy)
    emission = _emission(x, kind, scaling, None, quant_scale, amax_out)
    _launch(x, kind, bias, emission, copy)
    return emission.row_codes


def _emission(
    x: torch.Tensor,
    kind: str,
    scaling: Scaling,
    column_scaling: Scaling | None,
    quant_scale: torch.Tensor | None,
    amax_out: torch.Tensor | None,
) -> Emission:
    return Emission(
        x.shape[0], _width(x, kind), x.dtype, x.device, scaling, column_scaling, quant_scale=quant_scale,
        amax_out=amax_out, aligned=_is_aligned(x), longest_stride=x.stride(0),
    )  # fmt: skip


def _launch(x: torch.Tensor, kind: str, bias: torch.Tensor | None, emission: Emission, copy: Emission | None) -> None:
    """The launches of rows alone; x is copied by the one that stores codes."""
    T, F = x.shape[0], _width(x, kind)
    early = T <= EARLY_ROWS and can_begin_early(x.device)
    for step in emission.steps:
        beside = copy.steps[0] if copy is not None and _has_rows(step) else None
        # 128 columns where x is stored too, so that a tile ends with its half
        block_t, block_f = (step.block_m, step.block_k) if beside is None else (TILE // 2, TILE)
        options = {"num_warps": NUM_WARPS, "maxnreg": COPY_REGISTERS} if beside is not None else step.options
        # no contraction, or fused and plain kernels would round apart
        launch = launcher_of(
            forward_tiles, KIND=kind, RULE=step.rule, COPY_RULE=_rule(beside), BLOCK_T=block_t, BLOCK_F=block_f,
            EARLY=early, launch_pdl=early, enable_fp_fusion=False, **options,
        )  # fmt: skip
        grid = (triton.cdiv(T, block_t) * triton.cdiv(F, block_f),)
        launch(grid, step.out, _out(beside), x, bias, x.stride(0), T, F)


def _whole_rows(
    x: torch.Tensor, kind: str, bias: torch.Tensor | None, scaling: Scaling, copy: Emission | None
) -> QuantizedTensor:
    """Rows alone with one scale a row, from one read."""
    T, F = x.shape[0], _width(x, kind)
    width = triton.next_power_of_2(F)
    num_warps = max(1, min(16, width // (32 * ROW_THREAD_ELEMENTS)))
    emission = Emission(T, F, x.dtype, x.device, scaling, tile=(1, width, num_warps))
    step, beside = emission.steps[0], None if copy is None else copy.steps[0]
    rule = (*step.rule[:6], width, *step.rule[7:])  # the row is one group
    launch = launcher_of(
        whole_rows, KIND=kind, RULE=rule, COPY_RULE=_rule(beside), BLOCK_F=width, num_warps=num_warps,
        enable_fp_fusion=False,
    )  # fmt: skip
    launch((T,), step.out, _out(beside), x, bias, x.stride(0), T, F)
    return emission.row_codes


def _out(step: Step | None) -> tuple[torch.Tensor | None, ...]:
    return NO_OUT if step is None else step.out


def _rule(step: Step | None) -> tuple[Any, ...]:
    return NO_RULE if step is None else step.rule


def _has_rows(step: Step) -> bool:
    """Whether the step stores codes of rows."""
    return step.rule[0] != "none" and not step.rule[0].startswith("amax")


def _is_aligned(x: torch.Tensor) -> bool:
    """Whether every row of x starts at a multiple of 16 bytes, as Triton sees it."""
    return x.data_ptr() % 16 == 0 and x.stride(0) % 16 == 0


def _width(x: torch.Tensor, kind: str) -> int:
    """F."""
    return x.shape[1] // (2 if kind == "swiglu" else 1)
