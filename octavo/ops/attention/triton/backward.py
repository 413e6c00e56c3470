"""Triton: gradient of packed causal attention over keys and values as they are stored, codes with scales or 16 bits.

Probabilities are made again from the forward's log of sums. No sum crosses programs, so the bits are always the same.
A code is exact in 16 bits; its scale multiplies fp32 numbers beside it.
Legend: T tokens, H query heads, KH kv heads, G = H / KH, D head_dim, B sequences.
"""

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention.padding import PackedLengths
from octavo.ops.quantize.triton.casts import widen

ROWS = 64  # tokens of a tile, queries and keys; half as many for heads above WIDE
WIDE = 128
DELTA_ROWS = 16


@triton.jit
def delta_rows(delta, grad_out, out, num_rows, D: tl.constexpr, R: tl.constexpr):
    """delta [T * H]: the products of grad_out and out, summed over D."""
    row = tl.program_id(0) * R + tl.arange(0, R)
    is_row = row < num_rows
    places = row.to(tl.int64)[:, None] * D + tl.arange(0, D)[None, :]
    grad = widen(tl.load(grad_out + places, mask=is_row[:, None], other=0.0))
    values = widen(tl.load(out + places, mask=is_row[:, None], other=0.0))
    tl.store(delta + row, tl.sum(grad * values, axis=1), mask=is_row)


@triton.jit
def _load_rows(x, first, head, num_heads, token, is_token, D: tl.constexpr):
    """Rows of one head: [tokens, D], 0 where is_token is not."""
    places = ((first + token) * num_heads + head)[:, None] * D + tl.arange(0, D)[None, :]
    return tl.load(x + places, mask=is_token[:, None], other=0.0)


@triton.jit
def _load_keys(x, scale, first, head, num_heads, token, is_token, D: tl.constexpr, DTYPE: tl.constexpr):
    """(rows of keys or values in 16 bits, the scale of each; 1 where there are none)."""
    rows = _load_rows(x, first, head, num_heads, token, is_token, D).to(DTYPE)
    scales = tl.full([token.shape[0]], 1.0, tl.float32)
    if scale is not None:
        scales = tl.load(scale + (first + token) * num_heads + head, mask=is_token, other=0.0)
    return rows, scales


@triton.jit
def _sequence(cu_seqlens, num_heads):
    """(its first token, its tokens, the head) of the program's sequence and head."""
    sequence = tl.program_id(1) // num_heads
    first = tl.load(cu_seqlens + sequence).to(tl.int64)
    length = (tl.load(cu_seqlens + sequence + 1) - first).to(tl.int32)
    return first, length, tl.program_id(1) % num_heads


@triton.jit
def _load_queries(q, grad_out, lse, delta, first, length, head, H, row, D: tl.constexpr):
    """(queries [M, D], their output's gradients, lse and delta [M], whether they are there); nothing weighs behind."""
    is_row = row < length
    queries = _load_rows(q, first, head, H, row, is_row, D)
    grads = _load_rows(grad_out, first, head, H, row, is_row, D)
    places = (first + row) * H + head
    row_lse = tl.load(lse + places, mask=is_row, other=float("inf"))
    return queries, grads, row_lse, tl.load(delta + places, mask=is_row, other=0.0), is_row


@triton.jit
def _weights_and_slopes(queries, grads, keys, values, k_scales, v_scales, lse, delta, is_seen, softmax_scale):
    """Of queries [M, D] and keys [N, D]: probabilities and the gradient of the scaled scores, both [M, N] fp32."""
    scores = tl.dot(queries, tl.trans(keys)) * k_scales[None, :] * softmax_scale
    p = tl.where(is_seen, tl.exp(scores - lse[:, None]), 0.0)
    slopes = p * (tl.dot(grads, tl.trans(values)) * v_scales[None, :] - delta[:, None])
    return p, slopes


@triton.jit
def query_gradients(
    grad_q, grad_out, q, k, v, k_scale, v_scale, lse, delta, cu_seqlens, softmax_scale, H, KH,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """grad_q of M tokens of one query head."""
    first, length, head = _sequence(cu_seqlens, H)
    start = tl.program_id(0) * M
    if start >= length:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    row = start + tl.arange(0, M)
    queries, grads, row_lse, row_delta, is_row = _load_queries(q, grad_out, lse, delta, first, length, head, H, row, D)
    acc = tl.zeros([M, D], tl.float32)
    for key_start in range(0, start + M, M):
        key = key_start + tl.arange(0, M)
        is_key = key < length
        keys, k_scales = _load_keys(k, k_scale, first, head // G, KH, key, is_key, D, DTYPE)
        values, v_scales = _load_keys(v, v_scale, first, head // G, KH, key, is_key, D, DTYPE)
        is_seen = (key[None, :] <= row[:, None]) & is_row[:, None]
        _, slopes = _weights_and_slopes(
            queries, grads, keys, values, k_scales, v_scales, row_lse, row_delta, is_seen, softmax_scale
        )
        acc += tl.dot((slopes * k_scales[None, :]).to(DTYPE), keys)
    places = ((first + row) * H + head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(grad_q + places, (acc * softmax_scale).to(grad_q.dtype.element_ty), mask=is_row[:, None])


@triton.jit
def key_gradients(
    grad_k, grad_v, grad_out, q, k, v, k_scale, v_scale, lse, delta, cu_seqlens, softmax_scale, H, KH,
    G: tl.constexpr, D: tl.constexpr, M: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v of M tokens of one kv head, over its G query heads in their order."""
    first, length, kv_head = _sequence(cu_seqlens, KH)
    start = tl.program_id(0) * M
    if start >= length:
        return
    DTYPE: tl.constexpr = q.dtype.element_ty
    key = start + tl.arange(0, M)
    is_key = key < length
    keys, k_scales = _load_keys(k, k_scale, first, kv_head, KH, key, is_key, D, DTYPE)
    values, v_scales = _load_keys(v, v_scale, first, kv_head, KH, key, is_key, D, DTYPE)
    k_acc = tl.zeros([M, D], tl.float32)
    v_acc = tl.zeros([M, D], tl.float32)
    for group in range(G):
        head = kv_head * G + group
        for row_start in range(start, length, M):
            row = row_start + tl.arange(0, M)
            queries, grads, row_lse, row_delta, is_row = _load_queries(
                q, grad_out, lse, delta, first, length, head, H, row, D
            )
            is_seen = (key[None, :] <= row[:, None]) & is_row[:, None]
            p, slopes = _weights_and_slopes(
                queries, grads, keys, values, k_scales, v_scales, row_lse, row_delta, is_seen, softmax_scale
            )
            v_acc += tl.dot(tl.trans(p.to(DTYPE)), grads)
            k_acc += tl.dot(tl.trans(slopes.to(DTYPE)), queries)
    places = ((first + key) * KH + kv_head)[:, None] * D + tl.arange(0, D)[None, :]
    tl.store(grad_k + places, (k_acc * softmax_scale).to(grad_k.dtype.element_ty), mask=is_key[:, None])
    tl.store(grad_v + places, v_acc.to(grad_v.dtype.element_ty), mask=is_key[:, None])


def attend_backward(
    grad_out: torch.Tensor,
    q: torch.Tensor,
    kv: tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, torch.Tensor | None],
    out: torch.Tensor,
    lse: torch.Tensor,
    lengths: PackedLengths,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of causal attention over packed sequences.

    Args:
        grad_out: [T, H, D] of one 16-bit dtype; D 32, 64, 128 or 256.
        q: as grad_out.
        out: as grad_out.
        lse: [T, H] fp32.
        kv: k, v [T, KH, D] in E4M3 codes with scales [T, KH] fp32, or of q's dtype with None.
    Returns:
        (grad_q [T, H, D], grad_k, grad_v [T, KH, D]) of q's dtype.
    """
    k, v, k_scale, v_scale = kv
    (tokens, heads, dim), kv_heads = q.shape, k.shape[1]
    grad_out, q, out, k, v, lse = (x.contiguous() for x in (grad_out, q, out, k, v, lse))
    k_scale, v_scale = (None if s is None else s.contiguous() for s in (k_scale, v_scale))
    grad_q, grad_k, grad_v = torch.empty_like(q), *(torch.empty_like(k, dtype=q.dtype) for _ in range(2))
    delta = torch.empty(tokens, heads, dtype=torch.float32, device=q.device)
    block = ROWS if dim <= WIDE else ROWS // 2
    sizes = {"G": heads // kv_heads, "D": dim, "M": block}
    tiles = triton.cdiv(lengths.max_len, block)
    rest = (grad_out, q, k, v, k_scale, v_scale, lse, delta, lengths.cu_seqlens, softmax_scale, heads, kv_heads)
    with on_device_of(q):
        sums = launcher_of(delta_rows, D=dim, R=DELTA_ROWS, num_warps=4)
        sums((triton.cdiv(tokens * heads, DELTA_ROWS),), delta, grad_out, out, tokens * heads)
        by_query = launcher_of(query_gradients, **sizes, num_warps=8, num_stages=2)
        by_query((tiles, lengths.num_sequences * heads), grad_q, *rest)
        by_key = launcher_of(key_gradients, **sizes, num_warps=8, num_stages=1)  # two sums leave no more registers
        by_key((tiles, lengths.num_sequences * kv_heads), grad_k, grad_v, *rest)
    return grad_q, grad_k, grad_v
