"""The CPU-time table has every part and recipe, and its record."""

import json
from pathlib import Path

import pytest

from bench.options import FP8_RECIPES
from bench.speed.host_time import main


def test_table_and_record(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["--repeats", "1", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]) == 0
    rows = json.loads((tmp_path / "host_time.json").read_text())["rows"]
    names = [row["case"] for row in rows]
    assert {"torch.mm", "quantize, 1x128 both ways", "linear, bf16, forward and backward"} <= set(names)
    assert all(f"linear, {recipe}, both, new weight" in names for recipe in FP8_RECIPES)
    assert all(row["value"] > 0 for row in rows if row["unit"] == "us")
    calls = {row["case"]: row["value"] for row in rows if row["unit"] == "calls"}
    assert calls["torch.mm"] == 0 < calls["linear, rowwise, forward"] < calls["training step, rowwise"]
    assert all(name in capsys.readouterr().out for name in names[:1])
