"""The bench of sharded training runs on two gloo ranks at toy sizes: what it checks, and its record."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.options import BenchOptions
from bench.ranks import command_of
from bench.record import Record
from bench.speed.scale import __main__ as scale
from bench.speed.scale.session import Session
from octavo.distributed.mesh import Mesh
from tests.ranks import run_group


def bench(rank: int, world: int) -> dict[str, Any]:
    mesh = Mesh.of_process_group(1, world, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = mesh.gather_objects(folder)[0]
        asked = ["--toy", "--device", "cpu", "--commit", "abc", "--out", shared, "--save-dir", shared]
        assert scale.main(asked, mesh) == 0
        mesh.barrier()
        left = [path.name for path in Path(shared).iterdir()]
        record = json.loads(Path(shared, "scale.json").read_text())
        mesh.barrier()
    broken = Session(mesh, Record("scale", ""), True, Path(shared))
    broken.attempt("a case", lambda: broken.check(lambda: _fail_on(rank, 1)))
    return record | {"left": left, "complaints": broken.complaints}


def _fail_on(rank: int, failing: int) -> None:
    assert rank != failing, "a promise"


@pytest.mark.largest
def test_every_part_has_its_rows() -> None:
    first, second = run_group(bench, 2)
    rows = {(row["case"].rpartition(": ")[2], row["metric"]): row for row in first["rows"]}
    times = {case for case, metric in rows if metric == "step time"}
    assert times >= {"one GPU alone", "2 GPUs, bf16 all-gather", "2 GPUs, FP8 all-gather", "2 GPUs"}  # layers, grpo
    assert times >= {"bf16 gradients", "FP8 hook", "fp32 parameters, ordered, deterministic attention"}
    assert all(row["value"] > 0 for row in first["rows"] if row["unit"] in ("ms", "tokens/s"))
    shared = rows["2 GPUs, FP8 all-gather", "tokens/s over 2 x one GPU"]
    assert shared["peer"].endswith("one GPU alone")
    assert rows["2 GPUs, FP8 all-gather", "all-gather bytes of linears over bf16's"]["value"] < 1.0
    assert times >= {"bf16 parameters, fp32 sums", "bf16 parameters, bf16 sums, again"}
    ratio = rows["fp32 parameters, ordered", "step time over its baseline"]
    assert ratio["peer"].endswith("fp32 parameters, fp32 sums") and ratio["value"] > 0
    for ordinal in ("first", "second"):
        still, of_it, written = (
            rows["in the background", f"{what}, {ordinal} save"]["value"]
            for what in ("training stands still", "of it in save itself", "until it is on the disk")
        )
        assert 0 < of_it <= still < written
    assert rows["in the background", "files of the trainer's state"]["value"] > 0
    assert rows["waiting for the disk", "training stands still"]["value"] > 0
    assert rows["2 GPUs", "largest difference of logprobs"]["value"] == 0.0
    assert first["commit"] == "abc" and first["left"] == ["scale.json"]  # no checkpoint is left behind
    assert first["complaints"] == second["complaints"] == ["a case: RuntimeError: rank 1: AssertionError: a promise"]


@pytest.mark.parametrize("name", ["comm", "scale"])
def test_octavo_bench_starts_the_program_on_ranks(name: str, tmp_path: Path) -> None:
    options = BenchOptions(device="cpu", quick=True, filters=("ddp",), out=tmp_path, commit="abc")
    command = command_of(name, options, 2)
    assert command[1:6] == ["-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    assert command[6:8] == ["-m", f"bench.speed.{name}"]
    told = command[8:]
    assert told[:4] == ["--device", "cpu", "--only" if name == "scale" else "--filter", "ddp"]
    assert ("--toy" in told) == (name == "scale") and told[-4:] == ["--out", str(tmp_path), "--commit", "abc"]
