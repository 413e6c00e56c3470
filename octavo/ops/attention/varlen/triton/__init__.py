"""Triton: attention of ragged prompts over packed keys and values, a head of a few queries a program.

On Hopper FlashAttention 2 takes 1.6 to 2 times as long: it has no wgmma. Tiles of 64 queries are one wgmma high, leave
room for two programs a multiprocessor, and waste little where a sequence ends.
Legend: T queries, Tk keys, H query heads, KH kv heads, G = H / KH, D head_dim.
"""

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from triton.tools.tensor_descriptor import TensorDescriptor

from octavo.numerics.quantized import QuantizedTensor
from octavo.numerics.scaling import Scaling
from octavo.ops._runtime.launch.triton import launcher_of, on_device_of
from octavo.ops.attention.padding import TILE_ROWS, VarlenBatch
from octavo.ops.attention.triton import LN_2, LOG2_E
from octavo.ops.attention.triton.kernels import store_heads
from octavo.ops.quantize.triton.plan import rule_of_rows

HEAD_DIMS = (64, 128)


class VarlenTile(NamedTuple):
    """Keys a step, stages of their loads, and warps."""

    keys: int
    stages: int
    num_warps: int


TILE = VarlenTile(64, 3, 4)


@triton.jit
def _take_keys(acc, maximum, total, scores, values, scale):
    """One step of the online softmax: scores [BLOCK_M, BLOCK_N] before their scale, of which log2(e) is a part."""
    larger = tl.maximum(maximum, tl.max(scores, axis=1) * scale)
    p = tl.exp2(scores * scale - larger[:, None])
    shrink = tl.exp2(maximum - larger)
    total = total * shrink + tl.sum(p, axis=1)
    acc = tl.dot(p.to(values.dtype), values, acc * shrink[:, None])
    return acc, larger, total


# what differs from step to step: a compilation for each of its kinds would stall a step
@triton.jit(do_not_specialize=("scale_stride",), do_not_specialize_on_alignment=("out_scale",))
def varlen_tiles(
    out, out_scale, lse, q, k, v, v_rows, starts, key_starts, tiles, scale, scale_stride,
    G: tl.constexpr, H: tl.constexpr, D: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
    STAGES: tl.constexpr, OUT_RULE: tl.constexpr, LN_2: tl.constexpr,
):  # fmt: skip
    """One head of the queries from tiles[.., 1] on of the sequence tiles[.., 0], over the keys that they see.

    v_rows: v once more, as a pointer: behind a sequence's last key stand another's, which may be NaN.
    """
    head = tl.program_id(0) % H  # heads that share keys run side by side
    tile = tl.program_id(0) // H
    b = tl.load(tiles + 2 * tile)
    first = tl.load(tiles + 2 * tile + 1)
    start = tl.load(starts + b)
    key_start = tl.load(key_starts + b)
    num_queries = tl.load(starts + b + 1) - start
    num_keys = tl.load(key_starts + b + 1) - key_start
    col = head // G * D
    n = tl.arange(0, BLOCK_N)
    queries = q.load([start + first, head * D])
    m = first + tl.arange(0, BLOCK_M)
    seen = num_keys - num_queries + m  # the last key of each query
    maximum = tl.full([BLOCK_M], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, D], tl.float32)
    whole = (num_keys - num_queries + first + 1) // BLOCK_N * BLOCK_N  # all queries see these
    end = tl.minimum(num_keys - num_queries + first + BLOCK_M, num_keys)
    for key in tl.range(0, whole, BLOCK_N, num_stages=STAGES):
        scores = tl.dot(queries, tl.trans(k.load([key_start + key, col])))
        acc, maximum, total = _take_keys(acc, maximum, total, scores, v.load([key_start + key, col]), scale)
    for key in tl.range(whole, end, BLOCK_N, num_stages=STAGES):
        scores = tl.dot(queries, tl.trans(k.load([key_start + key, col])))
        scores = tl.where(n[None, :] <= (seen - key)[:, None], scores, float("-inf"))
        places = v_rows + (key_start + key + n).to(tl.int64)[:, None] * (H // G * D) + col + tl.arange(0, D)[None, :]
        values = tl.load(places, mask=(n < num_keys - key)[:, None], other=0.0)
        acc, maximum, total = _take_keys(acc, maximum, total, scores, values, scale)
    ROWS: tl.constexpr = [BLOCK_M]
    store_heads(
        out, out_scale, lse, maximum, total, acc, start + m, head, m < num_queries, scale_stride, H,
        ROWS, D, LN_2, v_rows.dtype.element_ty, OUT_RULE,
    )  # fmt: skip


def can_run(q: torch.Tensor) -> bool:
    """Whether the kernel takes such queries [T, H, D]: 16 bits, on Hopper, for whose registers its tiles are."""
    fits = q.dtype.itemsize == 2 and q.shape[2] in HEAD_DIMS
    return fits and torch.cuda.get_device_capability(q.device)[0] == 9


def can_quantize(scaling: Scaling, head_dim: int) -> bool:
    """Whether it stores codes: where a head is whole blocks of a row."""
    return scaling.kind == "block_1x128" and head_dim % scaling.block_size[1] == 0


def attention_varlen(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    batch: VarlenBatch,
    softmax_scale: float,
    out: torch.Tensor | QuantizedTensor,
    lse: torch.Tensor | None = None,
) -> None:
    """As octavo.ops.attention.varlen.attention_varlen, for what can_run and can_quantize accept.

    All contiguous but scales, which lie one group after the other; T > 0.

    Args:
        lse: [T, H] fp32, where the log of each row's sum of exponentials goes.
    """
    (T, H, D), (Tk, KH, _) = q.shape, k.shape
    queries = TensorDescriptor(q, [T, H * D], [H * D, 1], [TILE_ROWS, D])
    keys, values = (TensorDescriptor(x, [Tk, KH * D], [KH * D, 1], [TILE.keys, D]) for x in (k, v))
    results: tuple[torch.Tensor, torch.Tensor | None]
    if isinstance(out, torch.Tensor):
        results, rule, stride = (out, None), None, 0
    else:
        results, rule, stride = (out.qdata, out.scale), rule_of_rows(out.scaling, q.dtype), out.scale.stride(1)
    with on_device_of(q):
        launch = launcher_of(
            varlen_tiles, G=H // KH, H=H, D=D, BLOCK_M=TILE_ROWS, BLOCK_N=TILE.keys, STAGES=TILE.stages, OUT_RULE=rule,
            LN_2=LN_2, num_warps=TILE.num_warps,
        )  # fmt: skip
        places = (batch.lengths.cu_seqlens, batch.key_lengths.cu_seqlens, batch.tiles)
        grid = (H * batch.tiles.shape[0],)
        launch(grid, *results, lse, queries, keys, values, v, *places, softmax_scale * LOG2_E, stride)
