"""Versions of frameworks: what was tested, what octavo says of others, and that docs/ecosystem.md says what ran."""

import json
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import BackendError
from octavo.integrations import tested
from octavo.integrations.tested import ROWS, Versions, require
from tests.conftest import RunOctavo

ROOT = Path(__file__).parents[2]
RECORDS: dict[str, Any] = {path.stem: json.loads(path.read_text()) for path in (ROOT / "ecosystem").glob("*.json")}


@pytest.fixture
def installed(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """What is installed, to be filled by a test."""
    found: dict[str, str] = {}
    monkeypatch.setattr(tested, "installed_version", found.get)
    monkeypatch.setattr(tested, "ROWS", {"huggingface": {"transformers": Versions("5.9.0", "5.24.0")}})
    monkeypatch.setenv("HF_HOME", "/nowhere")
    return found


@pytest.mark.parametrize(
    ("version", "text"),
    [
        (None, "transformers is not installed; octavo was tested with transformers 5.9.0 to 5.24.0: pip install"),
        ("5.8.9", "transformers 5.8.9 is too old; octavo was tested with transformers 5.9.0 to 5.24.0: pip install -U"),
    ],
)
def test_a_framework_that_cannot_serve_is_refused(version: str | None, text: str, installed: dict[str, str]) -> None:
    installed |= {"transformers": version} if version else {}
    with pytest.raises(BackendError, match=re.escape(f"octavo.integrations.huggingface: {text}")):
        require("huggingface", "transformers")


def test_a_newer_one_is_used_with_a_warning(installed: dict[str, str]) -> None:
    for version in ("5.9.0", "5.24.0", "5.24.0.post1"):
        installed["transformers"] = version
        require("huggingface", "transformers")
    installed["transformers"] = "5.24.1"
    with pytest.warns(
        UserWarning, match=r"transformers 5.24.1 is newer than what octavo was tested with, transformers"
    ):
        require("huggingface", "transformers")


def test_doctor_shows_the_ecosystem(
    installed: dict[str, str], run_octavo: RunOctavo, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    installed |= {"transformers": "5.24.0", "torchao": "0.18.0"}
    well = run_octavo("doctor", "--ecosystem")
    assert well.code == 0
    assert "huggingface: transformers 5.24.0" in well.out and "torchao: 0.18.0 is installed too" in well.out
    monkeypatch.setenv("HF_HOME", str(tmp_path))
    (tmp_path / "accelerate").mkdir()
    (tmp_path / "accelerate" / "default_config.yaml").write_text("num_machines: 1\nmixed_precision: fp8\n")
    installed["transformers"] = "4.57.6"
    bad = run_octavo("doctor", "--ecosystem", "--json")
    assert bad.code == 1
    failed = [row["text"] for row in json.loads(bad.out)["ecosystem"] if row["status"] == "fail"]
    assert len(failed) == 2 and "4.57.6 is too old" in failed[0] and "default_config.yaml converts linears" in failed[1]
    assert "takes no model" in run_octavo("doctor", "blockwise", "--ecosystem").err


def test_the_module_without_its_framework_says_so() -> None:
    code = (
        "import sys; sys.modules['transformers'] = None\n"
        "from octavo.integrations import tested; tested.installed_version = lambda package: None\n"
        "import octavo.integrations.huggingface"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120)
    assert done.returncode == 1
    assert (
        "BackendError: octavo.integrations.huggingface: transformers is not installed;" in done.stderr.splitlines()[-1]
    )


def table() -> dict[str, list[str]]:
    """Rows of docs/ecosystem.md's first table by their names, which are in code marks."""
    lines = (ROOT / "docs" / "ecosystem.md").read_text().splitlines()
    cells = [[cell.strip() for cell in line.strip("|").split("|")] for line in lines if line.startswith("| `")]
    return {first.strip("`"): rest for first, *rest in cells}


def test_the_table_has_the_rows_that_ran() -> None:
    assert set(table()) == set(RECORDS) == set(ROWS)
    for row, record in RECORDS.items():
        assert record["passed"] and not record["failed"], row
        versions = [f"{package} {record['versions'][package]}" for package in ROWS[row]]
        assert table()[row][0] == ", ".join(versions)
        assert f"{len(record['passed'])} tests" in table()[row][2]
        assert record["seconds"] < 360


def test_what_ran_is_what_is_pinned() -> None:
    for row, packages in ROWS.items():
        pinned = dict(
            line.removeprefix("# --no-deps ").split("==")
            for line in (ROOT / "ecosystem" / f"{row}.txt").read_text().splitlines()
            if "==" in line
        )
        for package, versions in packages.items():
            assert pinned[package] == versions.newest == RECORDS[row]["versions"][package]
