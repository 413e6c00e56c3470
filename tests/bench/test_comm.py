"""The bench of collectives runs on two gloo ranks: what it checks, and its record."""

import json
import tempfile
from pathlib import Path
from typing import Any

from bench.speed import comm
from tests.ranks import run_group


def bench(rank: int, world: int) -> dict[str, Any]:
    comm.CHECKED_NUMEL = 1 << 12
    with tempfile.TemporaryDirectory() as folder:
        asked = ["--sizes", "0.01", "0.05", "--repeats", "2", "--device", "cpu", "--commit", "abc", "--out", folder]
        assert comm.main(asked) == 0
        assert comm.main([*asked[:7], "--filter", "reduce_scatter_q"]) == 0  # no record
        return json.loads(Path(folder, "comm.json").read_text()) if rank == 0 else {}


def test_every_size_has_a_row_of_every_call() -> None:
    record = run_group(bench, 2)[0]
    times = {row["case"]: row for row in record["rows"] if row["metric"] == "time"}
    assert len(times) == 2 * 16 and all(row["value"] > 0 for row in times.values())
    assert times["all_reduce_q, 0.05 MiB"]["peer"] == "all_reduce bf16" and record["commit"] == "abc"
    ratios = [row["case"] for row in record["rows"] if row["metric"] == "speedup"]
    assert len(ratios) == 2 * len(comm.PEERS)
