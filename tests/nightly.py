"""Pytest's plugin of `make test-nightly`: it writes what became of each case to bench/records/nightly.json.

A part of the matrix, asked for by ARGS, writes nothing, and neither does a run that was cut off.
"""

from pathlib import Path

import pytest

from bench.record import Record

RECORDS = Path(__file__).parents[1] / "bench" / "records"
WHAT = (
    "make test-nightly: a rank of two is killed at each place of a step, in training and in reinforcement learning; "
    "torchrun starts both again, and the run must end with the bits of one that nothing disturbed. 2 gloo ranks. And "
    "honest clients beside attackers of a server: what they wait stays within the limits; and replicas that are "
    "killed under load."
)


class NightlyRecord:
    """Takes pytest's reports of cases, those of other workers too."""

    def __init__(self, folder: Path) -> None:
        self._record, self._folder = Record("nightly", WHAT, "cpu"), folder
        self._failed: dict[str, bool] = {}
        self._seconds: dict[str, float] = {}

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        self._failed[report.nodeid] = self._failed.get(report.nodeid, False) or not report.passed
        if report.when == "call":
            self._seconds[report.nodeid] = report.duration

    def pytest_sessionfinish(self, exitstatus: int) -> None:
        if exitstatus not in (pytest.ExitCode.OK, pytest.ExitCode.TESTS_FAILED):
            return
        for case, has_failed in sorted(self._failed.items()):
            self._record.add(case, "passed", "", float(not has_failed and case in self._seconds))
            self._record.add(case, "time", "s", self._seconds.get(case, 0.0))
        if self._failed:
            self._record.save(self._folder)


def pytest_configure(config: pytest.Config) -> None:
    option = config.option
    chosen = (option.keyword, option.deselect, option.maxfail, option.lf, option.stepwise)
    is_whole = config.args == config.getini("testpaths") and option.markexpr == "nightly" and not any(chosen)
    if is_whole and not hasattr(config, "workerinput"):  # pytest-xdist's
        config.pluginmanager.register(NightlyRecord(RECORDS))
