"""`octavo doctor --ranks`: what is said of ranks that agree, of ranks that do not, and of values that arrive wrong."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from octavo.cli import app
from octavo.cli.ranks import start_ranks
from octavo.distributed import agreement, links
from octavo.distributed.mesh import Mesh
from octavo.doctor.ranks import check_ranks
from octavo.errors import ConfigError
from tests.ranks import run_ranks

OF_A_MODEL = (
    ["rowwise"],
    ["--recipe", "rowwise"],
    ["--text", "a"],
    ["--tokens", "9"],
    ["--threshold", "9"],
    ["--set", "run.steps=1"],
)


def job(rank: int) -> dict[str, Any]:
    mesh = Mesh.from_config(device="cpu")
    found: dict[str, Any] = {"well": [vars(check) for check in check_ranks(mesh)]}
    agreement.__version__ = f"0.{rank}"
    gather = links.all_gather_into
    links.all_gather_into = lambda out, own, **rest: gather(out, own * (2 - rank), **rest)  # rank 0 sends other values
    found["ill"] = {check.name: [check.status, check.text] for check in check_ranks(mesh)}
    mesh.close()
    return found


@pytest.fixture(scope="module")
def ranks() -> list[dict[str, Any]]:
    return run_ranks(job, 2)


def test_ranks_that_agree_are_well(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert all(check["status"] == "ok" for check in found["well"])
        assert [check["name"] for check in found["well"]] == [
            "rank 0",
            "rank 1",
            "versions",
            "all-reduce of bf16",
            "all-gather of bf16",
            "all-gather of FP8 codes",
            "reduce-scatter of bf16",
            "all-to-all of bf16",
        ]


def test_other_versions_and_wrong_values_are_said_on_every_rank(ranks: list[dict[str, Any]]) -> None:
    for found in ranks:
        assert found["ill"]["versions"][0] == "fail" and "octavo is '0.0' on rank 0" in found["ill"]["versions"][1]
        for name in ("all-gather of bf16", "all-gather of FP8 codes"):
            assert found["ill"][name][0] == "fail" and "wrong values arrived" in found["ill"][name][1]
        assert found["ill"]["all-reduce of bf16"][0] == "ok"


def test_one_rank_is_no_job() -> None:
    with pytest.raises(ConfigError, match="--ranks must be at least 2, got 1"):
        start_ranks(1, [])


def test_a_launchers_own_number_is_held(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (("RANK", "0"), ("LOCAL_RANK", "0"), ("WORLD_SIZE", "4")):
        monkeypatch.setenv(name, value)
    assert start_ranks(4, []) is None
    with pytest.raises(ConfigError, match="--ranks 2 under a launcher of 4 ranks"):
        start_ranks(2, [])


@pytest.mark.parametrize("more", OF_A_MODEL)
def test_what_belongs_to_a_model_is_refused_beside_ranks(more: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("octavo.cli.doctor.start_ranks", lambda *_: pytest.fail("ranks were started"))
    ended = CliRunner().invoke(app, ["doctor", "--ranks", "2", *more])
    assert isinstance(ended.exception, ConfigError)
    assert "--ranks checks the ranks alone and takes no model or option of one" in str(ended.exception)


@pytest.mark.slow
def test_the_command_starts_its_ranks(tmp_path: Path) -> None:
    command = [sys.executable, "-m", "octavo", "doctor", "--ranks", "2", "--device", "cpu", "--json"]
    ended = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, timeout=120, check=True)
    assert json.loads(ended.stdout)["ok"] is True
