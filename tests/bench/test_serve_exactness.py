"""The measurement of exactness: toy runs of it, and that it sees what differs and what did not happen."""

import dataclasses
import math
import random
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import run_benchmark
from bench.record import Record
from bench.serve import checked_models, exactness, session
from bench.serve.checked_models import TRAINED, CheckedModel, build_checked
from bench.serve.exactness import measure_exactness
from bench.serve.exactness_findings import LARGE_GROUP_ROWS, SMALL_TILE_ROWS, Finding, Tally, find_complaints
from bench.serve.exactness_plan import EXACT_VARIANTS, FULL, TOY, ExactnessPlan
from bench.serve.measure import OutOfTimeError
from bench.serve.row_watch import RowWatch
from bench.serve.shapes import SHAPES
from bench.serve.workloads import EXACTNESS, EngineVariant, check_names
from octavo.models import scoring, sequence_logprobs
from octavo.nn import token_logprobs
from octavo.ops.gemm.scaled_mm.exact import CHECKED_ROWS, bucket_of
from octavo.serve import LLM, SamplingParams
from octavo.serve.engine import EngineStats
from tests.assertions import assert_raises
from tests.bench.quick import options, rows

DENSE, MOE = "Qwen3-8B", "Qwen3-30B-A3B"
SIZES = {"batches": (1, 2, 66), "repeated": (1,), "short": 2, "buckets": (64, 128), "num_tight": 3, "tight_seqs": 3}
SMALL = dataclasses.replace(TOY, **SIZES)


def small_run(monkeypatch: pytest.MonkeyPatch, plan: ExactnessPlan = SMALL) -> None:
    """Let the benchmark run one dense toy under one variant."""
    monkeypatch.setattr(session, "CHECKED_MODELS", (DENSE,))
    monkeypatch.setattr(session, "exact_variants", lambda *_, quick: EXACT_VARIANTS[:1])
    monkeypatch.setattr(exactness, "TOY", plan)


def test_a_run_is_exact_and_shows_what_happened(tmp_path, monkeypatch, capsys):
    small_run(monkeypatch)
    assert run_benchmark("serve", options(tmp_path, workloads=(EXACTNESS,)))
    values = {metric: value for (_, metric), value in rows(tmp_path).items()}
    assert values["max |delta logprob|"] == 0
    # steps of 64 and 128, one sequence twice, two, 66, and those in a tight cache, with a prefix cache and without
    compared = (1 + 1) * 4 + (1 + 1 + 2 + 66) * SMALL.num_tokens + 2 * SMALL.num_tight * SMALL.tight_tokens
    assert values["tokens compared"] == compared
    happened = ("preemptions", "tokens computed again", "prefix-cache hit tokens", "chunked prompts")
    assert all(values[metric] > 0 for metric in happened)
    assert -8 < values["mean logprob"] < -4  # random weights over 512 tokens
    assert values["steps by CUDA graph"] == 0
    said = capsys.readouterr().out
    assert "M padded to [64, 128" in said and "COMPLAINT" not in said


def test_what_is_not_exact_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: scales that tokens share, where a token's bits are its batch's."""
    monkeypatch.setattr(exactness, "TOY", SMALL)
    checked = build_checked(DENSE, "cpu", quick=True)
    record = Record("serve", "what", device="cpu")
    given = (record, "x", checked, EngineVariant("loose", True, "fp8"), "tensorwise", math.inf)
    _, complaints = measure_exactness(*given, quick=True)
    assert complaints[0].startswith("x: max |delta logprob| is ")
    assert 1e-4 < next(float(row["value"] or 0) for row in record.rows if row["metric"] == "max |delta logprob|") < 5


@pytest.mark.parametrize(("wrong", "delta"), [(math.nan, math.inf), (-1.0000001, 1e-7)])
def test_a_bit_that_differs_is_named(wrong: float, delta: float) -> None:
    sample = SimpleNamespace(token_ids=[3, 4], logprobs=SimpleNamespace(sampled=[-1.0, wrong]))
    output = SimpleNamespace(prompt_token_ids=[1, 2], outputs=[sample])
    tally = Tally()
    tally.add("a pair", [output], [torch.tensor([-9.0, -1.0, math.nan if math.isnan(wrong) else -1.0])])  # type: ignore[list-item]
    assert (tally.num_tokens, tally.num_off, tally.delta) == (2, 1, pytest.approx(delta, rel=0.5))
    assert tally.first.startswith(f"a pair, sequence 0 of 2 prompt tokens, sampled token 1: {str(wrong)[:2]}")


def test_what_did_not_happen_is_a_complaint() -> None:
    model = build_checked(MOE, "cpu", quick=True).model
    finding = Finding(Tally(1), EngineStats(), RowWatch(model), TOY, None)
    complaints = find_complaints(finding, model)
    assert complaints[:4] == [
        "no sequence was preempted",
        "no token was computed again after a preemption",
        "no token came from the prefix cache",
        "no prompt came in chunks",
    ]
    assert "no step sampled for [1, 8, 65] sequences" in complaints
    for side in ("engine", "trainer"):
        assert f"the {side} padded no M to [64, 128, 256, 512]" in complaints
        assert f"no expert got 128 rows in the {side}, but 0" in complaints
        assert sum(f"the {side}'s" in complaint for complaint in complaints) == 2  # tiles of lm_head, of the experts
    on_gpu = SimpleNamespace(device=torch.device("cuda"), config=model.config)
    assert "no step ran as a CUDA graph (no obstacle is known)" in find_complaints(finding, on_gpu)  # type: ignore[arg-type]


def test_watching_changes_no_bit_and_leaves_no_trace() -> None:
    checked = build_checked(MOE, "cpu", quick=True)
    model = checked.model
    model.set_numerics(EXACT_VARIANTS[0].numerics("blockwise"))
    prompts = [checked.draw(length, random.Random(length)) for length in (5, 70)]
    params = SamplingParams(max_tokens=3, logprobs=0, ignore_eos=True)
    plain = LLM(model, num_kv_pages=8).generate(prompts, params)
    with RowWatch(model) as watch:
        llm = LLM(model, num_kv_pages=8)
        watch.watch(llm.engine)
        watched = llm.generate(prompts, params)
        sequence_logprobs(model, prompts)
        sequence_logprobs(model, prompts, prompt_lens=[4, 60])
    assert [output.outputs for output in watched] == [output.outputs for output in plain]
    assert (watch.engine.rows, watch.engine.head_rows) == ({75, 2}, {2})
    assert (watch.trainer.rows, watch.trainer.head_rows) == ({73}, {73, 11})
    assert watch.sampled == {2} and watch.num_replays == 0
    mean = 75 * model.config.num_experts_per_tok / model.config.num_experts
    assert mean <= watch.engine.most_expert_rows <= 75
    assert "logits" not in vars(model) and not model._forward_pre_hooks
    assert scoring.token_logprobs is token_logprobs
    assert all(layer.mlp.recorder is None for layer in model.layers)


@pytest.mark.parametrize("name", list(SHAPES))
def test_prompts_of_a_bucket_fill_its_size_on_both_sides(name: str) -> None:
    config = SHAPES[name]
    plan = FULL.for_variant(EXACT_VARIANTS[0], config)
    draw = lambda length, _: [0] * length  # noqa: E731
    checked = CheckedModel(name, SimpleNamespace(config=config), draw)  # type: ignore[arg-type]
    assert {*CHECKED_ROWS} <= {*plan.buckets}
    assert (max(plan.buckets) * config.num_experts_per_tok >= 2048 * config.num_experts) if config.num_experts else True
    for size in plan.buckets:
        prompts = exactness._bucket_prompts(checked, size, random.Random(size))
        in_engine = sum(map(len, prompts))
        in_trainer = in_engine + len(prompts) * (exactness._BUCKET_TOKENS - 1)
        assert bucket_of(in_engine) == bucket_of(in_trainer) == size
        assert in_engine <= plan.budget and in_trainer <= exactness._SCORED_TOKENS
        assert max(map(len, prompts)) + exactness._BUCKET_TOKENS <= config.max_position_embeddings
    assert max(plan.buckets) > SMALL_TILE_ROWS >= min(plan.buckets)


def test_the_full_plan_crosses_what_it_must() -> None:
    attention = pytest.importorskip("octavo.ops.attention.triton")
    grouped_mm = pytest.importorskip("octavo.ops.gemm.grouped_mm.triton")
    hp_mm = pytest.importorskip("octavo.ops.gemm.hp_mm.triton")
    assert hp_mm.SMALL.block_m == SMALL_TILE_ROWS
    assert grouped_mm.LARGE_GROUP == LARGE_GROUP_ROWS
    assert attention.SPLIT < exactness._MOST_PROMPT
    assert FULL.long * 3 // 4 < attention.SPLIT < FULL.long
    assert (min(FULL.batches), max(FULL.batches)) == (1, 256)
    assert {*FULL.few_batches, *FULL.repeated} <= {*FULL.batches}


def test_a_model_that_does_not_learn_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checked_models, "_LR", 1e-9)
    monkeypatch.setattr(checked_models, "_TOY_STEPS", 3)
    assert_raises(AssertionError, "3 steps took the loss from", build_checked, TRAINED, "cpu", quick=True)


def test_it_gives_up_in_time_and_has_a_name() -> None:
    checked, record = build_checked(DENSE, "cpu", quick=True), Record("serve", "what", device="cpu")
    given = (record, "x", checked, EXACT_VARIANTS[0], "blockwise", time.perf_counter())
    assert_raises(OutOfTimeError, None, measure_exactness, *given, quick=True)
    assert not record.rows and "logits" not in vars(checked.model)
    assert check_names(("online", EXACTNESS, "attention")) == ("attention", EXACTNESS, "online")


@pytest.mark.largest
def test_every_toy_is_exact(tmp_path: Path) -> None:
    assert run_benchmark("serve", options(tmp_path, workloads=(EXACTNESS,)))
    deltas = {case: value for (case, metric), value in rows(tmp_path).items() if metric == "max |delta logprob|"}
    assert len(deltas) == len(SHAPES) + 1 + len(EXACT_VARIANTS) - 1
    assert not any(deltas.values())
    assert any(metric == "largest rows of an expert" for _, metric in rows(tmp_path))


@pytest.mark.gpu
def test_every_toy_is_exact_on_a_gpu(tmp_path: Path) -> None:
    assert run_benchmark("serve", options(tmp_path, "cuda", workloads=(EXACTNESS,)))
    replays = [value for (_, metric), value in rows(tmp_path).items() if metric == "steps by CUDA graph"]
    assert replays and all(replays)
