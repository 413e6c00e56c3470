"""`octavo bench scale --gpus N`: its order, what it refuses, what it keeps, what it expects; toys on gloo ranks."""

import dataclasses
import json
import math
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from bench.figures import Figures, fill_marks
from bench.options import BenchOptions
from bench.record import Record
from bench.record_age import RECORDS
from bench.speed.scale import __main__ as scale
from bench.speed.scale import expected, parts
from bench.speed.scale.ordered import COMPARED, DIFFERING
from bench.speed.scale.whole import EFFICIENCY, SPEEDUP
from bench.speed.tensor.large import MANY
from octavo import cli
from octavo.distributed.mesh import Mesh
from octavo.errors import BackendError, ConfigError
from tests.assertions import assert_raises
from tests.ranks import run_group

QUICK = BenchOptions(device="cpu", quick=True)


def bench(_: int, world: int) -> Any:
    mesh = Mesh.of_process_group(1, world, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = mesh.gather_objects(folder)[0]
        asked = ["--toy", "--device", "cpu", "--only", "whole", "--out", shared]
        # of two ranks tests/parallel holds what is ordered
        assert scale.main(asked + ["--only", "ordered"] * (world > 2), mesh) == 0
        mesh.barrier()
        rows = json.loads(Path(shared, "scale.json").read_text())["rows"]
        mesh.barrier()
    return rows


@pytest.mark.largest
@pytest.mark.parametrize("num_ranks", [2, 4, 8])
def test_toys_of_the_whole_model_and_of_ordered_gradients(num_ranks: int) -> None:
    rows = run_group(bench, num_ranks)[0]
    hsdp = {f"HSDP 2 x {num_ranks // 2}"} if num_ranks > 2 else set()
    layouts = {(row["case"].rpartition(", ")[2], row["metric"]): row["value"] for row in rows}
    for layout in {"FSDP2", "DDP"} | hsdp:
        assert all(layouts[layout, metric] > 0 for metric in ("step time", "throughput a GPU", SPEEDUP))
        # against one GPU's time, extrapolated from steps of one and two layers: of toys the longer may take less
        assert math.isfinite(layouts[layout, EFFICIENCY])
    compared = [row["value"] for row in rows if row["metric"] == COMPARED]
    assert len(compared) == 4 * len(hsdp) and all(number > 100_000 for number in compared)
    assert [row["value"] for row in rows if row["metric"] == DIFFERING] == [0.0] * len(compared)


@pytest.fixture
def commands(monkeypatch: pytest.MonkeyPatch) -> list[list[str]]:
    """What is started instead of being run; comm fails, the others write a record."""
    found: list[list[str]] = []

    def run(command: list[str]) -> str:
        found.append(command)
        if any(word.endswith(".comm") for word in command):
            return "exit code 1"
        Record("scale", "a toy", device="cpu").save(Path(command[command.index("--out") + 1]), "abc")
        return ""

    monkeypatch.setattr(parts, "_run", run)
    return found


def test_parts_run_the_fewest_gpus_first_and_after_one_that_failed(
    commands: list[list[str]], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    options = BenchOptions(device="cpu", quick=True, out=tmp_path, commit="abc")
    assert not parts.run_parts([8, 4], ["grpo", "comm", "ordered", "restart"], options)
    programs = ("scale", "scale.restart", "comm", "scale")  # correctness first
    started = [next(word for word in command if "speed" in word) for command in commands]
    assert started == [f"bench.speed.{name}" for name in programs * 2]
    numbers = [command[command.index("--nproc-per-node") + 1] for command in commands if "restart" not in str(command)]
    assert numbers == ["4"] * 3 + ["8"] * 3
    wanted = f"--only ordered --toy --out {tmp_path}/4_gpus/ordered --commit abc"
    assert " ".join(commands[0]).endswith(wanted) and "--ranks 8 --device cpu" in " ".join(commands[5])
    assert (tmp_path / "8_gpus" / "records" / "scale.json").is_file()
    assert "COMPLAINT: comm on 4 GPUs: exit code 1" in capsys.readouterr().out


def test_what_is_not_there_is_refused_in_one_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(parts, "visible_gpus", lambda: ["0", "1"])
    on_gpus = dataclasses.replace(QUICK)
    object.__setattr__(on_gpus, "device", "cuda")  # as on a machine with GPUs
    few = "--gpus must be at most the GPUs of this machine, 2, got 4"
    assert_raises(BackendError, few, parts.run_parts, [2, 4], [], on_gpus)
    assert_raises(ConfigError, "got 'hole'; did you mean 'whole'", parts.run_parts, [4], ["hole"], QUICK)
    on_cpu = ["--device", "cpu", "--quick"]
    for wrong in (["comm", "--gpus", "4"], ["scale", "--parts", "whole"], ["scale", "--gpus", "4", "--filter", "ddp"]):
        error = CliRunner().invoke(cli.app, ["bench", *wrong, *on_cpu]).exception
        assert isinstance(error, ConfigError) and "--gpus and --parts belong together" in str(error)


def test_a_part_has_multicast_off_unless_told_and_ends_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    command = [sys.executable, "-c", "import os, sys; sys.exit(os.environ['NCCL_NVLS_ENABLE'] != sys.argv[1])"]
    monkeypatch.delenv("NCCL_NVLS_ENABLE", raising=False)
    assert parts._run([*command, "0"]) == ""
    monkeypatch.setenv("NCCL_NVLS_ENABLE", "1")
    assert [parts._run([*command, value]) for value in ("1", "0")] == ["", "exit code 1"]
    monkeypatch.setattr(parts, "LIMIT_S", 1.0)
    began = time.monotonic()
    assert parts._run([sys.executable, "-c", "import time; time.sleep(60)"]) == "not done after 1 s"
    assert time.monotonic() - began < 30


def test_misses_are_marked_and_what_did_not_fit_is_said(tmp_path: Path) -> None:
    rows = {(row.case, row.metric): row for row in expected.expect(4) if row.record == "scale"}
    record = Record("scale", "a toy", device="cpu")
    gone = next(case for case, metric in rows if case.endswith("bf16: 4 GPUs, DDP"))
    record.add(gone, "out of memory", "", 1.0)
    (step,) = (key for key in rows if key[1] == "step time")
    record.add(*step, "ms", rows[step].value * 1.14)
    ordered = next(key for key in rows if key[1] == DIFFERING)
    record.add(*ordered, "", 1.0)
    record.save(tmp_path, "abc")
    lines = expected.compare(tmp_path, 4)
    assert [line.split()[0] for line in lines] == ["MISS", *["NONE"] * 4, "ok"]
    assert "expected 0, measured 1; expected: bits do not depend on" in lines[0] and "DDP" in lines[1]


def test_curves_over_gpus_have_what_was_measured_beside_what_was_expected(tmp_path: Path) -> None:
    expected.draw(tmp_path / "gpus.svg")
    drawn = (tmp_path / "gpus.svg").read_text(encoding="utf-8")
    assert all(text in drawn for text in ("ms a step", "GiB a GPU", "bf16, FSDP2", "delayed, HSDP", "delayed, DDP"))
    assert "bf16, DDP" not in drawn, "its record is one of memory that ended"


def test_the_page_has_what_is_expected() -> None:
    page = expected.PAGE.read_text(encoding="utf-8")
    assert fill_marks(page, "expected", ("gpus",), expected.table) == page, "run python -m bench.speed.scale.expected"


def test_the_formulas_give_what_two_gpus_did() -> None:
    """Those that are fitted to other rows of the records."""
    prompts, decode = expected.serve_s(MANY, "reduce", 2)
    found = Figures.load(RECORDS / "tensor.json").value(f"{MANY.label}: 2 GPUs, reduce", "output throughput")
    assert MANY.num_requests * MANY.output_len[0] / (prompts + decode) == pytest.approx(found, rel=expected.MAX_MISS)
    two = {(row.case, row.metric): row.value for row in expected.expect(2)}
    comm, scaled = (Figures.load(RECORDS / f"{name}.json") for name in ("comm", "scale"))
    same = [key for key in two if comm.value(*key) or (scaled.value(*key) and key[1] != "peak memory")]
    assert len(same) == 28
    for case, metric in same:
        assert two[case, metric] == pytest.approx(comm.value(case, metric) or scaled.value(case, metric), rel=0.01), (
            case
        )
