"""Device functions of RoPE for kernels that rotate on their way: rows as the two elements of every pair.

Pairs are halves of a head, or neighbours where INTERLEAVED. R rows, HALF pairs each, of which the first TURNED turn.
"""

import triton
import triton.language as tl

from octavo.ops.quantize.triton.casts import round_to, rounded_product, widen


@triton.jit
def split_pairs(values, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of every pair of values [R, 2 * HALF]: [R, HALF] each."""
    if INTERLEAVED:
        first, second = tl.split(tl.reshape(values, [R, HALF, 2]))
    else:
        first, second = tl.split(tl.permute(tl.reshape(values, [R, 2, HALF]), (0, 2, 1)))
    return first, second


@triton.jit
def load_pairs(places, mask, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Both elements of every pair of the rows at places [R], in fp32; 0 where the mask [R] is not set."""
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        values = widen(tl.load(places[:, None] + d, mask=mask[:, None], other=0.0))
        first, second = split_pairs(values, R, HALF, True)
    else:
        d = tl.arange(0, HALF)[None, :]
        first = widen(tl.load(places[:, None] + d, mask=mask[:, None], other=0.0))
        second = widen(tl.load(places[:, None] + HALF + d, mask=mask[:, None], other=0.0))
    return first, second


@triton.jit
def store_pairs(places, first, second, mask, R: tl.constexpr, HALF: tl.constexpr, INTERLEAVED: tl.constexpr):
    """Store them in the rows at places [R]."""
    first, second = first.to(places.dtype.element_ty), second.to(places.dtype.element_ty)
    if INTERLEAVED:
        d = tl.arange(0, 2 * HALF)[None, :]
        tl.store(places[:, None] + d, tl.reshape(tl.join(first, second), [R, 2 * HALF]), mask=mask[:, None])
    else:
        d = tl.arange(0, HALF)[None, :]
        tl.store(places[:, None] + d, first, mask=mask[:, None])
        tl.store(places[:, None] + HALF + d, second, mask=mask[:, None])


@triton.jit
def turn_pairs(
    first, second, position, cos, sin,
    R: tl.constexpr, HALF: tl.constexpr, TURNED: tl.constexpr, INTERLEAVED: tl.constexpr, DTYPE: tl.constexpr,
    BACK: tl.constexpr,
):  # fmt: skip
    """The pairs turned by the rows' position, one for all or [R, 1], or BACK by it; rounded to DTYPE, in fp32."""
    pair = tl.arange(0, HALF)[None, :]
    if not INTERLEAVED:  # one copy for all rows would be handed round by shuffles there, more than reading it again
        pair = tl.broadcast_to(pair, [R, HALF])
    places = position * TURNED + pair
    c = tl.load(cos + places, mask=pair < TURNED, other=0.0)
    s = tl.load(sin + places, mask=pair < TURNED, other=0.0)
    if BACK:  # kernels of gradients let products fuse into sums, which the separate ops do not
        turned_first = round_to(rounded_product(first, c) + rounded_product(second, s), DTYPE)
        turned_second = round_to(rounded_product(second, c) - rounded_product(first, s), DTYPE)
    else:
        turned_first = round_to(first * c - second * s, DTYPE)
        turned_second = round_to(second * c + first * s, DTYPE)
    if TURNED < HALF:
        turned_first = tl.where(pair < TURNED, turned_first, first)
        turned_second = tl.where(pair < TURNED, turned_second, second)
    return turned_first, turned_second
