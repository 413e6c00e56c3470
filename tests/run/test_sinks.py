"""W&B and MLflow by stand-ins: what is asked of them. tests/ecosystem/test_sinks.py has the real ones."""

import json
import sys
import types
from pathlib import Path
from typing import Any

import pytest

from octavo.errors import ConfigError
from octavo.run.sinks import SINKS_FILE, Sinks, require_sinks
from octavo.run.write_failures import WriteFailures
from octavo.train import train
from tests.train.conftest import build_config, write_corpus

CONFIG = {"a": 1, "engine": {"url": "u", "api_key": "secret", "admin_key": "secret"}}


class FakeRun:
    def __init__(self, step: int = 0) -> None:
        self.step = step
        self.logged: list[tuple[dict[str, float], int]] = []
        self.codes: list[int] = []

    def log(self, values: dict[str, float], step: int) -> None:
        self.logged.append((values, step))

    def finish(self, exit_code: int) -> None:
        self.codes.append(exit_code)


@pytest.fixture
def asked(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What wandb.init was given, with the run that it gave."""
    found: list[dict[str, Any]] = []

    def init(**options: Any) -> FakeRun:
        found.append(options | {"run": FakeRun(step=2)})  # as if it had step 1
        return found[-1]["run"]

    monkeypatch.setitem(sys.modules, "wandb", types.SimpleNamespace(init=init))
    return found


def test_a_resumed_run_goes_on_with_its_own(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    for done_steps in (0, 2, 0):
        earlier = [{"step": step, "loss": 0.5} for step in range(1, done_steps + 1)]
        with Sinks(tmp_path, done_steps, earlier, wandb="mine", config=CONFIG, failures=WriteFailures()) as sinks:
            sinks.write({"step": done_steps + 1, "loss": 0.5})
    ids = [options["id"] for options in asked]
    assert ids[0] == ids[1] != ids[2] == json.loads((tmp_path / SINKS_FILE).read_text())["wandb"]
    assert [options["run"].logged for options in asked] == [
        [({"loss": 0.5}, step) for step in steps] for steps in ([1], [2, 3], [1])
    ]
    assert [options["run"].codes for options in asked] == [[0]] * 3
    assert asked[0]["config"] == {"a": 1, "engine": {"url": "u"}}
    assert {(options["project"], options["name"], options["resume"]) for options in asked} == {
        ("mine", tmp_path.name, "allow")
    }


def test_another_rank_sends_nothing(tmp_path: Path, asked: list[dict[str, Any]]) -> None:
    with Sinks(tmp_path, 0, wandb="mine", config={}, failures=WriteFailures(), writes=False) as sinks:
        sinks.write({"step": 1, "loss": 0.5})
    assert not asked and not (tmp_path / SINKS_FILE).exists()


def test_a_run_that_fails_says_so_and_one_that_starts_over_has_a_run_of_its_own(
    tmp_path: Path, asked: list[dict[str, Any]]
) -> None:
    config = build_config(write_corpus(tmp_path / "corpus.jsonl"), tmp_path, metrics={"wandb": "mine"})

    def fail(row: Any) -> None:
        raise RuntimeError(row.step)

    with pytest.raises(RuntimeError):
        train(config, progress=False, on_step=fail)
    train(config, progress=False, resume=False)
    assert [options["run"].codes for options in asked] == [[1], [0]]
    assert [step for _, step in asked[1]["run"].logged] == [1, 2, 3, 4, 5, 6]
    assert asked[1]["config"]["run"]["steps"] == 6
    (aside,) = tmp_path.glob("run/previous-1/*.json")
    assert json.loads(aside.read_text())["wandb"] == asked[0]["id"] != asked[1]["id"]


@pytest.mark.parametrize("package", ["wandb", "mlflow"])
def test_a_package_that_is_not_installed_is_said_before_any_work(
    package: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, package, None)
    require_sinks("metrics")
    config = build_config(tmp_path / "none.jsonl", tmp_path, metrics={package: "mine"})
    with pytest.raises(
        ConfigError, match=rf"metrics.{package} = 'mine' needs the {package} package.*leave metrics.{package} empty"
    ):
        train(config, progress=False)
