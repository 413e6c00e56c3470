"""Pytest's plugin of `make test-ecosystem`: it writes ecosystem/ROW.json: versions and cases.

A part of the row's tests, asked for by -k, writes nothing, and neither do the whole product and a run that was cut off.
"""

import datetime
import json
import re
from pathlib import Path
from typing import Any

import pytest

from bench.record import git_commit
from octavo.integrations.tested import ROWS, installed_version
from tests.ecosystem.cases import IS_WHOLE

FOLDER = Path(__file__).parents[2] / "ecosystem"


class EcosystemRecord:
    """Takes pytest's reports of a row's cases."""

    def __init__(self, row: str, folder: Path = FOLDER) -> None:
        self._row, self._path = row, folder / f"{row}.json"
        self._outcomes: dict[str, str] = {}
        self._seconds = 0.0

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        case = report.nodeid.partition("::")[2]
        self._seconds += report.duration
        if report.outcome != "passed" or case not in self._outcomes:
            self._outcomes[case] = report.outcome

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED) or not self._outcomes:
            return
        self._path.write_text(json.dumps(self.document(), indent=1) + "\n")

    def document(self) -> dict[str, Any]:
        """What is written of the row; seconds are the tests' own."""
        packages = ("torch", *ROWS[self._row])
        cases = {outcome: [] for outcome in ("passed", "failed", "skipped")}
        for case, outcome in sorted(self._outcomes.items()):
            cases[outcome].append(case)
        return {
            "versions": {package: installed_version(package) for package in packages},
            "commit": git_commit(),
            "date": datetime.datetime.now(datetime.UTC).date().isoformat(),
            "device": "cpu",
            "seconds": round(self._seconds),
            **cases,
        }


def pytest_configure(config: pytest.Config) -> None:
    """Record the row whose file of tests/ecosystem is named, where all of it runs."""
    named = [found[1] for each in config.args if (found := re.search(r"tests/ecosystem/test_(\w+)\.py$", each))]
    option = config.option
    others = (IS_WHOLE, option.keyword, option.deselect, option.maxfail, option.lf, option.stepwise)
    if len(named) == 1 and not any(others):
        config.pluginmanager.register(EcosystemRecord(named[0]))
