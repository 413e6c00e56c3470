"""The bench of other trainers at toy sizes, on one process and on two gloo ranks: what it checks, and its record."""

import contextlib
import functools
import json
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from bench.record import Record, Timing
from bench.report import FAILED, STEP_TIME
from bench.speed.trainers import __main__ as trainers
from bench.speed.trainers.variants import TrainersSession, Variants
from octavo.distributed.mesh import Mesh
from tests.ranks import run_group

TOY = ["--toy", "--device", "cpu", "--commit", "abc"]


def rows_of(folder: str | Path) -> dict[tuple[str, str], Any]:
    record = json.loads(Path(folder, "trainers.json").read_text())
    assert record["commit"] == "abc"
    return {(row["case"], row["metric"]): row for row in record["rows"]}


def _cases(record: dict[str, Any]) -> list[str]:
    return [row["case"] for row in record["rows"]]


def bench(_: int, world: int, part: str) -> dict[tuple[str, str], Any]:
    if part == "megatron":
        from tests.ecosystem.megatron_cpu import without_cuda

        without_cuda()
    mesh = Mesh.of_process_group(1, world, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = mesh.gather_objects(folder)[0]
        assert trainers.main([*TOY, "--only", part, "--recipe", "blockwise", "--out", shared], mesh) == 0
        mesh.barrier()
        rows = rows_of(shared)
        mesh.barrier()
    return rows


@pytest.mark.largest
@pytest.mark.parametrize("part", ["huggingface", "lora"])
def test_one_process_has_its_rows(part: str, tmp_path: Path) -> None:
    pytest.importorskip("peft" if part == "lora" else "transformers")
    begin = "lora" if part == "lora" else "Trainer"
    for options in ([], ["--eager"]):
        assert trainers.main([*TOY, "--only", part, "--out", str(tmp_path), *options], Mesh.single()) == 0
    rows = rows_of(tmp_path)
    for recipe in ("delayed", "blockwise"):
        row = rows[f"{begin}, {recipe}", "step time"]
        assert row["peer"] == f"{begin}, bf16" and 0 < row["p20"] <= row["value"] <= row["p80"]
        assert rows[f"{begin}, {recipe}, eager", "speed over bf16"]["peer"] == f"{begin}, bf16, eager"
    assert len({row["value"] for (_, metric), row in rows.items() if metric == "step time"}) > 1


@pytest.mark.largest
def test_two_ranks_under_accelerate_stand_beside_one_gpu() -> None:
    rows = run_group(functools.partial(bench, part="accelerate"), 2)[0]
    for recipe in ("bf16", "blockwise"):
        row = rows[f"accelerate, FSDP2, {recipe}", "throughput over 2 x one GPU"]
        alone, sharded = (rows[f"accelerate, {how}, {recipe}", "step time"]["value"] for how in ("one GPU", "FSDP2"))
        assert row["value"] == pytest.approx(alone / sharded, rel=1e-2)
        assert row["peer"] == f"accelerate, one GPU, {recipe}"
        losses = [rows[f"accelerate, {how}, {recipe}", "first loss"]["value"] for how in ("one GPU", "FSDP2")]
        assert losses[0] == losses[1], "the ranks share one model and its tokens"


@pytest.mark.largest
def test_two_ranks_under_megatron_stand_beside_its_own_spec() -> None:
    pytest.importorskip("megatron.core")
    rows = run_group(functools.partial(bench, part="megatron"), 2)[0]
    assert rows["megatron, blockwise", "speed over bf16"]["peer"] == "megatron, bf16"


def begin_session(folder: Path, record: Record) -> TrainersSession:
    return TrainersSession(Mesh.single(), record, True, folder, folder, "abc")


def step_of(loss: float) -> Callable[[contextlib.ExitStack], Callable[[], torch.Tensor]]:
    return lambda stack: lambda: torch.tensor(loss)


@pytest.mark.parametrize(
    ("loss", "is_right"), [(5.95, True), (6.05, True), (6.07, False), (5.93, False), (float("nan"), False)]
)
def test_a_variant_with_another_first_loss_has_no_figure(loss: float, is_right: bool, tmp_path: Path) -> None:
    session = begin_session(tmp_path, Record("trainers", "what", device="cpu"))
    variants = Variants(session, "toy")
    variants.run("bf16", step_of(6.0))
    variants.run("fp8", step_of(loss))
    assert bool(session.complaints) != is_right
    found = {row["metric"] for row in session.record.rows if row["case"] == "toy, fp8"}
    assert STEP_TIME in found if is_right else found == {FAILED}


def test_what_a_variant_holds_is_given_back(tmp_path: Path) -> None:
    session, ended = begin_session(tmp_path, Record("trainers", "what", device="cpu")), []

    def build(stack: contextlib.ExitStack) -> Callable[[], torch.Tensor]:
        stack.callback(ended.append, True)
        return lambda: torch.tensor(6.0) if not ended else torch.tensor(0.0)

    Variants(session, "toy").run("bf16", build)
    assert ended == [True] and not session.complaints


def test_ratios_are_of_times_and_of_memory(tmp_path: Path) -> None:
    session = begin_session(tmp_path, Record("trainers", "what", device="cpu"))
    variants = Variants(session, "toy")
    variants.add("bf16", Timing(300.0, 290.0, 310.0), 4 << 30, 6.0, "bf16", "speed over bf16")
    variants.add("fp8", Timing(200.0, 190.0, 210.0), 3 << 30, 6.0, "bf16", "speed over bf16")
    found = {row["metric"]: row for row in session.record.rows if row["case"] == "toy, fp8"}
    assert found["speed over bf16"]["value"] == 1.5 and found["peak memory over the peer's"]["value"] == 0.75
    assert found["step time"]["peer"] == "toy, bf16" and found["step time"]["peer_value"] == 300


def test_a_part_joins_what_the_same_tree_has_measured(tmp_path: Path) -> None:
    found = {}
    for part, commit in (("one", "abc"), ("two", "abc"), ("one", "abc"), ("three", "def")):
        record = Record("trainers", "All.", device="cpu")
        trainers.take_former(record, tmp_path / "trainers.json", commit)
        session = begin_session(tmp_path, record)
        session.describe(f"{part}: settings.")
        Variants(session, part).add("bf16", Timing(3.0, 2.0, 4.0), 0, 6.0, "bf16", "speed over bf16")
        found[part] = json.loads(record.save(tmp_path, commit).read_text())
    assert sorted(_cases(found["one"])) == ["one, bf16"] * 3 + ["two, bf16"] * 3
    assert found["one"]["what"] == "All. one: settings. two: settings."
    assert set(_cases(found["three"])) == {"three, bf16"} and found["three"]["what"] == "All. three: settings."


def test_parts_that_the_ranks_do_not_fit_are_refused(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        trainers.main([*TOY, "--only", "deepspeed"], Mesh.single())
    assert "--only deepspeed: 1 rank(s) run huggingface, lora" in capsys.readouterr().err


def test_one_process_beside_two_gpus_is_refused(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: 2)
    with pytest.raises(SystemExit):
        trainers.main(["--device", "cuda"], Mesh.single())
    assert "CUDA_VISIBLE_DEVICES=0" in capsys.readouterr().err
