"""Host time of a decode step: the program runs on a CPU and writes its record."""

import json
from pathlib import Path

from bench.serve.step_host import CASES, main


def test_a_few_steps(tmp_path: Path) -> None:
    assert main(["--num-seqs", "4", "--steps", "3", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = json.loads((tmp_path / "step_host.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {*CASES}
    assert all(row["value"] > 0 for row in rows)
