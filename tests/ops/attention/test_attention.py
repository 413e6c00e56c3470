"""Attention: against fp64 softmax, and the paged cache equal to packed sequences in every bit under any chunking."""

import random

import pytest
import torch

from octavo.errors import ShapeError
from octavo.numerics import Scaling
from octavo.ops.attention import (
    KVScaleTable,
    allocate_kv_layer,
    attention_packed,
    attention_paged,
    quantize_kv,
    reference,
    write_kv,
)
from octavo.ops.quantize import quantize
from octavo.testing import assert_bitwise, assert_sqnr
from tests.assertions import assert_codes, assert_raises
from tests.ops.attention.pages import shuffled_tables, tokens_and_slots
from tests.ops.attention.softmax import softmax_fp64

LENGTHS = (130, 1, 77, 64)
HEADS, KV_HEADS = 4, 2
KV = ["bf16", "fp8"]
DTYPES = {"bf16": torch.bfloat16, "fp32": torch.float32}


def tokens(generator, device, dtype, dim=32, lengths=LENGTHS):
    total = sum(lengths)
    shapes = [(total, HEADS, dim), (total, KV_HEADS, dim), (total, KV_HEADS, dim)]
    cu_seqlens = torch.tensor([0, *lengths]).cumsum(0).to(device)
    return [torch.randn(s, generator=generator).to(device, dtype) for s in shapes], cu_seqlens


class Pages:
    """A cache with shuffled pages that is filled piece by piece."""

    def __init__(self, kv_cache_dtype, dtype, dim, device, lengths=LENGTHS, known=None):
        self.tables, num_pages = shuffled_tables(lengths, 2, torch.Generator().manual_seed(3))
        self.layer = allocate_kv_layer(num_pages + 1, KV_HEADS, dim, kv_cache_dtype, dtype, device, known=known)
        self.done = [0] * len(lengths)
        self.device = device

    def step(self, q, k, v, starts, chosen, counts, scale, exact, **options):
        """Write and attend the next counts[i] tokens of each chosen sequence; returns (token indices, output)."""
        spans = [(i, self.done[i], self.done[i] + n) for i, n in zip(chosen, counts, strict=True)]
        index, slots = tokens_and_slots(self.tables, starts, spans)
        for i, _, end in spans:
            self.done[i] = end
        q, k, v = (x[index.to(self.device)] for x in (q, k, v))
        write_kv(self.layer, k, v, slots.to(self.device))
        ends = torch.tensor([0, *counts]).cumsum(0), torch.tensor([self.done[i] for i in chosen])
        lengths = [x.to(self.device) for x in (self.tables[chosen], *ends)]
        return index, attention_paged(q, self.layer, *lengths, softmax_scale=scale, exact=exact, **options)


def run_paged(qkv, cu_seqlens, kv_cache_dtype, seed, exact=True, lengths=LENGTHS):
    """The whole attention through the cache, in random batches and chunks."""
    q, k, v = qkv
    pages = Pages(kv_cache_dtype, q.dtype, q.shape[-1], q.device, lengths)
    rng, starts, out = random.Random(seed), cu_seqlens.tolist(), torch.full_like(q, float("nan"))
    while any(d < n for d, n in zip(pages.done, lengths, strict=True)):
        active = [i for i, n in enumerate(lengths) if pages.done[i] < n]
        chosen = rng.sample(active, rng.randint(1, len(active)))
        counts = [min(rng.choice([1, 1, 5, 33, 70]), lengths[i] - pages.done[i]) for i in chosen]
        index, piece = pages.step(q, k, v, starts, chosen, counts, q.shape[-1] ** -0.5, exact)
        out[index.to(q.device)] = piece
    return out


@pytest.mark.parametrize("scaling", [Scaling.block_1x128(), Scaling.per_row()], ids=["block", "row"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
@pytest.mark.parametrize("dim", [32, 128])
def test_paged_output_as_codes(dim, exact, scaling, generator, device):
    """Those of the output, by its kernel or after it, of prompts and of single tokens."""
    qkv, cu_seqlens = tokens(generator, device, torch.bfloat16, dim=dim)
    pages, starts = Pages("fp8", torch.bfloat16, dim, device), cu_seqlens.tolist()
    chosen = [i for i, n in enumerate(LENGTHS) if n > 1]
    steps = ([LENGTHS[i] - 1 for i in chosen], [1] * len(chosen))
    for counts in steps:
        done = list(pages.done)
        _, out = pages.step(*qkv, starts, chosen, counts, dim**-0.5, exact)
        pages.done = done
        _, codes = pages.step(*qkv, starts, chosen, counts, dim**-0.5, exact, out_scaling=scaling)
        assert_codes(codes, quantize(out.reshape(out.shape[0], -1), scaling))


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
def test_packed_is_softmax_attention(kv, exact, generator, device):
    (q, k, v), cu_seqlens = tokens(generator, device, torch.float32)
    out, _ = attention_packed(q, k, v, cu_seqlens, softmax_scale=32**-0.5, kv_cache_dtype=kv, exact=exact)
    if kv == "fp8":
        k, v = (codes.float() * scale[..., None] for codes, scale in map(quantize_kv, (k, v)))
    assert_sqnr(out, softmax_fp64(q, k, v, LENGTHS), 90.0)


def rounded(x, scale):
    """What E4M3 codes under a decode scale give back."""
    return (x / scale).clamp(-448, 448).to(torch.float8_e4m3fn).float() * scale


@pytest.mark.parametrize("is_known", [True, False], ids=["known scales", "a scale a token"])
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
def test_prefill_applies_both_scales(exact, is_known, generator, device):
    """Those of K and those of V, whether they stand packed (the trainer's pass) or in pages (the engine's)."""
    (q, k, v), cu_seqlens = tokens(generator, device, torch.float32)
    k, v, table = 8 * k, v / 8, KVScaleTable(1, "trainer", device)
    table.set({0: (torch.tensor(0.0625), torch.tensor(0.001953125))}, 0)
    known = table.layer(0) if is_known else None
    scales = table.scale[0] if is_known else [x.abs().amax(dim=-1, keepdim=True) / 448 for x in (k, v)]
    wanted = softmax_fp64(q, *(rounded(x, scale) for x, scale in zip((k, v), scales, strict=True)), LENGTHS)
    options = {"kv_cache_dtype": "fp8", "exact": exact, "known": known}
    assert_sqnr(attention_packed(q, k, v, cu_seqlens, softmax_scale=32**-0.5, **options)[0], wanted, 60.0)
    pages = Pages("fp8", q.dtype, 32, device, known=known)
    chosen = list(range(len(LENGTHS)))
    _, out = pages.step(q, k, v, cu_seqlens.tolist(), chosen, list(LENGTHS), 32**-0.5, exact)
    assert_sqnr(out, wanted, 60.0)


def test_a_calibrated_scale_is_amax_over_448(generator, device):
    table = KVScaleTable(1, "engine", device, margin=1.25)
    layer = allocate_kv_layer(1, KV_HEADS, 32, "fp8", device=device, known=table.layer(0))
    k, v = (size * torch.randn(9, KV_HEADS, 32, generator=generator).to(device) for size in (8.0, 0.125))
    write_kv(layer, k, v, torch.arange(9, device=device))
    wanted = torch.stack([x.abs().max() for x in (k, v)]).cpu() * 1.25 / torch.full((2,), 448.0)
    assert_bitwise(table.scale[0].cpu(), wanted)


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("dim", [32, 128])
@pytest.mark.parametrize("seed", [0, 1])
def test_paged_equals_packed_in_every_bit(kv, dtype, dim, seed, generator, device):
    qkv, cu_seqlens = tokens(generator, device, DTYPES[dtype], dim)
    packed, _ = attention_packed(*qkv, cu_seqlens, softmax_scale=dim**-0.5, kv_cache_dtype=kv, exact=True)
    assert_bitwise(run_paged(qkv, cu_seqlens, kv, seed), packed)


@pytest.mark.parametrize("kv", KV)
def test_splits_keep_the_bits(kv, generator, device, monkeypatch):
    """Short splits: prefill and decode meet many boundaries and still agree."""
    monkeypatch.setattr(reference, "SPLIT", 16)
    qkv, cu_seqlens = tokens(generator, device, torch.bfloat16)
    packed, _ = attention_packed(*qkv, cu_seqlens, softmax_scale=32**-0.5, kv_cache_dtype=kv, exact=True)
    assert_bitwise(run_paged(qkv, cu_seqlens, kv, 5), packed)
    k, v = qkv[1:]
    if kv == "fp8":
        k, v = (codes.float() * scale[..., None] for codes, scale in map(quantize_kv, (k, v)))
    assert_sqnr(packed, softmax_fp64(qkv[0], k, v, LENGTHS), 45.0)


def test_row_chunks_keep_the_bits(generator, device, monkeypatch):
    qkv, cu_seqlens = tokens(generator, device, torch.bfloat16)
    whole, _ = attention_packed(*qkv, cu_seqlens, softmax_scale=0.2, exact=True)
    monkeypatch.setattr(reference, "_MAX_SCORES", 5000)
    chunked, _ = attention_packed(*qkv, cu_seqlens, softmax_scale=0.2, exact=True)
    assert_bitwise(chunked, whole)


@pytest.mark.parametrize("kv", KV)
def test_paged_library_follows_exact(kv, generator, device):
    qkv, cu_seqlens = tokens(generator, device, torch.float32)
    assert_sqnr(run_paged(qkv, cu_seqlens, kv, 2, exact=False), run_paged(qkv, cu_seqlens, kv, 2), 90.0)


@pytest.mark.parametrize("kv", KV)
def test_padding_tokens_are_not_written(kv, device):
    layer = allocate_kv_layer(2, 1, 32, kv, torch.bfloat16, device)
    held = layer.k.clone()
    rows = torch.ones(3, 1, 32, dtype=torch.bfloat16, device=device)
    write_kv(layer, rows, rows, torch.tensor([-1, 5, -1], device=device))
    written = (layer.k.float() != held.float()).any(dim=-1).nonzero().tolist()
    assert written == [[0, 0, 5]]


@pytest.mark.parametrize("kv", KV)
@pytest.mark.parametrize("exact", [True, False], ids=["exact", "library"])
def test_remains_of_other_sequences_are_not_read(kv, exact, generator, device):
    """NaN in the unused slots of a sequence's last page changes nothing."""
    (q, k, v), cu_seqlens = tokens(generator, device, torch.bfloat16, lengths=(70,))
    outputs = []
    for poison in (0.0, float("nan")):
        pages = Pages(kv, torch.bfloat16, 32, device, (70,))
        for cache in (pages.layer.k, pages.layer.v):
            cache.copy_(torch.full(cache.shape, poison).to(cache.dtype))
        for scale in (pages.layer.k_scale, pages.layer.v_scale):
            if scale is not None:
                scale.fill_(poison)
        outputs.append(pages.step(q, k, v, cu_seqlens.tolist(), [0], [70], 0.2, exact)[1])
    assert_bitwise(outputs[1], outputs[0])
    assert outputs[1].isfinite().all()


def test_bad_shapes_are_refused(generator):
    (q, k, v), cu_seqlens = tokens(generator, "cpu", torch.float32)
    assert_raises(ShapeError, "H a multiple of KH", attention_packed, q[:, :3], k, v, cu_seqlens, softmax_scale=1.0)
    layer = allocate_kv_layer(2, KV_HEADS, 32, "fp8")
    assert_raises(ShapeError, "k and v must be", write_kv, layer, k[:2], v[:3], torch.zeros(2, dtype=torch.int64))


def test_zero_tokens(device):
    q, k = torch.zeros(0, 4, 32, device=device), torch.zeros(0, 2, 32, device=device)
    out, _ = attention_packed(q, k, k, torch.tensor([0, 0], device=device), softmax_scale=1.0, exact=True)
    assert out.shape == (0, 4, 32)
