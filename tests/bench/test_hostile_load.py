"""The load test: ten honest clients keep their latencies beside each hostile set."""

import asyncio
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.serve import hostile_load
from bench.serve.hostile_load import ATTACKS, Round, main, make_checkpoint, run, tiny_server
from octavo import LLM
from octavo.serve.http import worker
from tests.quiet import cores_alone
from tests.serve.http.running import running

DOCS = Path(__file__).parents[2] / "docs"


@pytest.mark.nightly
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


def test_the_docs_table_names_every_attack() -> None:
    section = (DOCS / "serving.md").read_text(encoding="utf-8").split("## Hostile clients")[1].split("\n## ")[0]
    cells = re.findall(r"^\|.*\|([^|]*)\|$", section, re.MULTILINE)
    assert {name for cell in cells for name in re.findall(r"`(\w+)`", cell)} == {*ATTACKS}


def test_long_texts_reach_a_tokenizer(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of each attack with long texts: those that are refused by their length alone say nothing about tokenizing."""
    sent: list[tuple[str, bytes]] = []
    tokenized: list[int] = []

    async def keep(url: str, path: str, body: bytes, num_clients: int) -> None:
        sent.append((path, body))

    async def work(function: Any, *arguments: Any) -> Any:
        if function is not worker.encode:
            return function(*arguments)
        tokenized.append(len(arguments[0]))
        return [1] * 250_000

    monkeypatch.setattr(hostile_load, "_post_forever", keep)
    for attack in (hostile_load.long_prompts, hostile_load.many_tokens):
        asyncio.run(attack(""))
    bodies = [(path, body) for path, body in sent if path != "/detokenize"]
    make_checkpoint(tmp_path)
    with running(lambda: LLM(str(tmp_path), device="cpu", num_kv_pages=16, max_num_seqs=1).engine) as server:
        monkeypatch.setattr(server.service.texts._long, "run", work)
        headers = {"Content-Type": "application/json"}
        answers = [server.client.post(path, content=body, headers=headers) for path, body in bodies]
    assert [answer.status_code for answer in answers] == [400, 200, 200, 400]
    assert "characters have more than 512 tokens" in answers[0].text
    assert tokenized == [2_999_986, 1_000_000, 1_000_000]
