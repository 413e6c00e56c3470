"""Timing and records, on a CPU."""

import json
from pathlib import Path

import pytest

from bench.record import Record, Timing, time_calls


def test_calls_are_timed_in_turn() -> None:
    order: list[str] = []
    calls = {"a": lambda: order.append("a"), "b": lambda: order.append("b")}
    timings = time_calls(calls, repeats=3, warmup=1, device="cpu", align=lambda: order.append("|"))
    assert order == ["a", "b"] + ["|", "a", "|", "b"] * 3
    assert all(0 < t.p20_us <= t.median_us <= t.p80_us for t in timings.values())


def test_rates_ascend() -> None:
    assert Timing(100.0, 80.0, 200.0).rate(1e-3) == pytest.approx((10.0, 5.0, 12.5))


def test_a_record_is_written(tmp_path: Path) -> None:
    record = Record("speed", "how fast", device="cpu")
    record.add("case", "bandwidth", "GB/s", 1234.5678, 1000.0, 1300.0, peer="copy", peer_value=4000.0)
    record.add("other", "time", "us", 5.0)
    document = json.loads(record.save(tmp_path / "records", commit="abc").read_text())
    assert list(document) == ["what", "device", "torch", "triton", "commit", "date", "rows"]
    assert document["commit"] == "abc"
    assert "CPU" in document["device"]
    names = {"case": "case", "metric": "bandwidth", "unit": "GB/s", "peer": "copy"}
    assert document["rows"][0] == names | {"value": 1235.0, "p20": 1000.0, "p80": 1300.0, "peer_value": 4000.0}
    assert document["rows"][1]["peer_value"] is None
