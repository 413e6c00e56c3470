"""The figures of README.md and docs/ are the records', and records that are older than their code are marked."""

import json
import re
import subprocess
from pathlib import Path

import pytest

from bench import record_age
from bench.measured import PAGES, README, TEMPLATE, fill, render
from bench.record_age import AWAITED, CODE, RECORDS, commits_of, is_older, load_older
from octavo.errors import ConfigError
from tests.assertions import assert_raises

HEAD = "<!--\nx = step: octavo delayed\n-->\n"


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_a_page_equals_the_records(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert fill(text, in_docs=page != README) == text, "run `python -m bench.measured`: a record or a template changed"
    assert "<!-- measured " in text or "<!-- {" in text


def test_every_section_is_shown_once() -> None:
    sections = re.findall(r"<!-- section (\w+) -->", TEMPLATE.read_text(encoding="utf-8"))
    shown = re.findall(r"<!-- measured (\w+) -->", "".join(page.read_text(encoding="utf-8") for page in PAGES))
    assert sorted(shown) == sorted(sections)
    assert_raises(ConfigError, "known: readme", fill, "<!-- measured speed -->\n<!-- end -->")


def test_a_result_has_few_figures_of_its_own() -> None:
    """What stands in a result beside the figures of records: settings, counts and names, each known here."""
    known = {"200", "5", "2", "1"}  # golden cases, sequences of a step, seeds, what bf16 is of itself
    peers = r"vLLM 0\.26|TransformerEngine 2\.20"
    rows = [line.split(" | ") for line in TEMPLATE.read_text().splitlines() if line.startswith("| ")]
    for row in rows:
        result = re.sub(rf"\{{[^{{}}]*\}}|{peers}", "", " | ".join(row[1:-1]))
        numbers = set(re.findall(r"(?<![\w.])\d+(?:\.\d+)?(?!\w)", result.replace("1x128", "").replace("bf16", "")))
        assert numbers <= known, f"figures without a record: {sorted(numbers - known)} in {row[0]}"


def test_a_figure_is_looked_up_and_formatted(tmp_path: Path) -> None:
    row = {"case": "octavo delayed", "metric": "time, x", "value": 0.781, "peer_value": 2.0}
    tokens = {**row, "metric": "tokens", "value": 147_500.0, "peer_value": None}
    about = {"what": "w", "device": "d", "torch": "1", "triton": "2", "commit": "c", "date": "today"}
    (tmp_path / "step.json").write_text(json.dumps({**about, "rows": [row, tokens]}))
    forms = (".2f", "peer .0f", "percent .0f", "change +.0f", "gap .1f", "peer percent .0f")
    text = HEAD + " ".join(f"{{x;time, x;{form}}}" for form in forms) + " {x;tokens;sequences .0f}"
    assert render(text, tmp_path) == "0.78 2 78 -22 -1.2 200 18"
    missing = {"{x;speed;.2f}": "has no 'speed'", "{x;tokens;gap .0f}": "has no 'tokens'"}
    for wrong, said in {**missing, "{y;speed;.2f}": "names no record"}.items():
        assert_raises(ConfigError, said, render, HEAD + wrong, tmp_path)


def test_an_older_record_is_marked_in_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("bench.measured.load_older", lambda: {"step"})
    about = {"date": "2026-11-22"}
    (tmp_path / "step.json").write_text(json.dumps(about | {"rows": [{}, {"date": "2026-11-24"}]}))
    monkeypatch.setattr("bench.measured.RECORDS", tmp_path)
    dates = "2026-11-22 to 2026-11-24"
    text = render("[a](bench/records/step.json), [b](bench/records/sizes.json)")
    assert text == f"[a](bench/records/step.json) ({dates}), [b](bench/records/sizes.json)"
    prose = fill("[a](bench/records/step.json) says x, [b](bench/records/sizes.json) (2026-11-20) y")
    assert prose == f"[a](bench/records/step.json) ({dates}) says x, [b](bench/records/sizes.json) y"
    assert fill(prose) == prose


def test_every_record_says_what_code_it_measures() -> None:
    names = {path.stem for path in RECORDS.glob("*.json") if not path.stem.endswith("_curves")}
    assert names == set(CODE) and not names & set(AWAITED)
    root = RECORDS.parent.parent
    assert all((CODE | AWAITED).values()), "octavo's figures age with its code, whatever stands beside them"
    assert all((root / path).exists() for paths in (CODE | AWAITED).values() for path in paths)


def test_the_list_of_older_records_is_the_historys() -> None:
    try:
        found = {name for name in CODE if is_older(name)}
    except (subprocess.CalledProcessError, FileNotFoundError):
        pytest.skip("this checkout has no history that reaches back to the records")
    assert found == load_older(), "run `python -m bench.record_age` and `python -m bench.measured`"


def test_a_changed_file_makes_a_record_older(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[list[str]] = []

    def git(command: list[str], **_: object) -> "subprocess.CompletedProcess[bytes]":
        seen.append(command)
        return subprocess.CompletedProcess(command, int(commits_of("step")[0] in command))

    monkeypatch.setattr(record_age.subprocess, "run", git)
    assert is_older("step") and not is_older("corpus")
    assert "octavo/nn" in seen[0] and "bench/training/corpus.py" in seen[1]


def test_a_row_of_an_older_commit_makes_a_record_older(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    rows = [{"case": "a"}, {"case": "b", "commit": "c"}, {"case": "d", "commit": "b"}]
    (tmp_path / "step.json").write_text(json.dumps({"commit": "a, b", "rows": rows}))
    monkeypatch.setattr(record_age, "RECORDS", tmp_path)
    assert commits_of("step") == ["a", "b", "c"]
