"""Prompts attend through torch's kernels: as over the pages, and never in exact mode."""

import dataclasses

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer, write_kv
from octavo.serve.engine import varlen_prefill
from octavo.serve.engine.paged_context import PagedContext
from octavo.serve.engine.varlen_prefill import PaddedSdpaBatch, RaggedSequences, padded_length, padded_lengths
from octavo.testing import assert_bitwise, assert_sqnr
from tests.serve.random_models import make_model, random_prompts

HEADS, KV_HEADS, DIM = 4, 2, 64
# A decode, a chunk of a prefill, then sequences that begin: tokens [start, end) of each.
MIXED = [(70, 71), (5, 6), (64, 100), (0, 70), (0, 3), (0, 130)]
EQUAL = [(0, 40), (0, 40), (0, 40)]
NEW = [(0, 70), (0, 3), (0, 130)]
# On a CPU both roads multiply the same decoded K and V. On a GPU the pages' are fp16 codes with fp32 scales, torch's
# are rounded to bf16 (1.1e-3 of each), as are its probabilities.
FLOORS = {"cpu": 50.0, "cuda": 42.0}


@pytest.fixture
def through_library(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The numbers of keys of the sequences that have gone to torch's kernels, a list a call."""
    found: list[list[int]] = []
    begin, go_on = varlen_prefill.attention_packed, varlen_prefill.attention_of_last_tokens

    def beginning(q, k, v, lengths, **options):  # type: ignore[no-untyped-def]
        found.append(lengths.cu_seqlens.diff().tolist())
        return begin(q, k, v, lengths, **options)

    def going_on(q, k, v, lengths, key_lengths, **options):  # type: ignore[no-untyped-def]
        found.append(key_lengths.cu_seqlens.diff().tolist())
        return go_on(q, k, v, lengths, key_lengths, **options)

    monkeypatch.setattr(varlen_prefill, "attention_packed", beginning)
    monkeypatch.setattr(varlen_prefill, "attention_of_last_tokens", going_on)
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
        (EQUAL, (0, [40, 40, 40], None)),
        ([(0, 1), (3, 4)], None),
        ([(0, 9), (64, 70)], (0, [9, 6], [9, 70])),
        ([(7, 8), (0, 9), (0, 1), (0, 2)], (1, [9, 1, 2], None)),
    ],
    ids=str,
)
def test_who_goes(spans: list[tuple[int, int]], wanted: tuple[int, list[int], list[int] | None] | None) -> None:
    context = make(spans, "fp8", torch.device("cpu"), torch.bfloat16)[0]
    if wanted is None:
        assert context.prefill is None
        return
    assert context.prefill is not None
    (piece,), slots = context.prefill
    assert isinstance(piece, RaggedSequences)
    lengths, key_lengths = piece.lengths, piece.key_lengths
    keys = None if key_lengths is None else key_lengths.cu_seqlens.diff().tolist()
    assert (context.num_decodes, lengths.cu_seqlens.diff().tolist(), keys) == wanted
    assert len(slots) == sum(wanted[2] or wanted[1])


def test_too_many_keys_stay_in_the_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    token_bytes = 4 * KV_HEADS * DIM  # of K and V in 16 bits
    for limit, is_taken in ((120 * token_bytes, True), (120 * token_bytes - 1, False)):
        monkeypatch.setattr(varlen_prefill, "READ_BYTES", limit)
        assert (make(EQUAL, "fp8", torch.device("cpu"), torch.bfloat16)[0].prefill is not None) == is_taken


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize("spans", [MIXED, EQUAL, NEW, [*MIXED[:1], *EQUAL]], ids=["mixed", "equal", "new", "decode"])
def test_it_is_the_attention_over_the_pages(
    spans: list[tuple[int, int]], kv: str, dtype: torch.dtype, through_library: list[list[int]], device: torch.device
) -> None:
    context, (q, k, v) = make(spans, kv, device, dtype)
    end = context.num_decodes
    out = context.attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert through_library == [[last for _, last in spans[end:]]]
    through_library.clear()
    expected = paged(context).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert not through_library
    assert out.shape == expected.shape
    if dtype == torch.bfloat16 or device.type == "cpu":
        assert_bitwise(out[:end], expected[:end])
    elif end:  # no kernel of ours: a library's, over a batch padded to other sizes
        assert_sqnr(out[:end], expected[:end], 90.0)
    assert_sqnr(out[end:], expected[end:], FLOORS[device.type] if dtype == torch.bfloat16 else 90.0)


LONG = [(70, 71), (64, 100), (0, 3), (0, 200), (0, 129), (0, 70), (10, 12)]


@pytest.fixture
def long_from_128(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(varlen_prefill, "LONG_PROMPT", 128)


@pytest.mark.usefixtures("long_from_128")
@pytest.mark.parametrize(
    ("spans", "expected"),
    [
        (LONG, [(0, 39, 103), (256, 329, 512), (0, 72, 82)]),
        ([(0, 256)] * 3, [(256, 512, 512), (256, 256, 256)]),
        ([(0, 200)] * 7, [(256, 800, 1024), (256, 400, 512), (256, 200, 256)]),
        ([(0, 128), (0, 200), (0, 300), (5, 300)], [(128, 128, 128), (256, 200, 256), (384, 300, 384), (0, 295, 300)]),
    ],
    ids=["mixed", "whole", "seven", "lengths"],
)
def test_long_prompts_go_padded_and_a_few_at_a_time(
    spans: list[tuple[int, int]], expected: list[tuple[int, int, int]]
) -> None:
    """(length or 0 for ragged ones, queries, keys) of each piece."""
    prefill = make(spans, "fp8", torch.device("cpu"), torch.bfloat16)[0].prefill
    assert prefill is not None
    found = [
        (getattr(p, "length", 0), p.queries.stop - p.queries.start, p.keys.stop - p.keys.start) for p in prefill.pieces
    ]
    assert found == expected
    assert len(prefill.slots) == sum(keys for *_, keys in found)
    for piece, (_, queries, keys) in zip(prefill.pieces, found, strict=True):
        if isinstance(piece, PaddedSdpaBatch):
            assert (piece.padded is None) == (piece.own is None) == (queries == keys)


@pytest.mark.usefixtures("long_from_128")
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize(
    "spans",
    [LONG, [(0, 200)], [(0, 128), (0, 130)], [(0, 256)] * 3, [(1, 2), *[(0, 129), (0, 256)] * 3]],
    ids=["mixed", "one", "two", "whole", "seven"],
)
def test_long_prompts_attend_as_over_the_pages(
    spans: list[tuple[int, int]], dtype: torch.dtype, device: torch.device
) -> None:
    context, (q, k, v) = make(spans, "fp8", device, dtype)
    end = context.num_decodes
    out = context.attend(0, q, k, v, softmax_scale=DIM**-0.5)
    expected = paged(context).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert out.shape == expected.shape
    assert_sqnr(out[end:], expected[end:], FLOORS[device.type] if dtype == torch.bfloat16 else 90.0)


@pytest.mark.usefixtures("long_from_128")
def test_the_library_sees_long_prompts_of_few_shapes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Shapes and strides are those that `prepare_batch` has made ready, whoever else is in the step."""
    seen, attend = [], varlen_prefill.attention_batch

    def attention_batch(q, k, v, *, softmax_scale):  # type: ignore[no-untyped-def]
        seen.append([(x.shape, x.stride()) for x in (q, k, v)])
        return attend(q, k, v, softmax_scale=softmax_scale)

    monkeypatch.setattr(varlen_prefill, "attention_batch", attention_batch)
    for num, length in varlen_prefill.long_batches(300, 1000, 9):
        varlen_prefill.prepare_batch(num, length, (HEADS, KV_HEADS, DIM), torch.bfloat16, torch.device("cpu"))
    prepared = [*seen]
    assert {num for num, _ in varlen_prefill.long_batches(300, 1000, 2)} == {1, 2}
    assert len(prepared) == 3 + 3 + 2  # of 128, of 256, of 384 tokens, which no four of 257 fit beside each other
    seen.clear()
    for spans in (LONG, [(0, 200)], [(0, 150), (0, 130)], [(0, 129)] * 7, [(0, 257)] * 3, [(4, 9), (0, 128), (0, 256)]):
        context, (q, k, v) = make(spans, "fp8", torch.device("cpu"), torch.bfloat16)
        context.attend(0, q, k, v, softmax_scale=1.0)
    assert len(seen) == 1 + 1 + 1 + 3 + 2 + 2
    assert all(one in prepared for one in seen)


@pytest.mark.usefixtures("long_from_128")
def test_a_step_computes_its_long_prompts_by_their_lengths() -> None:
    llm = LLM(make_model("llama", "bf16", exact=False), max_num_seqs=8, max_num_batched_tokens=2048, num_kv_pages=40)
    lengths = [200, 20, 300, 130, 60, 250]
    for token, length in enumerate(lengths):
        llm.engine.add_request([token] * length, SamplingParams(max_tokens=4, ignore_eos=True))
    launched = llm.engine.model_runner.launch(llm.engine.scheduler.schedule())
    assert [chunk.end for chunk in launched.chunks] == [20, 60, 200, 130, 250, 300]
    llm.engine.abort_all()


def test_what_long_prompts_are_padded_to() -> None:
    assert [padded_length(n) for n in (768, 769, 1000, 1024, 1025, 2049, 8192, 8193)] == [
        *(768, 896, 1024, 1024, 1152, 2304, 8192, 9216)
    ]
    lengths = padded_lengths(5000)
    assert lengths == sorted({padded_length(n) for n in range(varlen_prefill.LONG_PROMPT, 5001)})
    assert padded_lengths(varlen_prefill.LONG_PROMPT - 1) == []
    assert max(padded / n for n in range(1024, 30_000, 7) for padded in [padded_length(n)]) <= 1.125


def test_exact_never_takes_it(through_library: list[list[int]], device: torch.device) -> None:
    context, (q, k, v) = make(MIXED, "fp8", device, torch.bfloat16, exact=True)
    assert context.prefill is None
    assert context.attend(0, q, k, v, softmax_scale=DIM**-0.5).isfinite().all()
    assert not through_library


def test_attention_in_fp8_never_takes_it(through_library: list[list[int]]) -> None:
    context, (q, k, v) = make(EQUAL, "fp8", torch.device("cpu"), torch.bfloat16)
    (layer,) = context.layers
    in_fp8 = PagedKVLayer(layer.k, layer.v, layer.k_scale, layer.v_scale, "fp8")
    out = dataclasses.replace(context, layers=[in_fp8]).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert out.isfinite().all()
    assert not through_library


@pytest.mark.parametrize("family", ["qwen3", "gptj"])
def test_a_whole_engine(
    family: str, through_library: list[list[int]], device: torch.device, monkeypatch: pytest.MonkeyPatch
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
            assert len(through_library) >= 2 * model.config.num_layers
            through_library.clear()
    assert not through_library
    agreeing = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agreeing >= 0.75 * len(tokens[0]), (agreeing, tokens)  # a foreign sequence's keys would leave 1 in 100
