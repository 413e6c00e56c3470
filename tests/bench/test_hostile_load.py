"""The load test: ten honest clients keep their latencies beside each hostile set."""

import asyncio
import json
from pathlib import Path

import pytest

from bench.serve import hostile_load
from bench.serve.hostile_load import ATTACKS, Round, main, run, tiny_server
from tests.quiet import cores_alone


@pytest.mark.slow(first=True)
@pytest.mark.timeout(600)
def test_honest_clients_beside_hostile_ones() -> None:
    with cores_alone(), tiny_server() as url:
        found = asyncio.run(run(url, 4.0, [*ATTACKS]))
    assert [name for name, outcome in found.items() if not outcome.is_borne] == []


def test_the_record_has_the_last_try_of_each_attack(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """One is borne at once, one in the third try, one never."""
    slow = {"long_prompts": [0.1], "odd_lists": [0.9, 0.9, 0.3], "slow_heads": [0.9, 0.9, 0.8]}

    async def measure(url: str, seconds: float) -> Round:
        return Round([0.1], [0.01], 0.005)

    async def beside(name: str, url: str, seconds: float) -> Round:
        return Round([slow[name].pop(0)], [0.02], 0.006)

    monkeypatch.setattr(hostile_load, "measure", measure)
    monkeypatch.setattr(hostile_load, "beside", beside)
    options = ["--url", "http://x", "--seconds", "2", "--out", str(tmp_path), "--commit", "c", "--attacks"]
    assert main([*options, "long_prompts", "odd_lists", "slow_heads"]) == 1
    document = json.loads((tmp_path / "hostile_load.json").read_text())
    rows = {(row["case"], row["metric"]): row for row in document["rows"]}
    text = [rows[name, "text, p99"] for name in ("long_prompts", "odd_lists", "slow_heads")]
    assert [(row["value"], row["peer_value"]) for row in text] == [(100.0, 100.0), (300.0, 100.0), (800.0, 100.0)]
    assert rows["odd_lists", "text, limit of the p99"]["value"] == pytest.approx(1.2 * 350.0)
    assert rows["odd_lists", "health, limit of the p99"]["value"] == pytest.approx(1.2 * 260.0)
    assert [rows[name, "tries"]["value"] for name in ("long_prompts", "odd_lists", "slow_heads")] == [1.0, 3.0, 3.0]
    assert document["commit"] == "c" and "10 honest clients for 2 s" in document["what"]
    assert not any(slow.values())
