"""Prompts attend over packed keys and values: as over the pages, and never in exact mode."""

import dataclasses

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.numerics import Scaling
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer, write_kv
from octavo.ops.attention.varlen import empty_codes
from octavo.ops.quantize import quantize
from octavo.serve.engine import varlen_prefill
from octavo.serve.engine.paged_context import PagedContext
from octavo.testing import assert_bitwise, assert_sqnr
from tests.serve.random_models import make_model, random_prompts

HEADS, KV_HEADS, DIM = 4, 2, 64
# A decode, a chunk of a prefill, then sequences that begin: tokens [start, end) of each.
MIXED = [(70, 71), (5, 6), (64, 100), (0, 70), (0, 3), (0, 130)]
EQUAL = [(0, 40), (0, 40), (0, 40)]
NEW = [(0, 70), (0, 3), (0, 130)]
# On a CPU both multiply the same decoded K and V. On a GPU the pages' are fp16 codes with fp32 scales, the packed ones
# are rounded to bf16 (1.1e-3 of each), as are their probabilities.
FLOORS = {"cpu": 50.0, "cuda": 42.0}


@pytest.fixture
def packed(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of keys of the sequences that have attended over packed ones, a list a call."""
    found: list[list[int]] = []
    attend = varlen_prefill.attention_varlen

    def attention_varlen(q, k, v, batch, out, **options):  # type: ignore[no-untyped-def]
        found.append(batch.key_lengths.cu_seqlens.diff().tolist())
        attend(q, k, v, batch, out, **options)

    monkeypatch.setattr(varlen_prefill, "attention_varlen", attention_varlen)
    return found


def make(
    spans: list[tuple[int, int]], kv: str, device: torch.device, dtype: torch.dtype, exact: bool = False
) -> tuple[PagedContext, list[torch.Tensor]]:
    """A context whose older tokens are in the cache, and q, k, v of the new ones."""
    generator = torch.Generator().manual_seed(0)
    pages = [-(-end // PAGE_SIZE) for _, end in spans]
    numbers = torch.randperm(sum(pages), generator=generator).split(pages)
    layer = allocate_kv_layer(sum(pages), KV_HEADS, DIM, kv, dtype, device)
    everything = torch.arange(sum(pages) * PAGE_SIZE, device=device)
    write_kv(layer, *(_random(len(everything), KV_HEADS, generator, device, dtype) for _ in range(2)), everything)
    context = PagedContext.build(spans, [table.tolist() for table in numbers], [layer], exact, device)
    tokens = sum(end - start for start, end in spans)
    return context, [_random(tokens, n, generator, device, dtype) for n in (HEADS, KV_HEADS, KV_HEADS)]


def _random(
    tokens: int, heads: int, generator: torch.Generator, device: torch.device, dtype: torch.dtype
) -> torch.Tensor:
    return torch.randn(tokens, heads, DIM, generator=generator).to(device, dtype)


def paged(context: PagedContext) -> PagedContext:
    return dataclasses.replace(context, prefill=None)


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        (MIXED, (2, [36, 70, 3, 130], [100, 70, 3, 130])),
        (EQUAL, (0, [40, 40, 40], [40, 40, 40])),
        ([(0, 1), (3, 4)], None),
        ([(0, 9), (64, 70)], (0, [9, 6], [9, 70])),
        ([(7, 8), (0, 9), (0, 1), (0, 2)], (1, [9, 1, 2], [9, 1, 2])),
    ],
    ids=str,
)
def test_who_goes(spans: list[tuple[int, int]], wanted: tuple[int, list[int], list[int]] | None) -> None:
    context = make(spans, "fp8", torch.device("cpu"), torch.bfloat16)[0]
    if wanted is None:
        assert context.prefill is None
        return
    assert context.prefill is not None
    batch, slots = context.prefill
    lengths = [each.cu_seqlens.diff().tolist() for each in (batch.lengths, batch.key_lengths)]
    assert (context.num_decodes, *lengths) == wanted
    assert len(slots) == sum(wanted[2])


def test_too_many_keys_stay_in_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = 4 * KV_HEADS * DIM  # of K and V in 16 bits
    for limit, is_taken in ((120 * token_bytes, True), (120 * token_bytes - 1, False)):
        monkeypatch.setattr(varlen_prefill, "READ_BYTES", limit)
        assert (make(EQUAL, "fp8", torch.device("cpu"), torch.bfloat16)[0].prefill is not None) == is_taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize("spans", [MIXED, EQUAL, NEW, [*MIXED[:1], *EQUAL]], ids=["mixed", "equal", "new", "decode"])
def test_it_is_the_attention_over_the_pages(
    spans: list[tuple[int, int]], kv: str, dtype: torch.dtype, packed: list[list[int]], device: torch.device
) -> None:
    context, (q, k, v) = make(spans, kv, device, dtype)
    end = context.num_decodes
    out = context.attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert packed == [[last for _, last in spans[end:]]]
    packed.clear()
    expected = paged(context).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert not packed
    assert out.shape == expected.shape
    if dtype == torch.bfloat16 or device.type == "cpu":
        assert_bitwise(out[:end], expected[:end])
    elif end:  # no kernel of ours: a library's, over a batch padded to other sizes
        assert_sqnr(out[:end], expected[:end], 90.0)
    assert_sqnr(out[end:], expected[end:], FLOORS[device.type] if dtype == torch.bfloat16 else 90.0)


def test_what_is_written_into_is_all_that_changes(device: torch.device) -> None:
    for exact in (False, True):
        context, (q, k, v) = make(MIXED, "fp8", device, torch.bfloat16, exact)
        write_kv(context.layers[0], k, v, context.slot_mapping)
        around = torch.full((len(q) + 2, HEADS, DIM), 7.0, dtype=q.dtype, device=device)
        context.attend_into(around[1:-1], 0, q, softmax_scale=DIM**-0.5)
        assert_bitwise(around[1:-1], context.attend_cached(0, q, softmax_scale=DIM**-0.5))
        assert (around[0] == 7).all() and (around[-1] == 7).all()
        scaling = Scaling.block_1x128()
        codes = empty_codes(len(q), HEADS * DIM, scaling, device)
        context.attend_into(codes, 0, q, softmax_scale=DIM**-0.5)
        expected = quantize(around[1:-1].flatten(1), scaling)
        assert_bitwise(codes.qdata, expected.qdata)
        assert_bitwise(codes.scale, expected.scale)


@pytest.mark.gpu
def test_prompts_leave_codes_on_a_gpu(monkeypatch: pytest.MonkeyPatch) -> None:
    """With heads of 128: those that quantize makes of the attention in bf16."""
    device = torch.device("cuda")
    monkeypatch.setattr(f"{__name__}.DIM", 128)
    context, (q, k, v) = make(MIXED, "fp8", device, torch.bfloat16)
    write_kv(context.layers[0], k, v, context.slot_mapping)
    for scaling in (Scaling.block_1x128(), Scaling.per_row()):
        codes = context.attend_to_codes(0, q, scaling, DIM**-0.5)
        if scaling == Scaling.per_row():
            assert codes is None
            continue
        assert codes is not None and codes.scale.stride() == (1, len(q))
        expected = quantize(context.attend_cached(0, q, softmax_scale=DIM**-0.5).flatten(1), scaling)
        assert_bitwise(codes.qdata, expected.qdata)
        assert_bitwise(codes.scale, expected.scale)


def test_exact_never_takes_it(packed: list[list[int]], device: torch.device) -> None:
    context, (q, k, v) = make(MIXED, "fp8", device, torch.bfloat16, exact=True)
    assert context.prefill is None
    assert context.attend(0, q, k, v, softmax_scale=DIM**-0.5).isfinite().all()
    assert not packed


def test_attention_in_fp8_never_takes_it(packed: list[list[int]]) -> None:
    context, (q, k, v) = make(EQUAL, "fp8", torch.device("cpu"), torch.bfloat16)
    (layer,) = context.layers
    in_fp8 = PagedKVLayer(layer.k, layer.v, layer.k_scale, layer.v_scale, "fp8")
    out = dataclasses.replace(context, layers=[in_fp8]).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert out.isfinite().all()
    assert not packed


@pytest.mark.parametrize("family", ["qwen3", "gptj"])
def test_a_whole_engine(
    family: str, packed: list[list[int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Prefix hits, chunks and decodes in the same steps; the tokens are those of the pages but for near ties."""
    sizes = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
    model = make_model(family, "blockwise", exact=False, device=device, **sizes)
    prompts = random_prompts(6, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    tokens = []
    for limit in (varlen_prefill.READ_BYTES, 0):
        monkeypatch.setattr(varlen_prefill, "READ_BYTES", limit)
        llm = LLM(model, max_num_seqs=6, max_num_batched_tokens=96, num_kv_pages=40)
        outputs = llm.generate(prompts, params)
        tokens.append([token for output in outputs for token in output.outputs[0].token_ids])
        if limit:
            assert llm.stats.num_prefix_hit_tokens > 0
            assert llm.stats.num_multi_chunk_prompts > 0
            assert len(packed) >= 2 * model.config.num_layers
            packed.clear()
    assert not packed
    agreeing = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agreeing >= 0.75 * len(tokens[0]), (agreeing, tokens)  # a foreign sequence's keys would leave 1 in 100
