"""Triton: the gradient of causal attention over packed sequences of 16 bits.

A program owns TILE_ROWS keys, or queries, and walks the tiles that see them: no sum crosses programs, so that the bits
are always the same. Rows behind a sequence's end are another's: steps that may hold some make zeros of them, since a
NaN times a weight of zero would be a NaN.
Legend: T tokens, H query heads, KH kv heads, G = H / KH, D head_dim, M queries and N keys of a tile.
"""

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention.padding import TILE_ROWS, VarlenBatch
from octavo.ops.attention.triton import LOG2_E
from octavo.ops.attention.triton.backward import DELTA_ROWS, delta_rows

QUERIES_A_STEP, KEY_STAGES, KEY_WARPS = 32, 3, 4
KEYS_A_STEP, QUERY_STAGES, QUERY_WARPS = 32, 3, 4


@triton.jit
def _find_tile(starts, tiles, tile):
    """(the sequence's first token, its tokens, the tile's first token within it)."""
    b = tl.load(tiles + 2 * tile)
    start = tl.load(starts + b)
    return start, tl.load(starts + b + 1) - start, tl.load(tiles + 2 * tile + 1)


@triton.jit
def _statistics(lse, delta, start, row, length, head, H: tl.constexpr):
    """The log2 of the queries' sums, infinite from length on, and their deltas."""
    places = (start + row).to(tl.int64) * H + head
    is_row = row < length
    logs = tl.load(lse + places, mask=is_row, other=float("inf")) * 1.4426950408889634
    return logs, tl.load(delta + places, mask=is_row, other=0.0)


@triton.jit
def _own_rows(x, row, length):
    """Rows [M, D] that a tensor map has loaded, zeros from the sequence's end on."""
    return tl.where((row < length)[:, None], x, 0.0)


@triton.jit
def _add_queries(k_acc, v_acc, keys, values, queries, grads, logs, delta, is_seen, scale):
    """One step of varlen_key_gradients: queries and grads [M, D]; is_seen [N, M] or None."""
    p = tl.exp2(tl.dot(keys, tl.trans(queries)) * scale - logs[None, :])
    if is_seen is not None:
        p = tl.where(is_seen, p, 0.0)
    v_acc = tl.dot(p.to(grads.dtype), grads, v_acc)
    slopes = p * (tl.dot(values, tl.trans(grads)) - delta[None, :])
    k_acc = tl.dot(slopes.to(queries.dtype), queries, k_acc)
    return k_acc, v_acc


@triton.jit
def varlen_key_gradients(
    grad_k, grad_v, k, v, q, grad, lse, delta, starts, tiles, scale, softmax_scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_k and grad_v of N keys of one kv head, over its G query heads in their order."""
    KH: tl.constexpr = H // G
    kv_head = tl.program_id(0) % KH
    tile = (tl.num_programs(0) - 1 - tl.program_id(0)) // KH  # most queries first
    start, length, first = _find_tile(starts, tiles, tile)
    whole = first + N + tl.maximum(length - first - N, 0) // M * M  # all steps from first + N up to here are
    num_masked = N // M + (whole < length).to(tl.int32)
    n = first + tl.arange(0, N)
    keys = k.load([start + first, kv_head * D])
    values = v.load([start + first, kv_head * D])
    k_acc = tl.zeros([N, D], tl.float32)
    v_acc = tl.zeros([N, D], tl.float32)
    for head in range(kv_head * G, kv_head * G + G):
        # on the diagonal, then what is left behind the whole steps; stages here would spill registers
        for step in tl.range(0, num_masked, num_stages=1):
            begin = tl.where(step < N // M, first + step * M, whole)
            m = begin + tl.arange(0, M)
            logs, deltas = _statistics(lse, delta, start, m, length, head, H)
            queries = _own_rows(q.load([start + begin, head * D]), m, length)
            grads = _own_rows(grad.load([start + begin, head * D]), m, length)
            is_seen = n[:, None] <= m[None, :]
            k_acc, v_acc = _add_queries(k_acc, v_acc, keys, values, queries, grads, logs, deltas, is_seen, scale)
        for begin in tl.range(first + N, whole, M, num_stages=STAGES):
            logs, deltas = _statistics(lse, delta, start, begin + tl.arange(0, M), length, head, H)
            queries = q.load([start + begin, head * D])
            grads = grad.load([start + begin, head * D])
            k_acc, v_acc = _add_queries(k_acc, v_acc, keys, values, queries, grads, logs, deltas, None, scale)
    places = (start + n).to(tl.int64)[:, None] * (KH * D) + kv_head * D + tl.arange(0, D)[None, :]
    is_key = (n < length)[:, None]
    tl.store(grad_k + places, (k_acc * softmax_scale).to(grad_k.dtype.element_ty), mask=is_key)
    tl.store(grad_v + places, v_acc.to(grad_v.dtype.element_ty), mask=is_key)


@triton.jit
def _add_keys(acc, queries, grads, keys, values, logs, delta, is_seen, scale):
    """One step of varlen_query_gradients: keys and values [N, D]; is_seen [M, N] or None."""
    p = tl.exp2(tl.dot(queries, tl.trans(keys)) * scale - logs[:, None])
    slopes = p * (tl.dot(grads, tl.trans(values)) - delta[:, None])
    if is_seen is not None:
        slopes = tl.where(is_seen, slopes, 0.0)
    return tl.dot(slopes.to(keys.dtype), keys, acc)


@triton.jit
def varlen_query_gradients(
    grad_q, k, v, q, grad, lse, delta, starts, tiles, scale, softmax_scale,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, M: tl.constexpr, N: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """grad_q of M queries of one head."""
    head = tl.program_id(0) % H  # heads that share keys run side by side
    start, length, first = _find_tile(starts, tiles, tl.program_id(0) // H)
    m = first + tl.arange(0, M)
    queries = q.load([start + first, head * D])
    grads = grad.load([start + first, head * D])
    logs, deltas = _statistics(lse, delta, start, m, length, head, H)
    acc = tl.zeros([M, D], tl.float32)
    for begin in tl.range(0, first, N, num_stages=STAGES):
        keys = k.load([start + begin, head // G * D])
        values = v.load([start + begin, head // G * D])
        acc = _add_keys(acc, queries, grads, keys, values, logs, deltas, None, scale)
    for begin in range(first, first + M, N):  # on the diagonal
        n = begin + tl.arange(0, N)
        keys = _own_rows(k.load([start + begin, head // G * D]), n, length)
        values = v.load([start + begin, head // G * D])
        acc = _add_keys(acc, queries, grads, keys, values, logs, deltas, n[None, :] <= m[:, None], scale)
    places = (start + m).to(tl.int64)[:, None] * (H * D) + head * D + tl.arange(0, D)[None, :]
    tl.store(grad_q + places, (acc * softmax_scale).to(grad_q.dtype.element_ty), mask=(m < length)[:, None])


def attend_backward(
    grad: torch.Tensor,
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    out: torch.Tensor,
    lse: torch.Tensor,
    batch: VarlenBatch,
    softmax_scale: float,
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """Gradient of attention_varlen of sequences that are all new.

    Args:
        grad: [T, H, D], contiguous as all others, of out.
        q: [T, H, D]; k and v [T, KH, D]; T > 0.
        lse: [T, H] fp32, as the forward leaves it.
    Returns:
        (grad_q [T, H, D], grad_k, grad_v [T, KH, D]) of q's dtype.
    """
    (T, H, D), KH = q.shape, k.shape[1]
    grad_q, grad_k, grad_v = (torch.empty_like(x) for x in (q, k, v))
    delta = torch.empty(T, H, dtype=torch.float32, device=q.device)
    shape = {"G": H // KH, "H": H, "D": D}

    def fetched(x: torch.Tensor, rows: int) -> TensorDescriptor:
        width = x.shape[1] * D
        return TensorDescriptor(x, [T, width], [width, 1], [rows, D])

    rest = (lse, delta, batch.lengths.cu_seqlens, batch.tiles, softmax_scale * LOG2_E, softmax_scale)
    num_tiles = batch.tiles.shape[0]
    with on_device_of(q):
        sums = launcher_of(delta_rows, D=D, R=DELTA_ROWS, num_warps=4)
        sums((triton.cdiv(T * H, DELTA_ROWS),), delta, grad, out, T * H)
        by_key = launcher_of(
            varlen_key_gradients, **shape, M=QUERIES_A_STEP, N=TILE_ROWS, STAGES=KEY_STAGES, num_warps=KEY_WARPS
        )
        queries = (fetched(q, QUERIES_A_STEP), fetched(grad, QUERIES_A_STEP))
        by_key((KH * num_tiles,), grad_k, grad_v, fetched(k, TILE_ROWS), fetched(v, TILE_ROWS), *queries, *rest)
        by_query = launcher_of(
            varlen_query_gradients, **shape, M=TILE_ROWS, N=KEYS_A_STEP, STAGES=QUERY_STAGES, num_warps=QUERY_WARPS
        )
        keys = (fetched(k, KEYS_A_STEP), fetched(v, KEYS_A_STEP))
        by_query((H * num_tiles,), grad_q, *keys, fetched(q, TILE_ROWS), fetched(grad, TILE_ROWS), *rest)
    return grad_q, grad_k, grad_v
