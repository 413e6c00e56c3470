"""Triton: QK-norm, RoPE and the FP8 cache's rounding in one launch, and their gradient, bit-equal to separate kernels.

A program owns R heads of Q, of K or of V, whose tokens may differ: rows of 2 * HALF elements, as two sides of pairs.
Legend: T tokens, H query heads, KH kv heads, D head_dim.
"""

import torch
import triton
import triton.language as tl

from octavo.numerics.infinity import infinity_flag
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention import KV_SCALING
from octavo.ops.attention.rope.triton import load_pairs, store_pairs, turn_pairs
from octavo.ops.norm.triton import add_partials, dense_rows, inverse_root, tree_sum_of_pairs, without_share
from octavo.ops.quantize.triton.casts import round_to
from octavo.ops.quantize.triton.device import amax_over, note_infinite, quant_scale_of
from octavo.ops.quantize.triton.plan import rule_of_rows

# A program's elements and warps, 16 elements a thread.
ELEMENTS = 2048
NUM_WARPS = 4
# Backward with norms: most programs, each of which leaves one partial sum for each weight; stages of its loops' loads.
BACKWARD_PROGRAMS = 528
BACKWARD_STAGES = 1
PARTIAL_TILE = (128, 16, 4)  # partial sums, columns and warps of the last sum


@triton.jit
def _rows_of(tile, T, heads, first_head, R: tl.constexpr):
    """The tile's rows of T * heads: their numbers, tokens and heads among all [R], and which of them there are."""
    row = tile * R + tl.arange(0, R)
    token = row // heads
    return row, token.to(tl.int64), first_head + row - token * heads, row < T * heads


@triton.jit
def _gamma(weight, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """A norm's factors as two sides of pairs, [1, HALF] each: of two dims, to be loaded in the layout of the rows."""
    return load_pairs(weight + tl.zeros([1], tl.int32), tl.full([1], 1, tl.int1), 1, HALF, INTERLEAVED)


@triton.jit
def _round_side(side, quant_scale, scale, FP8: tl.constexpr, DTYPE: tl.constexpr):
    return round_to((side * quant_scale[:, None]).to(FP8).to(tl.float32) * scale[:, None], DTYPE)


@triton.jit
def turned_rows(
    rstd_out, qkv, positions, cos, sin, weight, tile, stride, eps, T, heads, first_head,
    HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """The tile's heads by pairs, normed where there is a weight and turned where there is a table.

    heads: of a token, from first_head on in qkv.
    Returns:
        (rows [R] of T * heads, their tokens, which of them there are, first and second of their pairs [R, HALF]).
    """
    D: tl.constexpr = 2 * HALF
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row, token, head, is_in = _rows_of(tile, T, heads, first_head, R)
    first, second = load_pairs(qkv + token * stride + head * D, is_in, R, HALF, INTERLEAVED)
    if weight is not None:
        rstd = inverse_root(tree_sum_of_pairs(first * first, second * second, INTERLEAVED), D, eps)
        if rstd_out is not None:
            tl.store(rstd_out + row, rstd, mask=is_in)
        first_gamma, second_gamma = _gamma(weight, HALF, INTERLEAVED)
        first = round_to(first * rstd[:, None] * first_gamma, DTYPE)
        second = round_to(second * rstd[:, None] * second_gamma, DTYPE)
    if cos is not None:
        position = tl.load(positions + token, mask=is_in, other=0)[:, None]
        first, second = turn_pairs(first, second, position, cos, sin, R, HALF, TURNED, INTERLEAVED, DTYPE, False)
    return row, token, is_in, first, second


@triton.jit
def _head_rows(
    out, rstd_out, qkv, positions, cos, sin, weight, known, known_quant, infinite, tile, stride, eps, T, heads,
    first_head, ROLE: tl.constexpr, RULE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr,
    INTERLEAVED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads that begin at first_head of their tokens. RULE: of the codes that they are rounded to, or None."""
    DTYPE: tl.constexpr = qkv.dtype.element_ty
    row, _, is_in, first, second = turned_rows(
        rstd_out, qkv, positions, cos, sin, weight, tile, stride, eps, T, heads, first_head,
        HALF, TURNED, INTERLEAVED, R,
    )  # fmt: skip
    if RULE is not None:
        if known is not None:
            quant_scale = tl.zeros([R], tl.float32) + tl.load(known_quant + ROLE)
            scale = tl.zeros([R], tl.float32) + tl.load(known + ROLE)
        else:
            amax = tl.maximum(amax_over(first, 1), amax_over(second, 1))
            note_infinite(infinite, amax)
            quant_scale = quant_scale_of(amax, RULE, 0)
            scale = tl.div_rn(1.0, quant_scale)
        first = _round_side(first, quant_scale, scale, RULE[1], DTYPE)
        second = _round_side(second, quant_scale, scale, RULE[1], DTYPE)
    store_pairs(out + row.to(tl.int64) * 2 * HALF, first, second, is_in, R, HALF, INTERLEAVED)


@triton.jit
def qkv_head_rows(
    q, k, v, rstd, qkv, positions, cos, sin, q_weight, k_weight, known, known_quant, infinite, stride, eps, T, H, KH,
    RULE: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr,
):  # fmt: skip
    """R heads of Q, of K or of V: the programs' order. infinite: the device's flag (octavo.numerics.infinity)."""
    pid = tl.program_id(0)
    num_q, num_k = tl.cdiv(T * H, R), tl.cdiv(T * KH, R)
    if pid < num_q:
        _head_rows(
            q, rstd, qkv, positions, cos, sin, q_weight, None, None, None, pid, stride, eps, T, H, 0,
            0, None, HALF, TURNED, INTERLEAVED, R,
        )  # fmt: skip
    elif pid < num_q + num_k:
        k_rstd = rstd if rstd is None else rstd + T * H
        _head_rows(
            k, k_rstd, qkv, positions, cos, sin, k_weight, known, known_quant, infinite, pid - num_q, stride, eps, T,
            KH, H, 0, RULE, HALF, TURNED, INTERLEAVED, R,
        )  # fmt: skip
    else:
        _head_rows(
            v, None, qkv, None, None, None, None, known, known_quant, infinite, pid - num_q - num_k, stride, eps, T, KH,
            H + KH, 1, RULE, HALF, TURNED, INTERLEAVED, R,
        )  # fmt: skip


@triton.jit
def _sum_rows(x, R: tl.constexpr, HALF: tl.constexpr):
    """Sums over the rows of x [R, HALF] by halves: -> [1, HALF]."""
    for _ in tl.static_range(24):
        if x.shape[0] > 1:  # a sum of two is the same in either order
            x = tl.sum(tl.reshape(x, [2, x.shape[0] // 2, HALF]), axis=0)
    return x


@triton.jit
def _gradient_rows(
    grad_qkv, weight_sums, grad, qkv, rstd, weight, positions, cos, sin, stride_g, stride_x, stride_o, T, heads,
    first_head, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr,
    STAGES: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of R heads: their part of grad_qkv, and the program's own sum for the weight's gradient."""
    D: tl.constexpr = 2 * HALF
    DTYPE: tl.constexpr = grad_qkv.dtype.element_ty
    size = tl.cast(D, tl.float32)
    if weight is not None:
        first_gamma, second_gamma = _gamma(weight, HALF, INTERLEAVED)
        first_sum, second_sum = tl.zeros([R, HALF], tl.float32), tl.zeros([R, HALF], tl.float32)
    for tile in tl.range(tl.program_id(0), tl.cdiv(T * heads, R), tl.num_programs(0), num_stages=STAGES):
        row, token, head, is_in = _rows_of(tile, T, heads, first_head, R)
        places = grad + token * stride_g + (head - first_head) * D
        first, second = load_pairs(places, is_in, R, HALF, INTERLEAVED)
        if cos is not None:
            position = tl.load(positions + token, mask=is_in, other=0)[:, None]
            first, second = turn_pairs(first, second, position, cos, sin, R, HALF, TURNED, INTERLEAVED, DTYPE, True)
        if weight is not None:
            # norm_backward_rows' arithmetic, but for the order of the weight's sum over rows
            first_x, second_x = load_pairs(qkv + token * stride_x + head * D, is_in, R, HALF, INTERLEAVED)
            row_rstd = tl.load(rstd + row, mask=is_in, other=0.0)[:, None]
            first_normed, second_normed = first_x * row_rstd, second_x * row_rstd
            first_sum, second_sum = tl.fma(first, first_normed, first_sum), tl.fma(second, second_normed, second_sum)
            first, second = first * first_gamma, second * second_gamma
            products = tree_sum_of_pairs(first * first_normed, second * second_normed, INTERLEAVED)
            mean = tl.div_rn(products, size)[:, None]
            first = without_share(first, first_normed, mean) * row_rstd
            second = without_share(second, second_normed, mean) * row_rstd
        store_pairs(grad_qkv + token * stride_o + head * D, first, second, is_in, R, HALF, INTERLEAVED)
    if weight is not None:
        place = weight_sums + tl.program_id(0) * D + tl.zeros([1], tl.int32)
        first_sum, second_sum = _sum_rows(first_sum, R, HALF), _sum_rows(second_sum, R, HALF)
        store_pairs(place, first_sum, second_sum, tl.full([1], 1, tl.int1), 1, HALF, INTERLEAVED)


@triton.jit
def qkv_head_gradients(
    grad_qkv, q_sums, k_sums, grad_q, grad_k, grad_v, qkv, rstd, q_weight, k_weight, positions, cos, sin,
    stride_q, stride_k, stride_v, stride_x, T, H, KH,
    HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, R: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Every n-th tile of Q, then of K, then of V. q_sums, k_sums: [programs, D] fp32, None without norms."""
    stride_o = (H + 2 * KH) * 2 * HALF
    k_rstd = rstd if rstd is None else rstd + T * H
    _gradient_rows(
        grad_qkv, q_sums, grad_q, qkv, rstd, q_weight, positions, cos, sin, stride_q, stride_x, stride_o, T, H, 0,
        HALF, TURNED, INTERLEAVED, R, STAGES,
    )  # fmt: skip
    _gradient_rows(
        grad_qkv, k_sums, grad_k, qkv, k_rstd, k_weight, positions, cos, sin, stride_k, stride_x, stride_o, T, KH, H,
        HALF, TURNED, INTERLEAVED, R, STAGES,
    )  # fmt: skip
    _gradient_rows(
        grad_qkv, None, grad_v, None, None, None, None, None, None, stride_v, stride_x, stride_o, T, KH, H + KH,
        HALF, TURNED, INTERLEAVED, R, STAGES,
    )  # fmt: skip


def qkv_heads(
    qkv: torch.Tensor,
    kv_heads: int,
    dim: int,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    eps: float,
    exact: bool,
    has_v: bool,
    rounds: bool,
    scale: torch.Tensor | None,
    quant_scale: torch.Tensor | None,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor, torch.Tensor]:
    """As octavo.ops.attention.qkv_heads.qkv_heads, for what has elements; exact as it is, v empty without has_v."""
    qkv = dense_rows(qkv)
    tokens, heads = qkv.shape[0], qkv.shape[1] // dim - 2 * kv_heads
    sizes = ((tokens, heads, dim), (tokens, kv_heads, dim), (tokens, kv_heads, dim) if has_v else (0,))
    q, k, v = (torch.empty(size, dtype=qkv.dtype, device=qkv.device) for size in sizes)
    num_normed = 0 if q_weight is None else tokens * (heads + kv_heads)
    rstd = torch.empty(num_normed, dtype=torch.float32, device=qkv.device)
    rows = ELEMENTS // dim
    num_programs = triton.cdiv(tokens * heads, rows) + (1 + has_v) * triton.cdiv(tokens * kv_heads, rows)
    infinite = infinity_flag(qkv.device) if rounds and scale is None else None
    with on_device_of(qkv):
        # no contraction: the separate ops round every product
        launch = launcher_of(
            qkv_head_rows, RULE=rule_of_rows(KV_SCALING, qkv.dtype) if rounds else None, HALF=dim // 2,
            TURNED=cos.shape[1], INTERLEAVED=interleaved, R=rows, num_warps=NUM_WARPS, enable_fp_fusion=False,
        )  # fmt: skip
        tables = (positions, cos, sin, q_weight, k_weight, scale, quant_scale, infinite)
        normed = None if q_weight is None else rstd
        launch((num_programs,), q, k, v, normed, qkv, *tables, qkv.stride(0), eps, tokens, heads, kv_heads)
    return q, k, v, rstd


def qkv_heads_backward(
    grad_q: torch.Tensor,
    grad_k: torch.Tensor,
    grad_v: torch.Tensor,
    qkv: torch.Tensor | None,
    rstd: torch.Tensor,
    q_weight: torch.Tensor | None,
    k_weight: torch.Tensor | None,
    positions: torch.Tensor,
    cos: torch.Tensor,
    sin: torch.Tensor,
    interleaved: bool,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """As reference.qkv_heads_backward_reference, on a GPU; the gradients have elements."""
    grads = [_dense_heads(x) for x in (grad_q, grad_k, grad_v)]
    tokens, heads, dim = grad_q.shape
    kv_heads, rows = grad_k.shape[1], ELEMENTS // dim
    grad_qkv = torch.empty(tokens, (heads + 2 * kv_heads) * dim, dtype=grad_q.dtype, device=grad_q.device)
    num_programs = triton.cdiv(tokens * max(heads, kv_heads), rows)
    sums: torch.Tensor | tuple[None, None] = (None, None)
    source: tuple[torch.Tensor | None, ...] = (None, None, None, None)
    strides = [x.stride(0) for x in grads]
    if q_weight is not None:
        assert qkv is not None, "norms need what they normed"
        qkv, num_programs = dense_rows(qkv), min(num_programs, BACKWARD_PROGRAMS)
        sums = torch.empty(2, num_programs, dim, dtype=torch.float32, device=grad_q.device)
        source = (qkv, rstd, q_weight, k_weight)
    strides.append(0 if source[0] is None else source[0].stride(0))
    with on_device_of(grad_q):
        # as the separate norm, products may fuse into sums; RoPE's do not
        launch = launcher_of(
            qkv_head_gradients, HALF=dim // 2, TURNED=cos.shape[1], INTERLEAVED=interleaved, R=rows,
            STAGES=BACKWARD_STAGES, num_warps=NUM_WARPS,
        )  # fmt: skip
        tables = (positions, cos, sin, *strides, tokens, heads, kv_heads)
        launch((num_programs,), grad_qkv, *sums, *grads, *source, *tables)
        if q_weight is None or not isinstance(sums, torch.Tensor):
            return grad_qkv, rstd.new_empty(0), rstd.new_empty(0)
        return grad_qkv, *add_partials(q_weight, sums[0], sums[1], PARTIAL_TILE)


def _dense_heads(x: torch.Tensor) -> torch.Tensor:
    """x [T, H, D] whose tokens' rows are contiguous."""
    return x if x.stride(2) == 1 and x.stride(1) == x.shape[2] else x.contiguous()
