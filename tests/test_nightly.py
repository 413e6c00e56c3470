"""The record of `make test-nightly`: a case that failed anywhere has failed."""

import json
from pathlib import Path

import pytest

from tests.nightly import NightlyRecord


def report(case: str, when: str, outcome: str, seconds: float = 0.0) -> pytest.TestReport:
    return pytest.TestReport(case, ("", 0, ""), {}, outcome, None, when, duration=seconds)  # type: ignore[arg-type]


def test_a_row_a_case_says_whether_it_passed(tmp_path: Path) -> None:
    plugin = NightlyRecord(tmp_path)
    plugin.pytest_sessionfinish(pytest.ExitCode.OK)
    assert not (tmp_path / "nightly.json").exists()  # nothing ran
    for case, outcomes in (("b", "passed passed passed"), ("a", "passed failed passed"), ("c", "failed passed")):
        for when, outcome in zip(("setup", "call", "teardown"), outcomes.split(), strict=False):
            if (case, when) != ("c", "call"):
                plugin.pytest_runtest_logreport(report(case, when, outcome, 2.5 if when == "call" else 9.0))
    plugin.pytest_runtest_logreport(report("d", "setup", "passed"))  # whose call never ended
    plugin.pytest_sessionfinish(pytest.ExitCode.INTERRUPTED)
    assert not (tmp_path / "nightly.json").exists()
    plugin.pytest_sessionfinish(pytest.ExitCode.TESTS_FAILED)
    document = json.loads((tmp_path / "nightly.json").read_text())
    found = {(row["case"], row["metric"]): row["value"] for row in document["rows"]}
    assert found == {("a", "passed"): 0.0, ("b", "passed"): 1.0, ("c", "passed"): 0.0} | {
        ("d", "passed"): 0.0,
        ("d", "time"): 0.0,
        ("a", "time"): 2.5,
        ("b", "time"): 2.5,
        ("c", "time"): 0.0,
    }
    assert {"date", "commit", "torch", "what"} <= set(document)


def test_the_record_in_the_tree_has_no_failed_case() -> None:
    document = json.loads((Path(__file__).parents[1] / "bench" / "records" / "nightly.json").read_text())
    passed = [row["value"] for row in document["rows"] if row["metric"] == "passed"]
    assert len(passed) > 20 and set(passed) == {1.0}
