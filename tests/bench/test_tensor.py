"""The bench of cut linears runs on two gloo ranks at toy sizes: what it checks, and its record."""

import json
import tempfile
from pathlib import Path
from typing import Any

import pytest

from bench.speed.tensor import __main__ as tensor
from octavo.distributed.mesh import Mesh
from tests.ranks import run_group


def bench(_: int, world: int) -> dict[str, Any]:
    mesh = Mesh.of_process_group(1, world, "cpu")
    with tempfile.TemporaryDirectory() as folder:
        shared = mesh.gather_objects(folder)[0]
        assert tensor.main(["--toy", "--device", "cpu", "--commit", "abc", "--out", shared], mesh) == 0
        mesh.barrier()
        record: dict[str, Any] = json.loads(Path(shared, "tensor.json").read_text())
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
