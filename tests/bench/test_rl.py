"""The benchmark of the reinforcement loop: its workloads, checks and record, and toy runs of its parts on a CPU."""

import dataclasses
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
from bench.rl.workloads import ENGINE_VARIANTS, LOOP_VARIANTS, LOOPS, NAMES, ROLLOUTS, shrink
from bench.serve.floor import kv_token_bytes
from bench.serve.measure import EngineRun
from bench.serve.shapes import QWEN3_8B
from bench.serve_options import ServeOptions
from bench.speed.ceilings import measure_ceilings
from octavo import cli
from octavo.errors import BackendError, ConfigError
from octavo.numerics import Numerics
from octavo.rl.health import HealthSection, Limit
from octavo.rl.learner import Learner
from tests.assertions import assert_raises
from tests.bench.quick import options, rows

TOY = LOOPS["whole-step"].shrunk()


def by_variant(folder: Path, metric: str) -> dict[str, float]:
    found = rows(folder, "rl").items()
    return {case.partition(": octavo ")[2]: value for (case, name), value in found if name == metric}


def test_a_tight_cache_has_the_same_bytes_and_holds_fp8_alone() -> None:
    [workload] = ROLLOUTS["preemptions"]
    pages = {kind: tight_num_pages(workload, kind, QWEN3_8B) for kind in ("bf16", "fp8")}
    needed = 256 * 1536 // 64
    assert pages["bf16"] < 0.6 * needed < needed <= pages["fp8"]
    num_bytes = [pages[kind] * kv_token_bytes(QWEN3_8B, kind) for kind in pages]
    assert num_bytes[0] == pytest.approx(num_bytes[1], rel=1e-3)


def test_decoding_is_what_comes_after_the_last_first_token() -> None:
    # first tokens after 1 s and 2 s; then one a second each
    run = EngineRun(4.0, [1.0, 2.0], [1.0, 1.0, 1.0, 1.0, 1.0], 2, 7, 4, 0, None, "a test")
    assert decoding(run, [([1], 4), ([2], 3)]) == (2.0, 4)


def test_a_whole_step_is_timed_five_times() -> None:
    steps = list(paced_steps(1, LOOPS["whole-step"].passes, math.inf))
    assert [number for number, is_timed in steps if is_timed] == [2, 3, 4, 5, 6]


def test_steps_stop_before_one_that_would_end_late() -> None:
    seen = []
    for number, _ in paced_steps(1, 5, time.perf_counter() + 0.05):
        seen.append(number)
        time.sleep(0.03)
    assert seen == [1]


def test_random_words_are_one_token_each() -> None:
    task, tokenizer = RandomWords(50, 7), word_tokenizer(50)
    prompts, again, others = (task.prompts("train", 3, seed=seed) for seed in (4, 4, 5))
    assert prompts == again != others
    ids = [tokenizer.encode(prompt) for prompt in prompts]
    assert [len(i) for i in ids] == [7] * 3 and [tokenizer.decode(i) for i in ids] == prompts
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
    assert_raises(AssertionError, "gradients have cosine", check.check_gradients, shape, numerics, "cpu")


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
    host, workload = RolloutHost("cpu", "blockwise", quick=True), shrink(ROLLOUTS["long-answers"][1])
    host.engine_for(workload, ENGINE_VARIANTS["bf16"]).llm.stats.num_kv_pages = 3
    given = (workload, ENGINE_VARIANTS["bf16"], host, measure_ceilings("cpu", quick=True), math.inf)
    with pytest.raises(BackendError, match="need 18 pages of the KV cache, it has 3"):
        measure_rollout(Record("rl", "x", device="cpu"), "x", *given)


def test_refit_and_exactness_have_their_rows(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path, workloads=("refit", "exact-moe")))
    values = rows(tmp_path, "rl")
    [(both, _)] = [key for key in values if key[1] == BOTH_LAYOUTS]
    assert min(values[both, "refit, forward layout"], values[both, BOTH_LAYOUTS]) > 0  # in no order on a busy CPU
    assert values[both, "weights"] == pytest.approx(2 * (128 * (128 + 64 + 64 + 128) + 3 * 128 * 256), rel=1e-3)
    zero = {"blockwise, end to end, exact": 0}
    assert by_variant(tmp_path, DELTA) == by_variant(tmp_path, DELTA_WITH_GRADIENT) == zero
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


def test_the_command_takes_its_options(tmp_path, monkeypatch, capsys):
    asked = "--quick --device cpu --workload learner-step --variant fp8 --layers 1 --passes 1 --out"
    monkeypatch.setattr("sys.argv", ["octavo", "bench", "rl", *asked.split(), str(tmp_path)])
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    case = "learner's step, toy of Qwen3-8B (1 layers), 2 x 2 sequences, 12 in, 6-10 out: octavo blockwise, end to end"
    values = rows(tmp_path, "rl")
    assert {name for name, _ in values} == {case}
    assert (values[case, "timed steps"], values[case, "cosine of the gradients with bf16's"] > 0.9) == (1, True)
    assert f"end: {case}" in capsys.readouterr().out


@pytest.mark.gpu
@pytest.mark.parametrize("name", NAMES)
def test_toys_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    assert run_benchmark("rl", BenchOptions(quick=True, out=tmp_path, commit="abc", serve=ServeOptions((name,))))
    assert rows(tmp_path, "rl")


@pytest.mark.largest
def test_every_workload_runs_as_a_toy(tmp_path: Path) -> None:
    assert run_benchmark("rl", options(tmp_path))
    values = rows(tmp_path, "rl")
    tight = {key: n for key, n in values.items() if "fits" in key[0]}
    preemptions, again = (
        {case.partition(": octavo ")[2]: n for (case, metric), n in tight.items() if metric == asked}
        for asked in ("preemptions", "tokens computed again")
    )
    assert preemptions.pop("bf16") > 0 < again["bf16"]
    assert preemptions == {"bf16 + FP8 KV": 0, "blockwise + FP8 KV": 0}
    assert set(by_variant(tmp_path, "throughput over bf16's")) == {"bf16 + FP8 KV", "blockwise", "blockwise + FP8 KV"}
    hits = {n for (case, metric), n in values.items() if "prefix cache" in metric and "2 prompts x 3 samples" in case}
    assert hits == {4 * 64}
    samples = {case: n for (case, metric), n in values.items() if metric == "samples" and "bf16 + FP8 KV" in case}
    assert sorted(samples.values()) == [3, 6]  # one batch for all variants, and the largest of FP8


def test_what_the_loop_has_not_is_refused() -> None:
    refused = {"--workload must": {"workloads": ("9b",)}, "--variant must": {"variants": ("int4",)}}
    refused["leave --url out"] = {"url": "http://x", "workloads": ("online",)}
    for name, asked in refused.items():
        assert_raises(ConfigError, name, run_benchmark, "rl", options(None, **asked))
