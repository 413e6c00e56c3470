"""`octavo bench step` compares like with like: every bf16 baseline, one optimizer, one attention, the fastest."""

import dataclasses
import json
import math
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from torch import nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from bench import run_benchmark
from bench.measure import Failure, TrainingStep, VariantResult, describe_optimizer, find_attention, measure_variants
from bench.record import Record
from bench.speed import peers, step, whole_model
from bench.speed.ceilings import Ceilings
from bench.speed.stack import torch_gated_unit, torch_norm, torch_rotate
from bench.speed.step import LLAMA_3_8B, TOY, add_results, compare_results, find_base, find_complaints
from bench.speed.variants import BASE, PLAIN, StackVariant, build_optimizer, make_variants
from bench.speed.whole_model import MODEL, TOY_MODEL, ModelWorkload, make_model_variants
from octavo.errors import BackendError
from tests.assertions import assert_raises
from tests.bench import quick
from tests.bench.quick import make_pass

OURS, BLOCKWISE = StackVariant("octavo bf16", "octavo"), StackVariant("octavo blockwise", "octavo", "blockwise")
LIGER = StackVariant("Liger bf16", "liger")
FP8 = ("delayed", "tensorwise", "rowwise", "blockwise")
TINY = dataclasses.replace(TOY_MODEL, layers=1)


def compact(variant: StackVariant) -> StackVariant:
    return dataclasses.replace(variant, name=f"{variant.name}, FP8 AdamW", fp8_optimizer=True)


def result(variant: StackVariant, ms: float, **fields: object) -> VariantResult:
    return VariantResult(variant, (make_pass(ms, **fields),))  # type: ignore[arg-type]


def names(variants: list[StackVariant]) -> list[str]:
    return [variant.name for variant in variants]


@pytest.mark.largest
def test_a_quick_run_of_the_whole_model(tmp_path: Path) -> None:
    asked = dataclasses.replace(quick.options(tmp_path), recipes=("blockwise",), passes=1, filters=("whole model",))
    assert run_benchmark("step", asked)
    rows = quick.rows(tmp_path, "step")
    bf16 = {f"whole model, {variant.name}" for variant in (BASE, PLAIN, OURS)}
    assert {case for case, _ in rows} == {*bf16, "whole model, octavo blockwise"}
    fastest = min(rows[case, "step time"] for case in bf16)
    for case in (*bf16, "whole model, octavo blockwise"):
        assert rows[case, "speedup"] == pytest.approx(fastest / rows[case, "step time"], rel=1e-2)
        assert rows[case, "loss after 12 steps"] == pytest.approx(math.log(512) + 0.5, abs=0.3)


def test_every_bf16_baseline_runs_whatever_was_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(peers, "peer_versions", lambda _: {peers.LIGER: "1", peers.TORCHAO: "1"})
    everything = quick.options(None)
    bf16 = ["bf16, compiled", "bf16", "Liger bf16", "octavo bf16"]
    assert names(make_model_variants(everything)) == [*bf16, *(f"octavo {recipe}" for recipe in FP8)]
    asked = dataclasses.replace(everything, filters=("octavo blockwise",))
    assert names(make_model_variants(asked)) == [*bf16, "octavo blockwise"]
    others = ["bf16, compiled, FP8 AdamW", "bf16, FP8 AdamW", "octavo bf16, FP8 AdamW"]
    found = names(make_variants(asked, fp8_optimizer=True))
    assert found == [*bf16, "octavo blockwise", *others, "octavo blockwise, FP8 AdamW"]
    model = dataclasses.replace(everything, filters=("whole model, octavo delayed",))
    assert names(make_model_variants(model)) == [*bf16, "octavo delayed"]
    assert not make_variants(model, fp8_optimizer=True)


@pytest.mark.parametrize("fastest", [BASE, PLAIN, LIGER, OURS], ids=lambda variant: variant.name)
def test_the_ratio_is_against_the_fastest_bf16_of_the_same_optimizer(fastest: StackVariant) -> None:
    results = [result(v, 200.0 if v == fastest else 220.0) for v in (BASE, PLAIN, LIGER, OURS)]
    results += [result(BLOCKWISE, 100.0), result(compact(OURS), 150.0), result(compact(BLOCKWISE), 50.0, peak=2**29)]
    record = Record("step", "what", device="cpu")
    add_results(record, results, TOY, Ceilings(1e15, 2e15, 4e12), "of a test, ")
    rows = {(row["case"], row["metric"]): row for row in record.rows}
    speedup = rows["of a test, octavo blockwise", "speedup"]
    assert (speedup["value"], speedup["peer"]) == (2.0, f"of a test, {fastest.name}")
    with_fp8 = rows["of a test, octavo blockwise, FP8 AdamW", "speedup"]
    assert (with_fp8["value"], with_fp8["peer"]) == (3.0, "of a test, octavo bf16, FP8 AdamW")
    for metric, saved in (("speed over torch's AdamW", 2.0), ("peak memory over torch's AdamW", 0.5)):
        row = rows["of a test, octavo blockwise, FP8 AdamW", metric]
        assert (row["value"], row["peer"]) == (saved, "of a test, octavo blockwise")
        assert ("of a test, octavo blockwise", metric) not in rows
    assert find_base(results[4:], BLOCKWISE) is None


def test_a_loss_that_strays_is_a_complaint() -> None:
    base, other = result(BASE, 1.0), StackVariant("other", "octavo")
    for loss in (1.02, 0.97, math.nan):
        assert compare_results([base, result(other, 2.0, loss=loss)])[0].startswith("other: loss")
    assert compare_results([base, result(other, 2.0, loss=1.005)]) == compare_results([]) == []
    (alone,) = compare_results([base, result(compact(BLOCKWISE), 1.0)])
    assert alone.startswith("octavo blockwise, FP8 AdamW: no bf16 variant with its optimizer ran")


@pytest.mark.parametrize("field", ["optimizer", "attention"])
def test_a_variant_with_another_optimizer_or_attention_is_a_complaint(field: str) -> None:
    (text,) = compare_results([result(BASE, 1.0), result(BLOCKWISE, 0.5, **{field: "another one"})])
    assert text.startswith("octavo blockwise ran with") and "another one" in text and "bf16, compiled, which" in text


def test_what_a_step_ran_with_is_read_from_what_ran() -> None:
    def optimizer_of(make: Callable[[list[nn.Parameter]], torch.optim.Optimizer]) -> str:
        weight = nn.Parameter(torch.ones(128, 128, dtype=torch.bfloat16))
        optimizer = make([weight])
        TrainingStep(lambda: weight.float().sum(), optimizer)()
        return describe_optimizer(optimizer)

    plain = optimizer_of(lambda parameters: build_optimizer(BASE, parameters, "cpu"))
    assert plain == optimizer_of(lambda parameters: build_optimizer(BLOCKWISE, parameters, "cpu"))
    assert "torch's AdamW (lr 1e-05" in plain and "exp_avg bfloat16" in plain and "of 16,384 parameters" in plain
    fp8 = optimizer_of(lambda parameters: build_optimizer(compact(BASE), parameters, "cpu"))
    assert "octavo's AdamW" in fp8 and "exp_avg float8_e4m3fn" in fp8
    fused = optimizer_of(lambda parameters: torch.optim.AdamW(parameters, lr=1e-5, weight_decay=0.01, fused=True))
    faster = optimizer_of(lambda parameters: torch.optim.AdamW(parameters, lr=1e-4, weight_decay=0.01))
    assert len({plain, fp8, fused, faster}) == 4

    q = torch.randn(1, 2, 64, 64, dtype=torch.bfloat16, requires_grad=True)
    kernels = set()
    for backend in (SDPBackend.FLASH_ATTENTION, SDPBackend.MATH):
        with sdpa_kernel(backend):
            kernels.add(find_attention(lambda: F.scaled_dot_product_attention(q, q, q).sum().backward()))
    assert len(kernels) == 2 and all("attention" in kernel and "backward" not in kernel for kernel in kernels)


def test_gradients_are_clipped_only_where_asked() -> None:
    for limit, moved in ((None, 3.0), (0.5, 0.5)):
        weight = nn.Parameter(torch.zeros(1))
        take = TrainingStep(lambda weight=weight: 3.0 * weight.sum(), torch.optim.SGD([weight], lr=1.0), limit)
        take()
        assert weight.item() == pytest.approx(-moved, rel=1e-5)
        assert (take.grad_norm is None) if limit is None else (take.grad_norm.item() == pytest.approx(3.0))


class Failing(ModelWorkload):
    """A workload whose variants do not fit or fail."""

    errors = {"bf16": torch.OutOfMemoryError("no room"), "octavo blockwise": ValueError("is wrong")}

    def build(self, variant: StackVariant) -> TrainingStep:
        if variant.name in self.errors:
            raise self.errors[variant.name]
        return super().build(variant)


def test_a_variant_that_does_not_run_is_a_row(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(step, "ModelWorkload", Failing)
    asked = dataclasses.replace(quick.options(tmp_path), recipes=("blockwise",), passes=1, filters=("whole model",))
    assert not run_benchmark("step", asked)
    said, rows = capsys.readouterr().out, json.loads((tmp_path / "step.json").read_text())["rows"]
    assert [(row["case"], row["unit"]) for row in rows if row["metric"] == "failed"] == [
        ("whole model, bf16", "OutOfMemoryError"),
        ("whole model, octavo blockwise", "ValueError"),
    ]
    assert {row["case"] for row in rows if row["metric"] == "speedup"} == {
        "whole model, bf16, compiled",
        "whole model, octavo bf16",
    }
    assert "did not run" in said and "COMPLAINT: whole model, octavo blockwise: ValueError: is wrong" in said
    assert "no room" not in said  # a baseline may be too large
    failure = Failure(OURS, "OutOfMemoryError", "no room")
    assert find_complaints([failure]) == ["octavo bf16: OutOfMemoryError: no room"]


@pytest.mark.parametrize(("bound", "value"), [("MIN_FP8_DB", 1e3), ("MAX_FIRST_LOSS_DIFFERENCE", -1.0)])
def test_both_checks_come_before_the_timing(bound: str, value: float, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(whole_model, bound, value)
    workload = ModelWorkload(TINY, "cpu")
    workload._first = "bf16", math.log(512) + 0.5
    results, (failure,) = measure_variants([BLOCKWISE], workload, "cpu", num_passes=1)
    assert not results and failure.error == "BackendError"


@pytest.mark.parametrize("recipe", ["bf16", *FP8])
def test_gradients_of_the_whole_model_are_near_plain_bf16s(recipe: str) -> None:
    ratios = ModelWorkload(TINY, "cpu").check(StackVariant("ours", "octavo", recipe))
    assert set(ratios) == {*LLAMA_3_8B.linear_sizes, "embedding", "head"}


def test_ligers_kernels_are_in_its_model(monkeypatch: pytest.MonkeyPatch) -> None:
    called = set()

    def stand_in(name: str, make: Callable[..., object]) -> None:
        monkeypatch.setattr(peers, f"liger_{name}", lambda *args: called.add(name) or make(*args))

    stand_in("norm", torch_norm)
    stand_in("gated_unit", torch_gated_unit)
    stand_in("rotate", torch_rotate)
    stand_in("cross_entropy", lambda hidden, head, targets: F.cross_entropy(F.linear(hidden, head).float(), targets))
    ModelWorkload(TINY, "cpu").check(LIGER)
    assert called == {"norm", "gated_unit", "rotate", "cross_entropy"}


def test_a_wrong_model_is_found_before_it_is_timed(monkeypatch: pytest.MonkeyPatch) -> None:
    workload = ModelWorkload(TINY, "cpu")
    monkeypatch.setattr(whole_model, "torch_rotate", lambda cos, sin: lambda q, k: (q, k))
    assert_raises(BackendError, "octavo bf16: gradient of q has SQNR", workload.check, OURS)
    assert_raises(BackendError, "no bf16 variant ran before", workload.check_first, BLOCKWISE, 6.7, 1.0)
    workload.check_first(BASE, 6.7, 1.0)
    workload.check_first(BLOCKWISE, 6.72, 1.0)
    assert_raises(BackendError, "6.8 differs from bf16, compiled's", workload.check_first, BLOCKWISE, 6.8, 1.0)
    for loss, norm in ((math.nan, 1.0), (6.7, math.inf)):
        assert_raises(BackendError, "both must be finite", workload.check_first, BLOCKWISE, loss, norm)


def test_the_model_is_that_of_the_target() -> None:
    assert (MODEL.layers, MODEL.batch, MODEL.seq_len, MODEL.vocab_size) == (8, 5, 8192, 128_256)
    model = whole_model.build_model(OURS, TINY, "cpu")
    assert sum(p.numel() for p in model.parameters()) == TINY.num_params
    plain = whole_model.build_model(PLAIN, TINY, "cpu")
    assert sum(p.numel() for p in plain.parameters()) == TINY.num_params
    assert TINY.head_flops == 6.0 * TINY.vocab_size * TINY.hidden_size * TINY.num_tokens and LLAMA_3_8B.head_flops == 0
