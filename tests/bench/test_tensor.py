"""The bench of cut linears runs on two gloo ranks at toy sizes: what it checks, and its record."""

import json
import re
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.record import Record
from bench.serve.shapes import LLAMA_3_70B, QWEN3_8B, build_model, make_toy
from bench.speed.scale.session import Session
from bench.speed.tensor import __main__ as tensor
from bench.speed.tensor.large import limit_s
from bench.speed.tensor.serving import profile_steps
from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.numerics import Numerics
from octavo.serve import LLM
from tests.ranks import run_group


def bench(_: int, world: int) -> dict[str, Any]:
    mesh = Mesh.of_process_group(1, world, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = mesh.gather_objects(folder)[0]
        assert tensor.main(["--toy", "--device", "cpu", "--commit", "abc", "--out", shared], mesh) == 0
        mesh.barrier()
        record: dict[str, Any] = json.loads(Path(shared, "tensor.json").read_text())
        mesh.barrier()
        alone = ["--toy", "--device", "cpu", "--only", "training", "--layout", "reduce", "--out", shared]
        assert tensor.main(alone, mesh) == 0
        mesh.barrier()
        record["reduce alone"] = json.loads(Path(shared, "tensor.json").read_text())["rows"]
        mesh.barrier()
    return record


@pytest.mark.largest
def test_every_part_has_its_rows() -> None:
    record = run_group(bench, 2)[0]
    rows = {(row["case"].rpartition(": ")[2], row["metric"]): row for row in record["rows"]}
    layouts = {case for case, metric in rows if metric == "output throughput"}
    assert layouts == {"one GPU alone", "2 GPUs, reduce", "2 GPUs, gather", "2 GPUs, gather, exact"}
    assert all(rows[layout, "output throughput"]["value"] > 0 for layout in layouts)
    differing = [row for row in record["rows"] if row["metric"] == "hidden numbers that differ"]
    assert len(differing) == 3 and all(row["value"] == 0 for row in differing)
    shared = rows["2 GPUs, gather, exact", "output throughput, exact over reduce"]
    assert shared["value"] > 0 and shared["peer"].endswith("reduce") and record["commit"] == "abc"
    metrics = [row["metric"] for row in record["rows"]]
    assert metrics.count("tokens/s over one GPU") == 6 and metrics.count("a norm's gradient against one GPU's") == 6
    assert metrics.count("speed over a bf16 gather") == 1 and metrics.count("refit") == 2
    assert metrics.count("gather and cut, of that") == 2 and metrics.count("share of the roofline") == 2
    assert all(row["case"].endswith("reduce") and row["peer"] is None for row in record["reduce alone"])


def test_the_limit_of_a_large_model_is_what_bytes_and_operations_leave() -> None:
    config = make_toy(LLAMA_3_70B)
    dense, head, kv = 2 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256), 512 * 128, 2 * 2 * 2 * (32 + 4)
    prompts = [([0] * 10, 3), ([0] * 20, 2)]  # two steps after the first token, of two sequences and of one
    moved = 2 * (dense + 2 * head) + kv * (11 + 21 + 12)
    flops = 2 * dense * 30 + 2 * head * 2 + 4 * 2 * 128 * (10**2 + 20**2) / 2
    assert limit_s(config, prompts, 2, 1e9) == pytest.approx((moved / 1e9 + flops / 1.979e15) / 2)
    operations = flops + 2 * (dense + head) * 3 + 4 * 2 * 128 * (11 + 21 + 12)
    assert limit_s(config, prompts, 1, 1e30) == pytest.approx(operations / 1.979e15)


@pytest.mark.largest
def test_profiled_steps_name_what_ran(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = build_model(make_toy(QWEN3_8B), Numerics(), "cpu")
    llm = LLM(model, enable_prefix_caching=False, max_num_seqs=2, num_kv_pages=8, max_model_len=128)
    session = Session(ONE_PROCESS, Record("tensor", "x", device="cpu"), True, tmp_path)
    profile_steps(session, llm.engine, [([1, 2, 3], 5), ([4, 5], 5)], "a case")
    said = capsys.readouterr().out
    assert "== a case" in said and "profiled, a step of 40: wall " in said
    assert re.search(r"^without the profiler, ms a decode step: [0-9.]+$", said, re.MULTILINE)
    assert re.search(r"^aten::mm +[0-9.]+ +[0-9.]+", said, re.MULTILINE)
