"""The benchmark of the reinforcement loop: its workloads, checks and record, and toy runs of its parts on a CPU."""

import dataclasses
import json
import math
import time
from pathlib import Path

import pytest
import torch

from bench import BenchOptions, run_benchmark
from bench.record import Record
from bench.report import BOTH_LAYOUTS, DELTA, DELTA_WITH_GRADIENT, STEP_TIME
from bench.rl import check, exactness, learning, session
from bench.rl.host import RolloutHost, tight_num_pages
from bench.rl.pace import paced_steps
from bench.rl.refit import code_error, coded_linears
from bench.rl.rollouts import decoding, measure_rollout
from bench.rl.synthetic import RandomWords, build_policy, loop_config, model_config, random_rollouts, word_tokenizer
from bench.rl.whole_step import measure_whole_step
from bench.rl.workloads import (
    ENGINE_VARIANTS,
    LOOP_VARIANTS,
    LOOPS,
    NAMES,
    ROLLOUTS,
    LoopSizes,
    LoopVariant,
    check_names,
    check_variants,
    shrink,
)
from bench.serve.floor import kv_token_bytes
from bench.serve.measure import Run
from bench.serve.shapes import QWEN3_8B
from bench.serve_options import ServeOptions
from bench.speed.ceilings import measure_ceilings
from octavo import cli
from octavo.errors import BackendError, ConfigError
from octavo.numerics import Numerics
from octavo.rl.health import HealthSection, Limit
from octavo.rl.learner import Learner

TOY = LOOPS["whole-step"].shrunk()


def options(folder: Path | None, **asked: object) -> BenchOptions:
    serve = ServeOptions(**asked)  # type: ignore[arg-type]
    return BenchOptions(device="cpu", quick=True, out=folder, commit="abc", serve=serve)


def rows(folder: Path) -> dict[tuple[str, str], float]:
    document = json.loads((folder / "rl.json").read_text())
    return {(row["case"], row["metric"]): row["value"] for row in document["rows"]}


def by_variant(folder: Path, metric: str) -> dict[str, float]:
    return {case.partition(": octavo ")[2]: value for (case, name), value in rows(folder).items() if name == metric}


def test_the_workloads_are_those_of_the_goals() -> None:
    [rollout] = ROLLOUTS["rollout-8b"]
    assert rollout.label == "Qwen3-8B 16 prompts x 16 samples, 512 in, 2048 out"
    assert ROLLOUTS["long-answers"][1].label == "Qwen3-8B decode alone, 128 samples, 512 after 8192"
    assert ROLLOUTS["rollout-30b"][0].label == "Qwen3-30B-A3B 256 requests, 512 in, 1024 out"
    requests = rollout.draw(1000, rollout.num_requests)
    assert (len(requests), len({tuple(ids) for ids, _ in requests})) == (256, 16)
    assert all(requests[i][0] == requests[i - i % 16][0] for i in range(256))
    long = ROLLOUTS["long-answers"][1].draw(151_936, 8)
    assert len({ids[0] for ids, _ in long}) == 8  # pages of their own
    assert len({w.label for ws in ROLLOUTS.values() for w in ws} | {s.label for s in LOOPS.values()}) == 9


def test_names_and_options_are_checked() -> None:
    assert check_names(("refit", "rollout-8b")) == ("rollout-8b", "refit")
    assert check_names(()) == NAMES
    assert check_variants(("kv-only", "exact")) == ("kv-only", "exact")
    for call in (lambda: check_names(("9b",)), lambda: check_variants(("int4",))):
        with pytest.raises(ConfigError, match="must be one of"):
            call()
    with pytest.raises(ConfigError, match="--workload and --variant"):
        run_benchmark("rl", dataclasses.replace(options(None), filters=("8b",)))
    with pytest.raises(ConfigError, match="leave --url out"):
        run_benchmark("rl", options(None, url="http://x", workloads=("online",)))


def test_a_tight_cache_has_the_same_bytes_and_holds_fp8_alone() -> None:
    [workload] = ROLLOUTS["preemptions"]
    pages = {kind: tight_num_pages(workload, kind, QWEN3_8B) for kind in ("bf16", "fp8")}
    needed = 256 * 1536 // 64
    assert pages["bf16"] < 0.6 * needed < needed <= pages["fp8"]
    num_bytes = [pages[kind] * kv_token_bytes(QWEN3_8B, kind) for kind in pages]
    assert num_bytes[0] == pytest.approx(num_bytes[1], rel=1e-3)


def test_decoding_is_what_comes_after_the_last_first_token() -> None:
    # first tokens after 1 s and 2 s; then one a second each
    run = Run(4.0, [1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0], 2, 7, 4, 0, None, "a test")
    assert decoding(run, [([1], 4), ([2], 3)]) == (2.0, 4)


def test_steps_stop_before_one_that_would_end_late() -> None:
    assert list(paced_steps(1, 2, math.inf)) == [(1, False), (2, True), (3, True)]
    seen = []
    for number, _ in paced_steps(1, 5, time.perf_counter() + 0.05):
        seen.append(number)
        time.sleep(0.03)
    assert seen == [1]


def test_random_words_are_one_token_each() -> None:
    task, tokenizer = RandomWords(50, 7), word_tokenizer(50)
    prompts = task.prompts("train", 3, seed=4)
    assert prompts == task.prompts("train", 3, seed=4) != task.prompts("train", 3, seed=5)
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert [len(i) for i in ids] == [7] * 3
    assert [tokenizer.decode(i) for i in ids] == prompts
    assert (tokenizer.eos_id, tokenizer.vocab_size) == (None, 50)
    rewards = {task.score(prompts[0], answer) for answer in ("w1", "w2", "w3")}
    assert len(rewards) == 3 and all(0 <= reward < 1 for reward in rewards)


def test_rollouts_that_are_made_up_have_the_lengths_asked_for() -> None:
    sizes = dataclasses.replace(TOY, min_tokens=4, num_prompts=5)
    rollouts = random_rollouts(sizes, 100)
    assert len(rollouts) == 10 and len(set(rollouts.response_lens)) > 2
    assert 4 <= min(rollouts.response_lens) <= max(rollouts.response_lens) <= sizes.max_tokens
    assert rollouts.num_tokens == len(rollouts.rollout_logprobs)
    assert rollouts.sequences[0][: sizes.prompt_len] == rollouts.sequences[1][: sizes.prompt_len]


def test_variants_are_what_they_are_called() -> None:
    configs = {name: loop_config(variant, TOY, "blockwise", "cpu") for name, variant in LOOP_VARIANTS.items()}
    assert not configs["bf16"].trainer_numerics.recipe.is_fp8 and configs["bf16"].correction.kind == "none"
    assert configs["fp8"].trainer_numerics.recipe.is_fp8 and configs["fp8"].correction.kind == "token_tis"
    assert configs["fp8"].rollout_numerics.kv_cache_dtype == "fp8" and not configs["fp8"].exact
    assert configs["exact"].trainer_numerics == configs["exact"].rollout_numerics
    assert configs["exact"].trainer_numerics.exact
    kv_only = ENGINE_VARIANTS["kv-only"].numerics("blockwise")
    assert (kv_only.recipe.is_fp8, kv_only.kv_cache_dtype) == (False, "fp8")


def test_gradients_are_checked(monkeypatch: pytest.MonkeyPatch) -> None:
    shape = model_config(TOY)
    numerics = loop_config(LOOP_VARIANTS["fp8"], TOY, "blockwise", "cpu").trainer_numerics
    error, cosine = check.check_gradients(shape, numerics, "cpu")
    assert 0 < error < 0.2 and 0.97 < cosine < 1
    plain = check._logprobs_and_gradient

    def of_another_token(model: object, sequences: list[list[int]]) -> tuple[torch.Tensor, list[torch.Tensor]]:
        logprobs, grads = plain(model, sequences)  # type: ignore[arg-type]
        return logprobs, [g.roll(1, 0) for g in grads] if model.numerics.recipe.is_fp8 else grads  # type: ignore[attr-defined]

    monkeypatch.setattr(check, "_logprobs_and_gradient", of_another_token)
    with pytest.raises(AssertionError, match="gradients have cosine"):
        check.check_gradients(shape, numerics, "cpu")


def test_codes_of_older_weights_are_seen() -> None:
    numerics = loop_config(LOOP_VARIANTS["exact"], TOY, "blockwise", "cpu").trainer_numerics
    model = build_policy(model_config(TOY), numerics, "cpu")
    linears = coded_linears(model)
    assert len(linears) == 2 * 4 and model.lm_head not in linears
    assert 0 < code_error(linears[0]) < 0.05
    layer = linears[0]
    held = layer.forward_operands(numerics.recipe), layer.backward_operands(numerics.recipe)
    layer.forward_operands = lambda _: held[0]  # type: ignore[method-assign]
    layer.backward_operands = lambda _: held[1]  # type: ignore[method-assign]
    with torch.no_grad():
        layer.weight.neg_()  # type: ignore[union-attr]
    assert code_error(layer) > 1


def test_a_step_that_updates_nothing_has_no_time() -> None:
    config = loop_config(LOOP_VARIANTS["bf16"], LOOPS["learner-step"].shrunk(), "blockwise", "cpu")
    never = HealthSection(ess=Limit(low=2.0, action="skip"))  # no share is that large
    config = config.model_copy(update={"health": never})
    shape = model_config(TOY)
    learner = Learner(build_policy(shape, Numerics(), "cpu"), config)
    with pytest.raises(BackendError, match="made 0 of 1 updates"):
        learning.timed_update(learner, random_rollouts(TOY, shape.vocab_size), 1)


def test_a_difference_in_exact_mode_is_a_complaint() -> None:
    record = Record("rl", "what", device="cpu")
    record.add("x", DELTA, "nats", 0.0)
    assert exactness.complaint(record) is None
    record.add("x", DELTA_WITH_GRADIENT, "nats", 1e-7)
    assert "1e-07" in str(exactness.complaint(record))
    record.rows[-1]["value"] = math.nan
    assert "nan" in str(exactness.complaint(record))


def test_steps_stand_beside_bf16_and_exact_ones_beside_inexact(tmp_path: Path) -> None:
    results = session.RLSession(options(tmp_path))
    results.open_record("x")
    for variant, seconds in (("bf16", 4.0), ("blockwise", 2.0), ("blockwise, exact", 3.0)):
        results.record.add(f"step: octavo {variant}", STEP_TIME, "s", seconds)
    results.flush()
    results.flush()  # no row twice
    assert by_variant(tmp_path, "time over bf16's") == {"blockwise": 0.5, "blockwise, exact": 0.75}
    assert by_variant(tmp_path, "time over the inexact loop's") == {"blockwise, exact": 1.5}
    assert len(results.record.rows) == 6


def test_a_cache_too_small_for_decoding_alone_is_refused() -> None:
    host = RolloutHost("cpu", "blockwise", quick=True)
    workload = shrink(ROLLOUTS["long-answers"][1])
    ceilings = measure_ceilings("cpu", quick=True)
    hosted = host.engine_for(workload, ENGINE_VARIANTS["bf16"])
    hosted.llm.stats.num_kv_pages = 3
    with pytest.raises(BackendError, match="need 18 pages of the KV cache, it has 3"):
        measure_rollout(
            Record("rl", "x", device="cpu"), "x", workload, ENGINE_VARIANTS["bf16"], host, ceilings, math.inf
        )


def test_a_tight_cache_preempts_in_bf16(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("preemptions",), variants=("bf16",)))
    assert by_variant(tmp_path, "preemptions")["bf16"] > 0
    assert by_variant(tmp_path, "tokens computed again")["bf16"] > 0
    said = capsys.readouterr().out
    assert said.index("start: toy") < said.index("end: toy") < said.index("record: ")


def test_a_toy_rollout_shares_its_prompts(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("rollout-8b",), variants=("fp8-kv",)))
    assert by_variant(tmp_path, "prompt tokens found in the prefix cache") == {"blockwise + FP8 KV": 4 * 64}
    assert by_variant(tmp_path, "output throughput")["blockwise + FP8 KV"] > 0


def test_decoding_alone_is_timed_at_one_batch_for_all_variants(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("long-answers",), variants=("kv-only",)))
    samples = {case: value for (case, metric), value in rows(tmp_path).items() if metric == "samples"}
    assert samples == {
        f"toy of Qwen3-8B decode alone, {n} samples, 10 after 128: octavo bf16 + FP8 KV": n for n in (3, 6)
    }


def test_refit_and_exactness_have_their_rows(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("refit", "exact-moe")))
    values = rows(tmp_path)
    [(both, _)] = [key for key in values if key[1] == BOTH_LAYOUTS]
    assert min(values[both, "refit, forward layout"], values[both, BOTH_LAYOUTS]) > 0  # in no order on a busy CPU
    assert values[both, "weights"] == pytest.approx(2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256), rel=1e-3)
    assert (
        by_variant(tmp_path, DELTA) == by_variant(tmp_path, DELTA_WITH_GRADIENT) == {"blockwise, end to end, exact": 0}
    )
    assert by_variant(tmp_path, "tokens compared") == {"blockwise, end to end, exact": 40}


def test_a_whole_step_tells_its_phases_apart(tmp_path: Path) -> None:
    record, variant = Record("rl", "x", device="cpu"), LOOP_VARIANTS["exact"]
    sizes = dataclasses.replace(TOY, passes=1, num_layers=1)
    measure_whole_step(record, "x", sizes, variant, "blockwise", "cpu", math.inf)
    values = {str(row["metric"]): row["value"] for row in record.rows}
    phases = [values[f"time of {phase}"] for phase in ("sampling", "scoring", "learning", "refit")]
    assert all(isinstance(seconds, float) and seconds > 0 for seconds in phases)
    assert sum(phases) == pytest.approx(values[STEP_TIME], rel=1e-2)  # type: ignore[arg-type]
    assert values["largest difference of logprobs"] == 0


def test_an_variant_that_fails_leaves_the_others(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail_in_bf16(record: Record, case: str, sizes: LoopSizes, variant: LoopVariant, *_: object) -> str:
        record.add(case, STEP_TIME, "s", 1.0)
        assert variant.is_fp8, "bf16 is off"
        return "well"

    monkeypatch.setattr(session, "measure_learner", fail_in_bf16)
    assert not run_benchmark("rl", options(tmp_path, workloads=("learner-step",)))
    assert set(by_variant(tmp_path, STEP_TIME)) == {"blockwise, end to end"}
    assert "bf16: AssertionError: bf16 is off" in capsys.readouterr().out


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("rollout-8b", "whole-step"), time_limit_s=1e-9))
    assert rows(tmp_path) == {}
    assert capsys.readouterr().out.count("skipped, it does not fit into --time-limit") >= 3


def test_the_command_takes_its_options(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    arguments = [
        "--workload",
        "learner-step",
        "--variant",
        "fp8",
        "--layers",
        "1",
        "--passes",
        "1",
        "--out",
        str(tmp_path),
    ]
    monkeypatch.setattr("sys.argv", ["octavo", "bench", "rl", "--quick", "--device", "cpu", *arguments])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    case = "learner's step, toy of Qwen3-8B (1 layers), 2 x 2 sequences, 12 in, 6-10 out: octavo blockwise, end to end"
    values = rows(tmp_path)
    assert {name for name, _ in values} == {case}
    assert (values[case, "timed steps"], values[case, "cosine of the gradients with bf16's"] > 0.9) == (1, True)
    assert f"end: {case}" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_toys_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    assert run_benchmark("rl", BenchOptions(quick=True, out=tmp_path, commit="abc", serve=ServeOptions((name,))))
    assert rows(tmp_path)


@pytest.mark.slow
def test_every_workload_runs_as_a_toy(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path))
    values = rows(tmp_path)
    tight = {
        case.partition(": ")[2]: n for (case, metric), n in values.items() if metric == "preemptions" and "fits" in case
    }
    assert tight.pop("octavo bf16") > 0
    assert tight == {"octavo bf16 + FP8 KV": 0, "octavo blockwise + FP8 KV": 0}
    assert set(by_variant(tmp_path, "throughput over bf16's")) == {"bf16 + FP8 KV", "blockwise", "blockwise + FP8 KV"}
    assert len({case for case, _ in values}) == 20 + ("exact" in LOOPS["whole-step"].variants)
