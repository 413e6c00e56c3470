"""The serving benchmark: its workloads, its floor, its checks, its record, and toy runs of all of it on a CPU."""

import dataclasses
import json
import math
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from bench import BenchOptions, run_benchmark
from bench.record import Record
from bench.serve import check, first_token, offline, session
from bench.serve.cold_start import ColdStart
from bench.serve.floor import Counts, floor_s, kv_token_bytes
from bench.serve.host import Hosted
from bench.serve.made_tokenizer import make_tokenizer
from bench.serve.measure import EngineRun, OutOfTimeError, percentile, run_requests
from bench.serve.rows import add_cold_start
from bench.serve.shapes import QWEN3_8B, QWEN3_30B_A3B, build_model, make_toy
from bench.serve.workloads import VARIANTS, VLLM, WORKLOADS, EngineVariant, Workload, check_names, find_variants
from bench.serve_options import ServeOptions
from bench.speed.ceilings import Ceilings
from octavo import cli
from octavo.errors import ConfigError
from octavo.models import save_model, sequence_logprobs
from octavo.numerics import Numerics
from octavo.serve import LLM
from tests.assertions import assert_raises
from tests.bench.quick import options, rows

FP8_KV = VARIANTS["fp8-kv"].numerics("blockwise")
TOY = make_toy(QWEN3_8B)


def test_the_floor_is_what_bytes_and_operations_leave() -> None:
    ceilings = Ceilings(bf16_flops=1e15, fp8_flops=2e15, copy_bytes=4e12)
    counts = Counts.of(QWEN3_8B)
    assert counts.dense + 2 * counts.head == pytest.approx(QWEN3_8B.num_params, rel=1e-3)
    assert kv_token_bytes(QWEN3_8B, "bf16") == 147_456
    assert kv_token_bytes(QWEN3_8B, "fp8") == 73_728 + 2 * 36 * 8 * 4
    # one request is bound by the weights' bytes
    one = floor_s(QWEN3_8B, VARIANTS["fp8"].numerics("blockwise"), [(128, 513)], 512, ceilings)
    weights_s = 512 * (counts.dense + 2 * counts.head) / 4e12
    assert weights_s < one < 1.02 * weights_s
    # half as many sequences at a time need twice the steps
    many = [floor_s(QWEN3_8B, FP8_KV, [(1000, 1000)] * 512, n, ceilings) for n in (512, 256)]
    assert many[1] - many[0] == pytest.approx(999 * (counts.dense + 2 * counts.head) / 4e12, rel=1e-6)
    prompts = floor_s(QWEN3_8B, FP8_KV, [(8192, 1)], 512, ceilings)
    assert prompts == pytest.approx(2 * counts.dense * 8192 / 2e15 + 4 * 36 * 4096 * 8192**2 / 2 / 1e15)


def test_a_step_meets_few_experts_for_few_tokens() -> None:
    counts = Counts.of(QWEN3_30B_A3B)
    assert counts.per_token == counts.dense + counts.experts / 16
    one, many = (counts.step_bytes(n, 1) - counts.dense - 2 * counts.head for n in (1, 256))
    assert one == pytest.approx(counts.experts / 16)
    assert many == pytest.approx(counts.experts, rel=1e-6)


def test_a_made_tokenizer_has_a_text_for_each_id() -> None:
    tokenizer = make_tokenizer(20_000)
    assert tokenizer.vocab_size == len({tokenizer.backend.id_to_token(i) for i in range(20_000)}) == 20_000
    assert tokenizer.decode(tokenizer.encode("a text of some words")) == "a text of some words"
    assert_raises(ConfigError, "from 256 pieces", make_tokenizer, 1_000_000)


def test_percentiles() -> None:
    assert [percentile([3.0, 1.0, 2.0, 4.0], p) for p in (50, 90, 99)] == [2.0, 4.0, 4.0]
    assert percentile([5.0], 50) == 5.0


def test_names_and_options_are_checked() -> None:
    assert check_names(("online", "8b-single")) == ("8b-single", "online")
    assert [variant.exact for variant in find_variants(("exact", "bf16"))] == [True, False]
    for call, name in ((check_names, "9b"), (find_variants, "int4")):
        assert_raises(ConfigError, "must be one of", call, (name,))
    for asked in ({"scale": 2.0}, {"scale": 0.5, "num_requests": 3}, {"rate": 0.0}, {"url": "http://x"}):
        assert_raises(ConfigError, "--", ServeOptions, **asked)
    assert not options(None, variants=("bf16",)).is_whole
    with pytest.raises(ConfigError, match="--workload and --variant"):
        run_benchmark("serve", dataclasses.replace(options(None), filters=("8b",)))


def test_models_are_built_alike_and_keep_codes_only() -> None:
    plain, again = (build_model(TOY, Numerics(), "cpu") for _ in range(2))
    coded = build_model(TOY, FP8_KV, "cpu")
    assert all(torch.equal(a, b) for a, b in zip(plain.parameters(), again.parameters(), strict=True))
    assert torch.equal(plain.head_weight, coded.head_weight)
    assert coded.layers[0].mlp.down_proj.weight is None
    held = coded.layers[0].mlp.down_proj.quantized_weight()[0].dequantize(torch.float32)
    expected = plain.layers[0].mlp.down_proj.weight.float()
    assert 0 < (held - expected).norm() / expected.norm() < 0.05


def test_nearness_is_seen_and_its_lack_too(monkeypatch: pytest.MonkeyPatch) -> None:
    assert 0 < check.check_nearness(TOY, FP8_KV, "cpu", quick=True) < check.MAX_FP8_ERROR
    monkeypatch.setattr(check, "build_model", lambda c, n, d: build_model(c, n, d, seed=int(n.recipe.is_fp8)))
    assert_raises(AssertionError, "are off bf16's", check.check_nearness, TOY, FP8_KV, "cpu", quick=True)


def test_a_bit_off_fails_the_exact_check(monkeypatch: pytest.MonkeyPatch) -> None:
    llm = LLM(build_model(TOY, VARIANTS["exact"].numerics("blockwise"), "cpu"), num_kv_pages=16, max_model_len=256)
    assert check.check_exact(llm, quick=True) == 0
    monkeypatch.setattr(check, "sequence_logprobs", lambda *a, **k: [1.0001 * x for x in sequence_logprobs(*a, **k)])
    assert_raises(AssertionError, "differs from sequence_logprobs", check.check_exact, llm, quick=True)


def test_a_run_counts_what_came_and_gives_up_in_time() -> None:
    llm = LLM(build_model(TOY, Numerics(), "cpu"), num_kv_pages=16, max_model_len=128, max_num_seqs=2)
    requests = [([1, 2, 3], 4), ([4] * 5, 1), ([6], 7)]
    run = run_requests(llm.engine, requests, "cpu", math.inf)
    assert (run.num_prompt_tokens, run.num_output_tokens) == (9, 12)
    assert (len(run.ttft_s), len(run.gaps_s)) == (3, 3 + 0 + 6)
    assert max(run.ttft_s) <= run.seconds and run.num_steps >= 8  # the third waits for the second
    assert_raises(OutOfTimeError, None, run_requests, llm.engine, requests, "cpu", time.perf_counter())
    assert not llm.engine.has_unfinished


def test_the_command_runs_a_toy_and_writes_its_record(tmp_path, monkeypatch, capsys):
    asked = "--workload 8b-mixed --variant fp8-kv --variant exact --num-requests 2 --layers 1 --out"
    words = ["octavo", "bench", "serve", "--quick", "--device", "cpu", *asked.split(), str(tmp_path)]
    monkeypatch.setattr("sys.argv", words)
    with pytest.raises(SystemExit) as exit_:
        cli.main()
    assert exit_.value.code == 0
    head = "toy of 8b-mixed, 2 requests, 24-48 in, 6-12 out, only the first 1 layers"
    fast, exact = (f"{head}: {VARIANTS[variant].label('blockwise')}" for variant in ("fp8-kv", "exact"))
    values = rows(tmp_path)
    assert {case for case, _ in values} == {fast, exact, fast.replace(":", ", lengths known:")}
    assert values[exact, "largest difference to sequence_logprobs"] == 0
    assert values[fast, "runs"] == values[exact, "runs"] == 3  # p20 and p80 come of no fewer
    ratio = values[exact, "output throughput"] / values[fast, "output throughput"]
    assert values[exact, "throughput over the fast mode's"] == pytest.approx(ratio, rel=1e-2)
    assert 0 < values[fast, "time to first token, p50"] <= values[fast, "time to first token, p99"]
    assert "peak memory" not in {metric for _, metric in values}  # a CPU has none of its own
    said = capsys.readouterr().out
    assert said.index(f"start: {fast}") < said.index(f"end: {fast}") < said.index(f"start: {exact}")


def test_a_cold_start_counts_the_memory_of_the_load() -> None:
    start = ColdStart(9.0, 4.0, 1.0, load_peak_bytes=9 << 30, bf16_bytes=16 << 30)
    for each, wanted in ((start, [(9.0, 16.0)]), (dataclasses.replace(start, load_peak_bytes=0), [])):  # a CPU has none
        record = Record("serve", "what", device="cpu")
        add_cold_start(record, "x", [each, dataclasses.replace(each, seconds=7.0, load_peak_bytes=0), each])
        assert (record.rows[0]["value"], record.rows[0]["p20"], record.rows[0]["p80"]) == (9.0, 7.8, 9.0)
        peaks = [row for row in record.rows if row["metric"] == "peak memory of the load"]
        assert [(row["value"], row["peer_value"]) for row in peaks] == wanted
    said = "loading took up to 17.00 GiB, more than the 16.00 of the weights in bf16"
    assert (start.complaint, dataclasses.replace(start, load_peak_bytes=17 << 30).complaint) == (None, said)


def test_the_cold_process_loads_and_makes_a_token(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    save_model(build_model(TOY, Numerics(), "cpu"), tmp_path)
    limits = {"max_num_seqs": 2, "num_kv_pages": 8, "max_model_len": 128}
    fields = {"path": str(tmp_path), "recipe": "blockwise", "kv_cache_dtype": "fp8", "exact": False, "device": "cpu"}
    first_token.main({**fields, "prompt_ids": [1, 2, 3], "limits": limits})
    stages = json.loads(capsys.readouterr().out)
    assert stages.pop("num_tokens") == 1
    start = ColdStart(1e9, **stages)
    assert start.bf16_bytes == 2 * TOY.num_params and start.load_peak_bytes == 0 < start.request_s


def test_rows_of_another_tree_do_not_stay(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    def opened(asked: BenchOptions) -> session.ServeSession:
        made = session.ServeSession(asked)
        made.open_record("x")
        return made

    first = opened(options(tmp_path))
    first.record.add("a: octavo bf16", "output throughput", "tokens/s", 1.0)
    first.flush()
    again = opened(options(tmp_path))
    fresh = again.fresh()
    fresh.add("a: octavo bf16", "output throughput", "tokens/s", 2.0)
    again.take(fresh)  # in place of what was measured before
    again.flush()
    assert [row["value"] for row in opened(options(tmp_path)).record.rows] == [2.0]
    assert opened(dataclasses.replace(options(tmp_path), commit="def")).record.rows == []
    assert "is of another commit and is replaced" in capsys.readouterr().out


def test_a_variant_that_fails_leaves_the_others(tmp_path, monkeypatch, capsys):
    def fail_in_bf16(record: Record, case: str, workload: Workload, variant: EngineVariant, *_: object) -> str:
        record.add(case, "output throughput", "tokens/s", 1.0)
        assert variant.is_fp8, "bf16 is off"
        return "well"

    monkeypatch.setattr(session, "measure_workload", fail_in_bf16)
    assert not run_benchmark("serve", options(tmp_path, workloads=("8b-single",), variants=("bf16", "fp8")))
    assert {case.rpartition(": ")[2] for case, _ in rows(tmp_path)} == {"octavo blockwise"}
    said = capsys.readouterr()
    assert "COMPLAINT: toy of 8b-single, one request, 24-48 in, 6-12 out: octavo bf16: AssertionError" in said.out


def test_what_does_not_fit_into_the_time_is_left_out(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    asked = {"workloads": ("8b-single", "30b-a3b-256x512"), "variants": ("bf16",), "time_limit_s": 1e-9}
    assert run_benchmark("serve", options(tmp_path, **asked))
    assert rows(tmp_path) == {}
    assert capsys.readouterr().out.count("skipped, it does not fit into --time-limit") == 2


@pytest.mark.parametrize(("card", "peer_values"), [("NVIDIA H200", {12_720.0}), ("NVIDIA H100 80GB HBM3", set())])
def test_vllm_stands_beside_whole_workloads_on_its_card_alone(card, peer_values, monkeypatch):
    monkeypatch.setattr(torch.cuda, "get_device_name", lambda: card)
    llm = SimpleNamespace(stats=SimpleNamespace(num_kv_pages=10))
    hosted = Hosted(llm, 1.0, 2.0, 2**30, 0.1, None)  # type: ignore[arg-type]
    runs = [EngineRun(seconds, [0.5], [0.1], 10, 20, 5, 0, None, "a test") for seconds in (4.0, 2.0, 1.0)]
    whole = WORKLOADS["8b-512x1000"]
    for workload, expected in ((whole, peer_values), (dataclasses.replace(whole, peers={}), set())):
        record = Record("serve", "what", device="cuda")
        offline._add_rows(record, "x", workload, VARIANTS["fp8-kv"], hosted, runs, 2**31, 0.5)
        found = {row["peer_value"] for row in record.rows if str(row["peer"]).startswith("vLLM")}
        assert found == expected
        values = {row["metric"]: row["value"] for row in record.rows}
        assert (values["KV cache"], values["peak memory"], values["output throughput"]) == (640, 2, 10)
        [throughput] = [row for row in record.rows if row["metric"] == "output throughput"]
        assert (throughput["p20"], throughput["p80"], values["runs"]) == (7, 16, 3)
    assert "without FlashInfer and DeepGEMM" in VLLM  # what it ran without stands in its name


@pytest.mark.gpu
@pytest.mark.parametrize("name", ["8b-512x1000", "30b-a3b-256x512", "gptj-largest", "attention"])
def test_toys_run_on_a_gpu(name: str, tmp_path: Path) -> None:
    asked = ServeOptions(workloads=(name,), variants=("bf16", "fp8-kv", "exact"))
    assert run_benchmark("serve", BenchOptions(quick=True, out=tmp_path, commit="abc", serve=asked))
    assert rows(tmp_path)


@pytest.mark.largest
def test_every_workload_runs_as_a_toy(tmp_path: Path) -> None:
    assert run_benchmark("serve", options(tmp_path))
    metrics = {metric for _, metric in rows(tmp_path)}
    assert {"process start to first token", "goodput", "largest batch", "attention rate"} < metrics
    assert {"throughput through the server", "first batch of a fresh process"} < metrics
