"""The vision transformer at toy size."""

import json
from pathlib import Path

import pytest

from bench.training import vision


@pytest.mark.slow
def test_the_command_writes_a_line_a_run(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    variants = "bf16,delayed,blockwise"
    command = ["--quick", "--device=cpu", "--seeds=1", "--jobs=1", f"--variants={variants}", f"--out={tmp_path}"]
    assert vision.main(command) == 0
    rows = [json.loads(line) for line in (tmp_path / "vision.jsonl").read_text().splitlines()]
    assert [row["variant"] for row in rows if row["task"] == "shapes"] == variants.split(",")
    assert rows[0]["fp8_flop_share"] == 0.0 and rows[1]["fp8_flop_share"] > 0.9
    assert "shapes blockwise" in capsys.readouterr().out
