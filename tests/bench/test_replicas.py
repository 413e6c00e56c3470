"""The benchmark of several servers behind a router runs as a toy: its rows, and that each replica had requests."""

import json
from pathlib import Path

import pytest

pytest.importorskip("uvicorn")

from bench.report import SERVED_THROUGHPUT
from bench.serve import replicas


@pytest.mark.largest
def test_replicas_stand_beside_one_server(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    given = ["--toy", "--device", "cpu", "--out", str(tmp_path), "--commit", "abc"]
    assert replicas.main(given) == 0, capsys.readouterr().out
    record = json.loads((tmp_path / "replicas.json").read_text())
    rows = {(row["case"], row["metric"]): row["value"] for row in record["rows"]}
    throughputs = [value for (_, metric), value in rows.items() if metric == SERVED_THROUGHPUT]
    ratios = [value for (_, metric), value in rows.items() if metric == f"{SERVED_THROUGHPUT} over one server"]
    assert (len(throughputs), len(ratios)) == (4, 2) and min(throughputs + ratios) > 0
    assert all(value == 0 for (_, metric), value in rows.items() if metric == "errors")
    assert "requests routed to each replica: " in capsys.readouterr().out
