"""Programs that count host time: a few cases of each, and their records."""

import json
from pathlib import Path

from bench.serve import step_host
from bench.speed import host_time


def test_host_time_of_a_linear(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(host_time, "_BURST", 2)
    asked = ["--filter", "torch.mm", "--filter", "rowwise", "--repeats", "1", "--device", "cpu", "--commit", "abc"]
    assert host_time.main([*asked, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "host_time.json").read_text())["rows"]
    assert all(row["value"] > 0 for row in rows if row["unit"] == "us")
    calls = {row["case"]: row["value"] for row in rows if row["unit"] == "calls"}
    assert calls["torch.mm"] == 0 < calls["linear, rowwise, forward"] < calls["training step, rowwise"]
    assert "linear, rowwise, both, new weight" in capsys.readouterr().out


def test_a_few_decode_steps(tmp_path: Path) -> None:
    asked = ["--num-seqs", "4", "--steps", "3", "--device", "cpu", "--commit", "abc"]
    assert step_host.main([*asked, "--out", str(tmp_path)]) == 0
    rows = json.loads((tmp_path / "step_host.json").read_text())["rows"]
    assert {row["case"] for row in rows} == {*step_host.CASES} and all(row["value"] > 0 for row in rows)
