"""A step launched before the last one is read changes no token, whatever happens in between; nor does a graph."""

import dataclasses
import itertools
from collections.abc import Sequence as Rows

import pytest
import torch

from octavo import LLM, SamplingParams
from octavo.serve import RequestOutput
from octavo.serve.engine.logit_adjustment import LogitsProcessor, Plan
from octavo.serve.engine.sequence import Sequence
from octavo.weights.update import WeightUpdate
from tests.serve.random_models import EOS, VOCAB, make_model, random_prompts
from tests.serve.row_by_row import adjust_row_by_row

BASE = SamplingParams(temperature=0.9, max_tokens=24, logprobs=2)
PARAMS = [
    BASE,
    dataclasses.replace(BASE, ignore_eos=True),
    dataclasses.replace(BASE, max_tokens=1),
    dataclasses.replace(BASE, stop_token_ids=list(range(0, 96, 7)), logprobs=None),
    dataclasses.replace(BASE, n=3, seed=7, top_k=20),
    dataclasses.replace(BASE, temperature=0.0, prompt_logprobs=1),
]
PENALIZED = [*PARAMS, dataclasses.replace(BASE, presence_penalty=1.0, logit_bias={EOS: 3.0})]
ENDS_SOON = dataclasses.replace(BASE, logit_bias={EOS: 100.0}, max_tokens=30)
ADJUSTED = [
    *PENALIZED,
    dataclasses.replace(BASE, repetition_penalty=1.4, n=2, temperature=0.0),
    dataclasses.replace(BASE, frequency_penalty=-1.5, repetition_penalty=0.8, min_tokens=20, logit_bias={3: 2.5}),
    dataclasses.replace(ENDS_SOON, min_tokens=9, logprobs=None),
    dataclasses.replace(ENDS_SOON, min_tokens=1, frequency_penalty=0.4),
    dataclasses.replace(BASE, frequency_penalty=2.0, temperature=0.0, max_tokens=70, ignore_eos=True),
]


# sizes that the exact kernels take; the others' sums are made in steps on the host
WIDE = {"vocab_size": 128, "intermediate_size": 384, "head_dim": 64}
WIDE_EXPERTS = WIDE | {"moe_intermediate_size": 128}


def run(llm: LLM, variants: list[SamplingParams]) -> list[RequestOutput]:
    prompts = random_prompts(2 * len(variants), seed=5)
    outputs = llm.generate(prompts, variants * 2)
    llm.engine.check_integrity()
    assert not llm.engine.has_unfinished
    assert llm.engine.page_manager.num_used_pages == 0
    return outputs


def make_llm(is_ahead: bool, device: str = "cpu", **options: object) -> LLM:
    model = make_model("qwen3", "blockwise", device=device, num_layers=1)
    limits = {"max_num_seqs": 6, "max_num_batched_tokens": 96, "num_kv_pages": 12}
    return LLM(model, async_scheduling=is_ahead, **{**limits, **options})  # type: ignore[arg-type]


def test_the_same_outputs() -> None:
    ahead, behind = make_llm(True), make_llm(False)
    ahead.generate([[1, 2, 3]], SamplingParams(max_tokens=2))  # request ids, and so seeds, go on from here
    behind.generate([[1, 2, 3]], SamplingParams(max_tokens=2))
    outputs = run(ahead, PENALIZED)
    assert outputs == run(behind, PENALIZED)
    assert ahead.stats.num_preemptions > 0
    assert ahead.stats.num_prefix_hit_tokens > 0
    reasons = {sample.finish_reason for output in outputs for sample in output.outputs}
    assert reasons == {"stop", "length"}


class RowByRow(LogitsProcessor):
    """Nothing is counted on the device; the host must know all tokens."""

    def plan(self, sequences: Rows[Sequence]) -> Plan | None:
        self._sequences = list(sequences)
        assert not any(seq.num_pending for seq in sequences)
        return Plan(None, 0, 0, None, None)

    def apply(self, logits: torch.Tensor, plan: Plan) -> torch.Tensor:
        return adjust_row_by_row(logits, self._sequences)


@pytest.mark.slow
def test_the_same_outputs_as_row_by_row() -> None:
    variants = [*ADJUSTED[-5:], BASE]
    ahead, by_row = make_llm(True, num_kv_pages=10), make_llm(False)
    by_row.engine.model_runner.adjustments = RowByRow(6, VOCAB, torch.device("cpu"))
    assert run(ahead, variants) == run(by_row, variants)
    assert ahead.stats.num_preemptions > 0
    assert ahead.stats.num_prefix_hit_tokens > 0
    assert ahead.stats.num_multi_chunk_prompts > 0
    assert ahead.engine.model_runner.adjustments.num_bytes == 0


class NotAgain:
    """Of a grammar, as much as is asked: no token twice in a row, and nothing but the end after ten."""

    error = None

    def __init__(self) -> None:
        self.tokens: list[int] = []

    def allowed_tokens(self) -> bytes:
        bits = (1 << VOCAB) - 1
        if self.tokens:
            bits &= ~(1 << self.tokens[-1])
        return (bits if len(self.tokens) < 10 else 1 << EOS).to_bytes(VOCAB // 8, "little")

    def accept(self, token_id: int) -> None:
        self.tokens.append(token_id)


def with_grammars(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> LLM:
    monkeypatch.setattr(llm.engine.grammars, "compile", lambda schema: None)
    monkeypatch.setattr(llm.engine.grammars, "make", lambda schema: NotAgain())
    return llm


def test_the_same_outputs_beside_grammars(monkeypatch: pytest.MonkeyPatch) -> None:
    """Which stop the look-ahead for all while they are there."""
    bound = dataclasses.replace(BASE, json_schema={}, presence_penalty=1.0, repetition_penalty=1.2)
    variants = [*ADJUSTED[-5:-1], bound, dataclasses.replace(BASE, json_schema={}, n=2)]
    ahead, behind = (with_grammars(make_llm(is_ahead), monkeypatch) for is_ahead in (True, False))
    behind.engine.model_runner.adjustments = RowByRow(6, VOCAB, torch.device("cpu"))
    outputs = run(ahead, variants)
    assert outputs == run(behind, variants)
    held = [sample.token_ids for output in (outputs[-1], outputs[-2]) for sample in output.outputs]
    assert len(held) == 3
    for tokens in held:
        assert len(tokens) <= 11 and tokens[-1] == EOS
        assert all(a != b for a, b in itertools.pairwise(tokens))


def test_what_stops_the_look_ahead(monkeypatch: pytest.MonkeyPatch) -> None:
    """A grammar, running or waiting, and nothing else; it goes on behind it."""
    llm = with_grammars(make_llm(True, max_num_seqs=1), monkeypatch)
    first = dataclasses.replace(ADJUSTED[-4], min_tokens=6, max_tokens=12, ignore_eos=True)
    adjusted = llm.engine.add_request([1, 2, 3], first).sequences[0]
    llm.engine.step()
    llm.engine.step()
    assert adjusted.num_pending == 1
    bound = llm.engine.add_request([1, 2, 3], SamplingParams(json_schema={}))
    while not bound.is_finished:
        llm.engine.step()
        assert adjusted.num_pending + bound.sequences[0].num_pending == 0
    last = llm.engine.add_request([4, 5], first).sequences[0]
    llm.engine.step()
    assert last.num_pending == 1


def test_nothing_ends_before_min_tokens_and_then_at_once() -> None:
    llm = make_llm(True)
    params = [dataclasses.replace(ENDS_SOON, min_tokens=n, temperature=0.0) for n in range(5)]
    outputs = llm.generate([[1, 2, 3]] * 5, params)
    assert [len(output.outputs[0].token_ids) for output in outputs] == [1, 2, 3, 4, 5]


def test_drawn_tokens_are_counted_on_the_device() -> None:
    """A bias makes one token win until penalties catch up, whatever the host knows by then."""
    tokens = []
    for is_ahead in (True, False):
        bias = {7: 100.0, 8: 98.0}
        params = SamplingParams(temperature=0.0, max_tokens=12, logit_bias=bias, frequency_penalty=2.0, ignore_eos=True)
        llm = make_llm(is_ahead)
        tokens.append(llm.generate([[1, 2, 3]], params)[0].outputs[0].token_ids)
        assert llm.engine.model_runner.adjustments.num_bytes == 0
    assert tokens[0] == tokens[1]
    assert {7, 8} == set(tokens[0][:8])


def test_counts_survive_a_weight_update_under_way() -> None:
    """The same weights again: only the versions differ from a run without."""
    params = [dataclasses.replace(p, seed=i, max_tokens=20) for i, p in enumerate(ADJUSTED[-5:])]
    prompts = random_prompts(len(params), seed=2)
    calm = [output.outputs for output in make_llm(False, num_kv_pages=40).generate(prompts, params)]
    for is_ahead in (True, False):
        llm = make_llm(is_ahead, num_kv_pages=40)
        requests = [llm.engine.add_request(prompt, p) for prompt, p in zip(prompts, params, strict=True)]
        for _ in range(8):
            llm.engine.step()
        update = WeightUpdate(llm.engine.model, partial=["model.norm.weight"])
        update.stage("model.norm.weight", llm.engine.model.norm.weight.detach().clone())
        llm.engine.commit_update(update, running="keep")
        while llm.engine.has_unfinished:
            llm.engine.step()
        updated = [llm.engine.make_output(request).outputs for request in requests]
        assert any(len(set(sample.weight_versions)) == 2 for samples in updated for sample in samples)
        assert [[s.token_ids for s in samples] for samples in updated] == [[s.token_ids for s in o] for o in calm]


def test_pages_filled_by_tokens_under_way_are_found_later() -> None:
    llm = make_llm(True, num_kv_pages=40)
    first = llm.generate([[5] * 60], SamplingParams(max_tokens=70, ignore_eos=True, temperature=1.0, seed=1))[0]
    again = [5] * 60 + first.outputs[0].token_ids
    llm.stats.reset()
    llm.generate([again], SamplingParams(max_tokens=1))
    assert llm.stats.num_prefix_hit_tokens == 128


def test_the_first_step_returns_before_its_token_is_read() -> None:
    llm = make_llm(True)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(max_tokens=2, ignore_eos=True))
    assert llm.engine.step() == []
    assert [seq.num_pending for seq in request.sequences] == [1]
    assert llm.engine.step() == request.sequences
    assert llm.engine.step() == request.sequences
    assert request.is_finished
    assert not llm.engine.has_unfinished


def test_an_aborted_request_s_token_under_way_is_dropped() -> None:
    llm = make_llm(True)
    aborted, kept = (llm.engine.add_request([i, 2, 3], SamplingParams(max_tokens=4, ignore_eos=True)) for i in (1, 2))
    llm.engine.step()
    llm.engine.abort(aborted)
    while llm.engine.has_unfinished:
        assert aborted.sequences[0] not in llm.engine.step()
    assert aborted.num_output_tokens == 0
    assert kept.num_output_tokens == 4
    llm.engine.check_integrity()


def test_an_aborted_request_leaves_no_counts() -> None:
    llm = make_llm(True)
    request = llm.engine.add_request([1, 2, 3], SamplingParams(frequency_penalty=1.0))
    llm.engine.step()
    assert llm.engine.model_runner.adjustments.num_bytes > 0
    llm.engine.abort(request)
    assert llm.engine.model_runner.adjustments.num_bytes == 0


@pytest.mark.gpu
@pytest.mark.parametrize("recipe", ["blockwise", "rowwise", "bf16"])
@pytest.mark.parametrize("family", ["qwen3", "qwen3_moe", "gptj"])
def test_graphs_and_lookahead_change_no_bit(family: str, recipe: str) -> None:
    """In exact mode; filled-up batches included."""
    model = make_model(family, recipe, device="cuda", **(WIDE_EXPERTS if family == "qwen3_moe" else WIDE))
    outputs = []
    for is_ahead, is_eager in ((False, True), (True, True), (True, False)):
        llm = LLM(
            model,
            max_num_seqs=6,
            max_num_batched_tokens=96,
            num_kv_pages=14,
            async_scheduling=is_ahead,
            enforce_eager=is_eager,
        )
        outputs.append(run(llm, ADJUSTED))
        graphs = llm.engine.model_runner.graphs
        assert (graphs is None) == is_eager
        assert graphs is None or not graphs.is_empty, graphs.obstacle
    assert outputs[0] == outputs[1] == outputs[2]


@pytest.mark.gpu
@pytest.mark.parametrize("is_eager", [True, False])
def test_a_step_with_penalties_waits_for_nothing(is_eager: bool) -> None:
    model = make_model("qwen3", "blockwise", device="cuda", **WIDE)
    llm = LLM(model, max_num_seqs=6, num_kv_pages=14, enforce_eager=is_eager)
    params = [
        dataclasses.replace(p, max_tokens=24, ignore_eos=True, stop_token_ids=[5] if p.min_tokens > 5 else None)
        for p in ADJUSTED[-4:]
    ]
    llm.generate([[1, 2, 3]] * 4, params)  # compiles, captures
    requests = [llm.engine.add_request([1, 2, 3], p) for p in params]
    for _ in range(4):
        llm.engine.step()
    assert all(seq.num_pending == 1 for request in requests for seq in request.sequences)
    chunks = llm.engine.scheduler.schedule()
    mode = torch.cuda.get_sync_debug_mode()
    torch.cuda.set_sync_debug_mode("error")
    try:
        llm.engine.model_runner.launch(chunks)
    finally:
        torch.cuda.set_sync_debug_mode(mode)
    llm.engine.abort_all()


@pytest.mark.gpu
def test_graphs_see_new_weights_and_survive_sleep() -> None:
    model = make_model("qwen3", "blockwise", device="cuda", **WIDE)
    llm = LLM(model, max_num_seqs=4, num_kv_pages=14)
    params = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, logprobs=0)

    def tokens() -> list[RequestOutput]:
        return [output.outputs for output in llm.generate([[1, 2, 3], [4, 5]], params)]

    before = tokens()
    llm.engine.sleep()
    llm.engine.wake()
    assert tokens() == before
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.25)
    model.mark_weights_updated()
    changed = tokens()
    assert changed != before
    fresh = LLM(model, max_num_seqs=4, num_kv_pages=14, enforce_eager=True, async_scheduling=False)
    llm = fresh
    assert [[dataclasses.replace(o, weight_versions=[]) for o in r] for r in tokens()] == [
        [dataclasses.replace(o, weight_versions=[]) for o in r] for r in changed
    ]
