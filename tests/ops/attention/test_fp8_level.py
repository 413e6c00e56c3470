"""FP8 attention: what it rounds, how far that is from softmax attention, and the same bits for any cut."""

import math
import random

import pytest
import torch

from octavo.errors import BackendError, DtypeError
from octavo.nn import PackedContext
from octavo.numerics import Numerics
from octavo.numerics.analysis import sqnr
from octavo.ops import attention
from octavo.ops.attention import (
    PAGE_SIZE,
    PagedKVLayer,
    allocate_kv_layer,
    attention_packed,
    attention_paged,
    quantize_kv,
    reference,
    write_kv,
)
from octavo.testing import assert_bitwise, assert_sqnr, tolerances
from tests.ops.attention.softmax import softmax_fp64

HEADS, KV_HEADS = 4, 2
QKV = tuple[torch.Tensor, torch.Tensor, torch.Tensor]


def random_qkv(generator: torch.Generator, length: int, num_queries: int, dim: int = 128) -> QKV:
    """fp32; the queries are those of the sequence's last tokens."""
    shapes = ((num_queries, HEADS), (length, KV_HEADS), (length, KV_HEADS))
    q, k, v = (torch.randn(*shape, dim, generator=generator) for shape in shapes)
    return q, k, v


class Sequence:
    """One sequence's pages, filled from the front."""

    def __init__(self, length: int, dim: int, attention_dtype: str = "fp8", device: torch.device | str = "cpu") -> None:
        self.num_pages, self.device = -(-length // PAGE_SIZE), torch.device(device)
        options = {"device": device, "attention_dtype": attention_dtype}
        self.layer: PagedKVLayer = allocate_kv_layer(self.num_pages, KV_HEADS, dim, "fp8", **options)
        self.length = 0

    def attend(self, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact: bool = True) -> torch.Tensor:
        """Write the next tokens, then attend the last len(q) of all."""
        slots = torch.arange(self.length, self.length + len(k), device=self.device)
        write_kv(self.layer, k, v, slots)
        self.length += len(k)
        tables = [torch.arange(self.num_pages)[None], torch.tensor([0, len(q)]), torch.tensor([self.length])]
        given = (x.to(self.device, torch.int32) for x in tables)
        return attention_paged(q, self.layer, *given, softmax_scale=q.shape[-1] ** -0.5, exact=exact)


def packed(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, exact: bool = True) -> torch.Tensor:
    ends = torch.tensor([0, len(q)], device=q.device)
    return attention_packed(
        q, k, v, ends, softmax_scale=q.shape[-1] ** -0.5, kv_cache_dtype="fp8", exact=exact, attention_dtype="fp8"
    )[0]


def level_errors(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> tuple[float, float]:
    """SQNR in dB against fp64 softmax attention: of FP8 attention, and of the FP8 cache alone."""
    wanted = softmax_fp64(q, k, v)
    fp8, cache_only = (
        float(sqnr(wanted, Sequence(len(k), q.shape[-1], dtype).attend(q, k, v))) for dtype in ("fp8", "bf16")
    )
    return fp8, cache_only


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("split", [64, 128, 2048])
def test_any_chunks_give_the_packed_bits(dtype, split, generator, device, monkeypatch):
    """Among them chunks that end inside a block of 64 keys, whose scale must not depend on keys that come later."""
    monkeypatch.setattr(reference, "SPLIT", split)
    q, k, v = (x.to(device, dtype) for x in random_qkv(generator, 200, 200, 32))
    v *= torch.exp(2 * torch.randn(200, KV_HEADS, 1, generator=generator)).to(device)  # later scales are often larger
    whole = packed(q, k, v)
    assert_bitwise(packed(q, k, v, exact=False), whole, "there is one way to compute it")
    for sizes in ([1], [1, 7, 33, 90]):
        rng, done, sequence = random.Random(split), 0, Sequence(200, 32, device=device)
        while done < 200:
            new = slice(done, min(done + rng.choice(sizes), 200))
            found = sequence.attend(q[new], k[new], v[new], exact=bool(rng.randrange(2)))
            assert_bitwise(found, whole[new], f"tokens {new}")
            done = new.stop


@pytest.mark.gpu
@pytest.mark.parametrize("dim", [64, 128, 256])
def test_the_kernel_agrees_with_the_reference(dim, generator, monkeypatch):
    """And with itself: several splits, packed, in chunks and token by token."""
    q, k, v = (x.to("cuda", torch.bfloat16) for x in random_qkv(generator, 2100, 2100, dim))
    with monkeypatch.context() as patch:
        patch.setattr(attention, "_has_kernel", lambda q: False)
        wanted = packed(q, k, v)
    whole, sequence, done = packed(q, k, v), Sequence(2100, dim, device="cuda"), 0
    assert_sqnr(whole, wanted, 44.0)
    for size in (1000, 23, 1, 1, 1000, *[1] * 75):
        new = slice(done, done + size)
        assert_bitwise(sequence.attend(q[new], k[new], v[new]), whole[new], f"tokens {new}")
        done = new.stop


def test_remains_of_others_are_not_read(generator: torch.Generator) -> None:
    q, k, v = random_qkv(generator, 70, 70, 32)
    sequence = Sequence(70, 32)
    for cache in (sequence.layer.k, sequence.layer.v):
        cache.copy_(torch.full(cache.shape, math.nan).to(cache.dtype))
    for scale in (sequence.layer.k_scale, sequence.layer.v_scale):
        assert scale is not None
        scale.fill_(math.nan)
    assert_bitwise(sequence.attend(q, k, v), packed(q, k, v))


def test_it_is_attention_over_rounded_operands(generator: torch.Generator) -> None:
    """Against its definition, in fp64 and token by token."""
    q, k, v = random_qkv(generator, 130, 130, 32)
    (qc, qs), (kc, ks), (vc, vs) = ((c.double(), s.double()) for c, s in map(quantize_kv, (q, k, v)))
    scores = torch.einsum("qhd,khd->hqk", qc * qs[..., None], (kc * ks[..., None]).repeat_interleave(2, 1)) * 32**-0.5
    out = torch.zeros(130, HEADS, 32, dtype=torch.float64)
    for token in range(130):
        for head in range(HEADS):
            p = scores[head, token, : token + 1].softmax(0)
            weights = p * vs[: token + 1, head // 2]
            for first in range(0, token + 1, 64):
                block = weights[first : first + 64]
                scale = block.max() / 448
                codes = (block / scale).float().to(torch.float8_e4m3fn).double()
                out[token, head] += scale * (codes @ vc[first : min(first + 64, token + 1), head // 2])
    # a probability near the middle between two codes may round the other way, which seldom happens
    assert_sqnr(packed(q, k, v), out, 50.0)


def widen_some_channels(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    """K with strong outlier channels, as models without QK-norm have them; the scores are as they were."""
    factor = torch.ones(q.shape[-1])
    factor[5], factor[70] = 30.0, 10.0
    return q / factor, k * factor, v


def vary_values(q: torch.Tensor, k: torch.Tensor, v: torch.Tensor) -> QKV:
    """V rows whose sizes, and so their scales, span three decades."""
    size = torch.exp(1.5 * torch.randn(*v.shape[:2], 1, generator=torch.Generator().manual_seed(1)))
    return q, k, v * size


@pytest.mark.parametrize("length", [256, 2100, pytest.param(32768, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("change", "floor"),
    [
        (lambda q, k, v: (q, k, v), tolerances.FP8_ATTENTION_DB),
        (widen_some_channels, tolerances.FP8_ATTENTION_DB),
        (vary_values, tolerances.FP8_ATTENTION_DB - 1.0),  # few large rows decide: their own noise is not averaged
        (lambda q, k, v: (4 * q, k, v), tolerances.FP8_ATTENTION_STEEP_DB),
    ],
    ids=["normal", "outliers", "values", "steep"],
)
def test_error_against_softmax(change, floor, length, generator):
    fp8, cache_only = level_errors(*change(*random_qkv(generator, length, 16)))
    assert fp8 >= floor, f"{fp8:.1f} dB, of which the cache leaves {cache_only:.1f}"
    assert fp8 >= cache_only - tolerances.FP8_ATTENTION_LOSS_DB


def test_why_a_block_of_keys_has_its_own_scale(generator: torch.Generator, monkeypatch: pytest.MonkeyPatch) -> None:
    """An attention sink takes nearly all the probability and has next to no value: the other keys decide the output.

    With one scale relative to a row's maximum they would be zeros in E4M3.
    """
    q, k, v = random_qkv(generator, 2000, 16)
    direction = torch.randn(128, generator=generator)
    direction *= 128**0.5 / direction.norm()
    q, v[0] = q + direction, 1e-6 * v[0]
    k[0] = 1.6 * direction  # a score of about 18
    assert float(sqnr(softmax_fp64(q, k, v), Sequence(2000, 128).attend(q, k, v))) > tolerances.FP8_ATTENTION_STEEP_DB

    def by_maximum(weights: torch.Tensor) -> torch.Tensor:
        scale = quantize_kv(v)[1].max() / 448  # p is 1 at most
        return (weights / scale).to(torch.float8_e4m3fn).double() * scale

    monkeypatch.setattr(reference, "_round_weights", by_maximum)
    assert float(sqnr(softmax_fp64(q, k, v), Sequence(2000, 128).attend(q, k, v))) < 6.0


def test_gradient_is_that_of_the_decoded_operands(generator: torch.Generator) -> None:
    """Straight-through: autograd of plain attention over what Q, K and V decode to, up to P's rounding."""
    q, k, v = (x.requires_grad_() for x in random_qkv(generator, 90, 90, 32))
    numerics = Numerics(kv_cache_dtype="fp8", exact=True, attention_dtype="fp8")
    context = PackedContext.from_lengths([60, 30], numerics)
    grad = torch.randn(90, HEADS, 32, generator=generator)
    found = torch.autograd.grad(context.attend(0, q, k, v, softmax_scale=32**-0.5), (q, k, v), grad)
    decoded = [(c.float() * s[..., None]).requires_grad_() for c, s in map(quantize_kv, (q, k, v))]
    spans = (slice(0, 60), slice(60, 90))
    plain = torch.cat([softmax_fp64(*(x[span] for x in decoded)) for span in spans])
    wanted = torch.autograd.grad(plain, decoded, grad.double())
    for name, a, b in zip("qkv", found, wanted, strict=True):
        assert a.dtype == torch.float32
        # V's gradient sees no rounding at all; the others see P's in the output that they subtract (30 dB)
        assert_sqnr(a, b, 100.0 if name == "v" else 28.0)


def test_what_it_refuses(generator: torch.Generator) -> None:
    q, k, v = random_qkv(generator, 4, 4, 32)
    ends = torch.tensor([0, 4])
    with pytest.raises(DtypeError, match="attention_dtype='fp8' needs kv_cache_dtype='fp8', got 'bf16'"):
        attention_packed(q, k, v, ends, softmax_scale=1.0, attention_dtype="fp8")
    with pytest.raises(DtypeError, match="needs kv_cache_dtype='fp8'"):
        allocate_kv_layer(1, KV_HEADS, 32, "bf16", attention_dtype="fp8")
    with pytest.raises(DtypeError, match="must be 'bf16' or 'fp8', got 'fp4'"):
        allocate_kv_layer(1, KV_HEADS, 32, "fp8", attention_dtype="fp4")
    with pytest.raises(BackendError, match="FP8 attention is causal"):
        attention_packed(
            q, k, v, ends, softmax_scale=1.0, kv_cache_dtype="fp8", attention_dtype="fp8", causal=False
        )  # fmt: skip
