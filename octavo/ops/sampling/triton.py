"""Triton sampling: nothing waits for the host. The reference's noise and rules.

Rows that truncate nothing are searched in blocks, side by side: noise in fp32 says which entries can have the largest
score. Mostly that is one; among several fp64 decides, as the reference makes all scores. Rows that truncate take one
program each. What top-k, top-p and min-p keep is a prefix of the row in the order of falling values, equal ones by
rising index. So it is all values above a threshold and the first few of those that equal it. The thresholds of top-k
and top-p are found bit by bit, one pass over the row a bit.
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
LOG2_E = tl.constexpr(1 / math.log(2.0))
LOG_OF_LN_2 = tl.constexpr(math.log(math.log(2.0)))
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
    return fast_noise(mix64(key + (index.to(tl.int64) + 1) * GOLDEN))


@triton.jit
def fast_noise(bits):
    """Noise in fp32 of the uniform number (bits with 0x800 as its lowest 12) / 2**64."""
    high = _shift_right(bits, 32).to(tl.int32)
    turned = high >> 31  # all ones from 1/2 on: then `small` is the number's distance from 1, else the number itself
    small_high, small_low = high ^ turned, ((bits.to(tl.int32) ^ turned) & -4096) | 0x800
    small = tl.fma(small_low.to(tl.uint32, bitcast=True).to(tl.float32), 2.0**-64, small_high.to(tl.float32) * 2.0**-32)
    # -log2 of the uniform number
    series = small * tl.fma(small, tl.fma(small, tl.fma(small, LOG2_E / 4, LOG2_E / 3), LOG2_E / 2), LOG2_E)
    logarithm = -_log2(tl.where(turned == 0, small, 1.0 - small))
    return tl.fma(_log2(tl.where((turned != 0) & (small < 0.03), series, logarithm)), -LN_2, -LOG_OF_LN_2)


@triton.jit
def _margin(best, is_greedy):
    """How far below the best fp32 score that of the best fp64 one may lie."""
    is_sure = (tl.abs(best) == float("inf")) | is_greedy
    return tl.where(is_sure, 0.0, NOISE_MARGIN + tl.abs(best) * SUM_MARGIN)


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
    """Of a block of a row that truncates nothing, the best score in fp32 and its entry: ~entry if others are near."""
    pid = tl.program_id(0)
    temperature, is_greedy, _, _, _, key, truncates = _params(
        pid, temperatures, top_ks, top_ps, min_ps, seeds, positions, V
    )
    if truncates:
        return
    place = pid * tl.num_programs(1) + tl.program_id(1)
    index = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    x = tl.load(logits + pid.to(tl.int64) * stride + index, mask=index < V, other=float("-inf"))
    score = x
    if is_greedy == 0:
        score = tl.fma(x, tl.div_rn(1.0, temperature), _gumbel_fast(key, index))
    score = tl.maximum(score, float("-inf"))  # of a NaN
    best = tl.max(score, axis=0)
    is_near = score >= best - _margin(best, is_greedy)
    first = tl.min(tl.where(is_near, index, 0x7FFFFFFF), axis=0)
    last = tl.max(tl.where(is_near, index, 0), axis=0)
    tl.store(scores + place, best)
    tl.store(tokens + place, tl.where(first == last, first, ~first))


@triton.jit
def _best_of_row(
    row, scores, tokens, blocks, V, temperature, is_greedy, key, BLOCKS: tl.constexpr, BLOCK: tl.constexpr
):  # fmt: skip
    """The entry of the largest score, by what best_of_blocks left of the row: the first of equal ones."""
    block = tl.arange(0, BLOCKS)
    score = tl.load(scores + block, mask=block < blocks, other=float("-inf"))
    found = tl.load(tokens + block, mask=block < blocks, other=0)
    best = tl.max(score, axis=0)
    least = best - _margin(best, is_greedy)
    is_near = (score >= least) & (block < blocks)
    token = tl.min(tl.where(is_near, found, 0x7FFFFFFF), axis=0)
    if (tl.sum(is_near.to(tl.int32), axis=0) > 1) | (token < 0):
        is_alone = is_near & (found >= 0)  # of its block
        exact = _exact_scores(row, found, is_alone, temperature, is_greedy, key)
        exact_best = tl.max(exact, axis=0)
        chosen = tl.min(tl.where(is_alone & (exact == exact_best), found, V), axis=0)
        if token < 0:
            for number in range(blocks):
                if (tl.load(tokens + number) < 0) & (tl.load(scores + number) >= least):
                    index = number * BLOCK + tl.arange(0, BLOCK)
                    of_block = _exact_scores(row, index, index < V, temperature, is_greedy, key)
                    block_best = tl.max(of_block, axis=0)
                    first = tl.min(tl.where(of_block == block_best, index, V), axis=0)
                    is_better = (block_best > exact_best) | ((block_best == exact_best) & (first < chosen))
                    chosen = tl.where(is_better, first, chosen)
                    exact_best = tl.where(is_better, block_best, exact_best)
        token = chosen
    return token


@triton.jit
def _exact_scores(row, index, is_in, temperature, is_greedy, key):
    """Scores in fp64 of a row's entries; -inf where they are not in."""
    z = tl.div_rn(tl.load(row + index, mask=is_in, other=float("-inf")), temperature)
    exact = tl.where(z == z, z, float("-inf")).to(tl.float64)
    if is_greedy == 0:
        exact += _gumbel(key, index)
    return exact


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
    temperature, is_greedy, top_k, top_p, min_p, noise_key, truncates = _params(
        pid, temperatures, top_ks, top_ps, min_ps, seeds, positions, V
    )
    if not truncates:
        first = pid * blocks
        token = _best_of_row(
            row, scores + first, tokens + first, blocks, V, temperature, is_greedy, noise_key, BLOCKS, BLOCK
        )
        tl.store(out + pid, token.to(tl.int64))
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
        if rough_best > float("-inf") and rough_best.to(tl.float64) >= best - _margin(rough_best, is_greedy):
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
        scores = torch.empty(rows, blocks, dtype=torch.float32, device=logits.device)
        tokens = torch.empty(rows, blocks, dtype=torch.int32, device=logits.device)
        vectors = (x.contiguous() for x in (temperature, top_k, top_p, min_p, seeds, positions))
        params = (logits, *vectors, logits.stride(0), vocab)
        shape = {"BLOCK": BLOCK, "num_warps": NUM_WARPS, "enable_fp_fusion": False}
        with on_device_of(logits):
            launcher_of(best_of_blocks, **shape)((rows, blocks), scores, tokens, *params)
            launch = launcher_of(sample_rows, BLOCKS=triton.next_power_of_2(blocks), **shape)
            launch((rows,), out, scores, tokens, *params, blocks)
    return out
