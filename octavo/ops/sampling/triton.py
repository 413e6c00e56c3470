"""Triton sampling: nothing waits for the host. The reference's noise and rules.

Rows that truncate nothing are searched in blocks, side by side: noise in fp32 says which entries can have the largest
score, and only theirs is made in fp64, as the reference makes all. Rows that truncate take one program each. What
top-k, top-p and min-p keep is a prefix of the row in the order of falling values, equal ones by rising index. So it is
all values above a threshold and the first few of those that equal it. The thresholds of top-k and top-p are found
bit by bit, one pass over the row a bit.
"""

import math

import torch
import triton
import triton.language as tl

from octavo.ops._runtime.launch.triton import IS_COMPILED, launcher_of, on_device_of

BLOCK = 4096
NUM_WARPS = 8
GOLDEN = tl.constexpr(-7046029254386353131)  # as ops/sampling/reference.py has them
MIX_1 = tl.constexpr(-4658895280553007687)
MIX_2 = tl.constexpr(-7723592293110705685)
LOWEST_KEY = tl.constexpr(-(2**31))
LN_2 = tl.constexpr(math.log(2.0))
# 20 times the error of the fp32 noise, and of an fp32 sum relative to its size.
NOISE_MARGIN = tl.constexpr(1e-3)
SUM_MARGIN = tl.constexpr(1e-6)


@triton.jit
def _shift_right(x, bits: tl.constexpr):
    return (x.to(tl.uint64, bitcast=True) >> bits).to(tl.int64, bitcast=True)


@triton.jit
def mix64(x):
    """SplitMix64's finalizer on int64."""
    x = (x ^ _shift_right(x, 30)) * MIX_1
    x = (x ^ _shift_right(x, 27)) * MIX_2
    return x ^ _shift_right(x, 31)


@triton.jit
def _gumbel(key, index):
    """Noise of vocabulary entries `index`, fp64."""
    bits = mix64(key + (index.to(tl.int64) + 1) * GOLDEN)
    uniform = (_shift_right(bits, 12).to(tl.float64) + 0.5) * 2.0**-52
    return -tl.log(-tl.log(uniform))


@triton.jit
def _log2(x):
    """Logarithms of fp32 numbers, none denormal, an instruction each; off by 2**-22 (of the result, far from 1)."""
    if IS_COMPILED:
        return tl.inline_asm_elementwise(
            "lg2.approx.ftz.f32 $0, $1;", "=f,f", [x], dtype=tl.float32, is_pure=True, pack=1
        )
    return tl.log2(x)


@triton.jit
def _gumbel_fast(key, index):
    """The same noise in fp32, off by 4e-5 at most."""
    bits = mix64(key + (index.to(tl.int64) + 1) * GOLDEN)
    # The uniform number is (bits with 0x800 as its lowest 12) / 2**64, in two halves; below and its distance from 1.
    high = _shift_right(bits, 32).to(tl.uint32)
    low = (bits.to(tl.uint32) & 0xFFFFF000) | 0x800
    below = high.to(tl.float32) * 2.0**-32 + low.to(tl.float32) * 2.0**-64
    above = (high ^ 0xFFFFFFFF).to(tl.float32) * 2.0**-32 + ((low ^ 0xFFFFFFFF) + 1).to(tl.float32) * 2.0**-64
    series = above * (1.0 + above * (0.5 + above * (1.0 / 3.0 + above * 0.25)))
    exponential = tl.where(above < 0.03, series, _log2(below) * -LN_2)
    return _log2(exponential) * -LN_2


@triton.jit
def _margin(best):
    """How far below the best fp32 score that of the best fp64 one may lie."""
    return tl.where(tl.abs(best) == float("inf"), 0.0, NOISE_MARGIN + tl.abs(best) * SUM_MARGIN)


@triton.jit
def _params(pid, temperatures, top_ks, top_ps, min_ps, seeds, positions, V):
    """A row's parameters: (temperature, is it greedy, top_k, top_p, min_p, key of its noise, does it truncate)."""
    temperature = tl.load(temperatures + pid)
    is_greedy = temperature == 0.0
    temperature = tl.where(is_greedy, 1.0, temperature)
    top_k = tl.load(top_ks + pid)
    top_p = tl.load(top_ps + pid)
    min_p = tl.load(min_ps + pid)
    key = mix64(mix64(tl.load(seeds + pid)) + tl.load(positions + pid) * GOLDEN)
    truncates = (((top_k > 0) & (top_k < V)) | (top_p < 1.0) | (min_p > 0.0)) & (is_greedy == 0)
    return temperature, is_greedy, top_k, top_p, min_p, key, truncates


@triton.jit
def best_of_blocks(
    scores, tokens, logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, stride, V, BLOCK: tl.constexpr
):  # fmt: skip
    """The best entry of one block of a row that truncates nothing, and its score in fp64."""
    pid = tl.program_id(0)
    temperature, is_greedy, _, _, _, key, truncates = _params(
        pid, temperatures, top_ks, top_ps, min_ps, seeds, positions, V
    )
    if truncates:
        return
    place = pid * tl.num_programs(1) + tl.program_id(1)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + pid.to(tl.int64) * stride + index, mask=index < V, other=float("-inf"))
    rough = x * tl.div_rn(1.0, temperature)  # of greedy rows x itself
    if is_greedy == 0:
        rough += _gumbel_fast(key, index)
    rough = tl.where(rough == rough, rough, float("-inf"))
    best = tl.max(rough, axis=0)
    margin = tl.where(is_greedy != 0, 0.0, _margin(best))
    is_near = (rough >= best - margin) & (index < V) & (rough > float("-inf"))
    token = tl.min(tl.where(is_near, index, 0x7FFFFFFF), axis=0)
    score = tl.div_rn(tl.max(tl.where(index == token, x, float("-inf")), axis=0), temperature).to(tl.float64)
    if is_greedy == 0:
        score += _gumbel(key, token)
        if tl.sum(is_near.to(tl.int32), axis=0) > 1:
            z = tl.div_rn(x, temperature).to(tl.float64)
            exact = tl.where(is_near, z + _gumbel(key, index), float("-inf"))
            score = tl.max(exact, axis=0)
            token = tl.min(tl.where(is_near & (exact == score), index, 0x7FFFFFFF), axis=0)
    tl.store(scores + place, tl.where(token < V, score, float("-inf")))
    tl.store(tokens + place, token)


@triton.jit
def _order_key(z):
    """int32 that rises as z does; -0.0 and 0.0 are equal, NaN counts as the lowest number."""
    z = tl.where(z == z, z, float("-inf")) + 0.0
    bits = z.to(tl.int32, bitcast=True)
    return tl.where(bits >= 0, bits, bits ^ 0x7FFFFFFF)


@triton.jit
def _load(row, start, V, inverse, BLOCK: tl.constexpr):
    """(index, z) of the entries from start on; z is -inf past the row."""
    index = start + tl.arange(0, BLOCK)
    return index, tl.div_rn(tl.load(row + index, mask=index < V, other=float("-inf")), inverse)


@triton.jit
def _max_and_mass(row, V, temperature, BLOCK: tl.constexpr):
    """The row's largest z and the sum of exp(z - largest): exponentials in fp32, as everywhere here, sums in fp64."""
    largest = float("-inf")
    for start in range(0, V, BLOCK):
        _, z = _load(row, start, V, temperature, BLOCK)
        largest = tl.maximum(largest, tl.max(z, axis=0))
    mass = tl.zeros([], tl.float64)
    for start in range(0, V, BLOCK):
        _, z = _load(row, start, V, temperature, BLOCK)
        mass += tl.sum(tl.exp(z - largest).to(tl.float64), axis=0)
    return largest, mass


@triton.jit
def _thresholds(row, V, temperature, largest, wanted_count, wanted_mass, BLOCK: tl.constexpr):
    """The largest keys of which at least so many entries, or so much mass, lie at or above: of top-k and of top-p."""
    # An int32 key is built from its highest bit down, with the sign's bit turned so that it counts like the others.
    count_key = LOWEST_KEY
    mass_key = LOWEST_KEY
    for step in range(32):
        bit = 31 - step
        count_try = count_key + (1 << bit) if bit < 31 else count_key * 0
        mass_try = mass_key + (1 << bit) if bit < 31 else mass_key * 0
        count = 0
        mass = tl.zeros([], tl.float64)
        for start in range(0, V, BLOCK):
            index, z = _load(row, start, V, temperature, BLOCK)
            key = _order_key(z)
            count += tl.sum(((key >= count_try) & (index < V)).to(tl.int32), axis=0)
            weight = tl.exp(z - largest).to(tl.float64)
            mass += tl.sum(tl.where(key >= mass_try, weight, 0.0), axis=0)
        count_key = tl.where(count >= wanted_count, count_try, count_key)
        mass_key = tl.where(mass >= wanted_mass, mass_try, mass_key)
    return count_key, mass_key


@triton.jit
def _above(row, V, temperature, largest, count_key, mass_key, BLOCK: tl.constexpr):
    """Entries above count_key; mass above mass_key; the mass of one entry at mass_key."""
    count = 0
    mass = tl.zeros([], tl.float64)
    one = tl.zeros([], tl.float64)
    for start in range(0, V, BLOCK):
        index, z = _load(row, start, V, temperature, BLOCK)
        key = _order_key(z)
        weight = tl.exp(z - largest).to(tl.float64)
        count += tl.sum(((key > count_key) & (index < V)).to(tl.int32), axis=0)
        mass += tl.sum(tl.where(key > mass_key, weight, 0.0), axis=0)
        one = tl.maximum(one, tl.max(tl.where(key == mass_key, weight, 0.0), axis=0))
    return count, mass, one


@triton.jit
def sample_rows(
    out, scores, tokens, logits, temperatures, top_ks, top_ps, min_ps, seeds, positions, stride, V, blocks,
    BLOCKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """One row's token: the best of its blocks, or, where it truncates, the best of what stays."""
    pid = tl.program_id(0)
    row = logits + pid.to(tl.int64) * stride
    temperature, _, top_k, top_p, min_p, noise_key, truncates = _params(
        pid, temperatures, top_ks, top_ps, min_ps, seeds, positions, V
    )
    if not truncates:
        block = tl.arange(0, BLOCKS)
        score = tl.load(scores + pid * blocks + block, mask=block < blocks, other=float("-inf"))
        found = tl.load(tokens + pid * blocks + block, mask=block < blocks, other=0x7FFFFFFF)
        first = tl.min(tl.where(score == tl.max(score, axis=0), found, 0x7FFFFFFF), axis=0)
        tl.store(out + pid, tl.where(first < V, first, 0).to(tl.int64))
        return
    has_k = (top_k > 0) & (top_k < V)
    has_p = top_p < 1.0

    count_key = LOWEST_KEY
    mass_key = LOWEST_KEY
    count_ties = V  # how many of the entries at each threshold stay, first ones first
    mass_ties = V
    largest, mass = _max_and_mass(row, V, temperature, BLOCK)
    if has_k | has_p:
        wanted_count = tl.where(has_k, top_k, V).to(tl.int32)
        # as fp64, or top_p's rounding would be the row's
        wanted_mass = tl.where(has_p, top_p.to(tl.float64) * mass, 0.0)
        count_key, mass_key = _thresholds(
            row, V, temperature, largest, wanted_count, wanted_mass, BLOCK
        )  # fmt: skip
        count, above, one = _above(row, V, temperature, largest, count_key, mass_key, BLOCK)
        count_ties = tl.where(has_k, wanted_count - count, V)
        # the tie of rank r stays while above + r * one < wanted
        enough = tl.ceil((wanted_mass - above) / tl.where(one > 0.0, one, 1.0))
        enough = tl.minimum(tl.maximum(enough, 1.0), tl.cast(V, tl.float64))
        mass_ties = tl.where(has_p & (one > 0.0), enough.to(tl.int32), V)
        count_key = tl.where(has_k, count_key, LOWEST_KEY)
        mass_key = tl.where(has_p, mass_key, LOWEST_KEY)

    best = tl.full([], float("-inf"), tl.float64)
    token = 0
    count_seen = 0
    mass_seen = 0
    for start in range(0, V, BLOCK):
        index, z = _load(row, start, V, temperature, BLOCK)
        stays = index < V
        key = _order_key(z)
        at_count = ((key == count_key) & (index < V)).to(tl.int32)
        at_mass = ((key == mass_key) & (index < V)).to(tl.int32)
        count_rank = count_seen + tl.cumsum(at_count, axis=0) - at_count
        mass_rank = mass_seen + tl.cumsum(at_mass, axis=0) - at_mass
        stays &= (key > count_key) | ((key == count_key) & (count_rank < count_ties))
        stays &= (key > mass_key) | ((key == mass_key) & (mass_rank < mass_ties))
        stays &= (tl.exp(z - largest) >= min_p) | (z == largest)
        count_seen += tl.sum(at_count, axis=0)
        mass_seen += tl.sum(at_mass, axis=0)
        rough = tl.where(stays & (z == z), z + _gumbel_fast(noise_key, index), float("-inf"))
        rough_best = tl.max(rough, axis=0)
        # what is behind the best so far by more than both errors cannot win
        if rough_best > float("-inf") and rough_best.to(tl.float64) >= best - _margin(rough_best):
            score = tl.where(rough > float("-inf"), z.to(tl.float64) + _gumbel(noise_key, index), float("-inf"))
            chunk_best = tl.max(score, axis=0)
            chunk_token = tl.min(tl.where((score == chunk_best) & stays, index, 0x7FFFFFFF), axis=0)
            is_better = (chunk_best > best) & (chunk_token < V)
            token = tl.where(is_better, chunk_token, token)
            best = tl.where(is_better, chunk_best, best)
    tl.store(out + pid, tl.cast(token, tl.int64))


def sample(
    logits: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
    min_p: torch.Tensor,
    seeds: torch.Tensor,
    positions: torch.Tensor,
) -> torch.Tensor:
    """As octavo.ops.sampling.sample, on a GPU; no vocabulary has 2**31 entries."""
    logits = logits if logits.stride(1) == 1 else logits.contiguous()
    rows, vocab = logits.shape
    out = torch.empty(rows, dtype=torch.int64, device=logits.device)
    if rows:
        blocks = triton.cdiv(vocab, BLOCK)
        scores = torch.empty(rows, blocks, dtype=torch.float64, device=logits.device)
        tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
        vectors = (x.contiguous() for x in (temperature, top_k, top_p, min_p, seeds, positions))
        params = (logits, *vectors, logits.stride(0), vocab)
        shape = {"BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        with on_device_of(logits):
            launcher_of(best_of_blocks, **shape)((rows, blocks), scores, tokens, *params)
            launch = launcher_of(sample_rows, BLOCKS=triton.next_power_of_2(blocks), **shape)
            launch((rows,), out, scores, tokens, *params, blocks)
    return out
