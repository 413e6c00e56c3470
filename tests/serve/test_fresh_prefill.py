"""Sequences that begin in a step may attend through torch's kernels: as over the pages, and never in exact mode."""

import dataclasses

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.ops.attention import PAGE_SIZE, PagedKVLayer, allocate_kv_layer, write_kv
from octavo.serve.engine import paged_context
from octavo.serve.engine.paged_context import PagedContext
from octavo.testing import assert_bitwise, assert_sqnr
from tests.serve.random_models import make_model, random_prompts

HEADS, KV_HEADS, DIM = 4, 2, 64
# A decode, a chunk of a prefill, then sequences that begin: tokens [start, end) of each.
MIXED = [(70, 71), (5, 6), (64, 100), (0, 70), (0, 3), (0, 130)]
EQUAL = [(0, 40), (0, 40), (0, 40)]
# On a CPU both roads multiply the same decoded K and V. On a GPU the pages' are fp16 codes with fp32 scales, torch's
# are rounded to bf16 (1.1e-3 of each), as are its probabilities.
FLOORS = {"cpu": 50.0, "cuda": 42.0}


@pytest.fixture
def through_library(monkeypatch: pytest.MonkeyPatch) -> list[list[int]]:
    """The road switched on; the lengths of the sequences that have taken it, a list a call."""
    found: list[list[int]] = []
    attend = paged_context.attention_packed

    def counted(q, k, v, lengths, **options):  # type: ignore[no-untyped-def]
        found.append(lengths.cu_seqlens.diff().tolist())
        return attend(q, k, v, lengths, **options)

    monkeypatch.setattr(paged_context, "FRESH_THROUGH_LIBRARY", True)
    monkeypatch.setattr(paged_context, "attention_packed", counted)
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
    return dataclasses.replace(context, fresh=None)


def test_it_is_off_by_default(device: torch.device) -> None:
    assert not paged_context.FRESH_THROUGH_LIBRARY
    assert make(MIXED, "fp8", device, torch.bfloat16)[0].fresh is None


@pytest.mark.parametrize(
    ("spans", "wanted"),
    [
        (MIXED, (3, 38, [70, 3, 130])),
        (EQUAL, (0, 0, [40, 40, 40])),
        ([(0, 1), (3, 4)], None),
        ([(0, 9), (64, 70)], None),  # only the last ones
        ([(0, 9), (64, 70), (0, 2)], (2, 15, [2])),
    ],
    ids=str,
)
def test_who_begins(
    spans: list[tuple[int, int]], wanted: tuple[int, int, list[int]] | None, through_library: list[list[int]]
) -> None:
    fresh = make(spans, "fp8", torch.device("cpu"), torch.bfloat16)[0].fresh
    if wanted is None:
        assert fresh is None
    else:
        assert fresh is not None
        assert (fresh.first_sequence, fresh.first_token, fresh.lengths.cu_seqlens.diff().tolist()) == wanted
        assert fresh.lengths.num_tokens == sum(wanted[2])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=["bf16", "fp32"])
@pytest.mark.parametrize("kv", ["fp8", "bf16"])
@pytest.mark.parametrize("spans", [MIXED, EQUAL, MIXED[3:], [*MIXED[:2], *EQUAL]], ids=["mixed", "equal", "new", "no"])
def test_it_is_the_attention_over_the_pages(
    spans: list[tuple[int, int]], kv: str, dtype: torch.dtype, through_library: list[list[int]], device: torch.device
) -> None:
    context, (q, k, v) = make(spans, kv, device, dtype)
    assert context.fresh is not None
    out = context.attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert through_library == [[end for start, end in spans if start == 0]]
    through_library.clear()
    expected = paged(context).attend(0, q, k, v, softmax_scale=DIM**-0.5)
    assert not through_library
    end = context.fresh.first_token
    assert out.shape == expected.shape
    if dtype == torch.bfloat16 or device.type == "cpu":
        assert_bitwise(out[:end], expected[:end])
    elif end:  # no kernel of ours: a library's, over a batch padded to other sizes
        assert_sqnr(out[:end], expected[:end], 90.0)
    assert_sqnr(out[end:], expected[end:], FLOORS[device.type] if dtype == torch.bfloat16 else 90.0)


def test_exact_never_takes_it(through_library: list[list[int]], device: torch.device) -> None:
    context, (q, k, v) = make(MIXED, "fp8", device, torch.bfloat16, exact=True)
    assert context.fresh is None
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
def test_a_whole_engine(family: str, through_library: list[list[int]], device: torch.device) -> None:
    """Prefix hits, chunks and decodes in the same steps; the tokens are those of the pages but for near ties."""
    sizes = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
    model = make_model(family, "blockwise", exact=False, device=device, **sizes)
    prompts = random_prompts(6, seed=3)
    params = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    tokens = []
    for is_on in (True, False):
        paged_context.FRESH_THROUGH_LIBRARY = is_on
        llm = LLM(model, max_num_seqs=6, max_num_batched_tokens=96, num_kv_pages=40)
        outputs = llm.generate(prompts, params)
        tokens.append([token for output in outputs for token in output.outputs[0].token_ids])
        if is_on:
            assert llm.stats.num_prefix_hit_tokens > 0
            assert llm.stats.num_multi_chunk_prompts > 0
            assert len(through_library) >= 2 * model.config.num_layers
            through_library.clear()
    assert not through_library
    agreeing = sum(a == b for a, b in zip(*tokens, strict=True))
    assert agreeing >= 0.75 * len(tokens[0]), (agreeing, tokens)  # a foreign sequence's keys would leave 1 in 100
