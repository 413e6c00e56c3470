"""W&B offline and MLflow's local stores: what a run that was killed and resumed has sent, read back; and uploads."""

import os
import signal
import struct
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from octavo.rl.config import RLConfig
from octavo.rl.reporter import RunReporter
from octavo.run.metrics import METRICS_FILE, Row, read_metrics
from octavo.run.sinks import Sinks
from octavo.run.write_failures import WriteFailures
from octavo.train import train
from tests.ecosystem.launched import finish, launch
from tests.rl.test_progress import row as rl_row
from tests.train.conftest import build_config, write_corpus, written

mlflow = pytest.importorskip("mlflow", reason="needs ecosystem/sinks.txt")
wandb = pytest.importorskip("wandb", reason="needs ecosystem/sinks.txt")

_BLOCK, STEPS = 1 << 15, 300
pytestmark = [pytest.mark.ecosystem, pytest.mark.filterwarnings("ignore")]


@pytest.fixture(autouse=True)
def places(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """No network: W&B writes a folder, MLflow a database."""
    monkeypatch.setenv("WANDB_MODE", "offline")
    monkeypatch.setenv("MLFLOW_TRACKING_URI", f"sqlite:///{tmp_path}/mlflow.db")


def of_mlflow(experiment: str) -> dict[str, Any]:
    """The one run of an experiment: its info, parameters, and (step, value) of each metric in the order of sending."""
    client = mlflow.MlflowClient()
    (run,) = client.search_runs([client.get_experiment_by_name(experiment).experiment_id])
    history = {
        key: [(m.step, m.value) for m in client.get_metric_history(run.info.run_id, key)] for key in run.data.metrics
    }
    return {"info": run.info, "parameters": run.data.params, "history": history}


def wandb_records(path: Path) -> Iterator[Any]:
    """Of a .wandb file: blocks as LevelDB's log has them, behind 7 bytes."""
    from wandb.proto.wandb_internal_pb2 import Record

    data, at, parts = path.read_bytes(), 7, b""
    while at + 7 <= len(data):
        if (rest := _BLOCK - at % _BLOCK) < 7:
            at += rest
            continue
        _, size, kind = struct.unpack_from("<IHB", data, at)
        parts += data[at + 7 : at + 7 + size]
        at += 7 + size
        if kind in (1, 4):  # whole, or the last part
            yield Record.FromString(parts)
            parts = b""


def of_wandb(directory: Path) -> dict[str, list[dict[int, dict[str, float]]]]:
    """Of each W&B run: what each process has written, values by step."""
    found: dict[str, list[dict[int, dict[str, float]]]] = {}
    for path in sorted(directory.glob("wandb/offline-run-*/run-*.wandb")):
        rows = [record.history for record in wandb_records(path) if record.HasField("history")]
        values = [{item.key or item.nested_key[0]: float(item.value_json) for item in row.item} for row in rows]
        found.setdefault(path.stem, []).append({row.step.num: each for row, each in zip(rows, values, strict=True)})
    return found


def assert_sent(rows: list[Row], wandb_steps: dict[int, dict[str, float]], history: dict[str, list[Any]]) -> None:
    """Every number of metrics.jsonl, once, and nothing else."""
    for row in rows:
        values = {key: value for key, value in row.as_dict().items() if key != "step"}
        assert {key: value for key, value in wandb_steps[row.step].items() if not key.startswith("_")} == values
    for key, sent in history.items():
        assert sent == [(row.step, row.as_dict()[key]) for row in rows if key in row.as_dict()]
    assert set(history) == {key for row in rows for key in row.as_dict() if key != "step"}


def test_a_run_that_was_killed_and_resumed_is_one_run_in_both(tmp_path: Path) -> None:
    sections = {
        "checkpoint": {"every": 20},
        "metrics": {"eval_every": 30, "eval_tokens": 128, "tensorboard": False, "wandb": "mine", "mlflow": "mine"},
        "run": {"steps": STEPS, "device": "cpu", "dir": str(tmp_path / "run")},
    }
    config = written(tmp_path / "train.toml", write_corpus(tmp_path / "corpus.jsonl"), **sections)
    run = launch("-m", "octavo", "train", config)
    deadline = time.monotonic() + 120
    while len(read_metrics(tmp_path / "run" / METRICS_FILE)) < 50:
        assert time.monotonic() < deadline and run.poll() is None, run.communicate()[0][-3000:]
        time.sleep(0.01)
    os.kill(run.pid, signal.SIGKILL)
    run.communicate(timeout=60)
    before = len(read_metrics(tmp_path / "run" / METRICS_FILE))
    assert before < STEPS
    finish(launch("-m", "octavo", "train", config))

    rows = read_metrics(tmp_path / "run" / METRICS_FILE)
    assert [row.step for row in rows] == list(range(1, STEPS + 1))
    ((first, second),) = of_wandb(tmp_path / "run").values()
    found = of_mlflow("mine")
    assert found["info"].run_name == "run" and found["info"].status == "FINISHED"
    assert found["parameters"]["data.vocab_size"] == "280"
    times = ("seconds", "tokens_per_s")  # of rows that were made twice
    history = {key: sent for key, sent in found["history"].items() if key not in times}
    assert [step for step, _ in found["history"]["seconds"]] == list(range(1, STEPS + 1))
    rows = [Row.from_dict({**row.as_dict(), "seconds": 0.0, "tokens_per_s": 0.0}) for row in rows]
    wandb_steps = {step: {**values, "seconds": 0.0, "tokens_per_s": 0.0} for step, values in (first | second).items()}
    assert_sent(rows, wandb_steps, history | {key: [(row.step, 0.0) for row in rows] for key in times})
    assert max(first, default=0) <= before and max(second) == STEPS


@pytest.mark.parametrize("store", ["database", "files"])
def test_every_number_arrives(store: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    if store == "files":  # which MLflow 3.17 no longer takes by itself
        monkeypatch.setenv("MLFLOW_ALLOW_FILE_STORE", "true")
        monkeypatch.setenv("MLFLOW_TRACKING_URI", f"file://{tmp_path}/mlruns")
    options = {"eval_every": 2, "eval_tokens": 128, "tensorboard": False, "wandb": "mine", "mlflow": "mine"}
    result = train(build_config(write_corpus(tmp_path / "corpus.jsonl"), tmp_path, metrics=options), progress=False)
    ((steps,),) = of_wandb(tmp_path / "run").values()
    assert_sent(list(result.rows), steps, of_mlflow("mine")["history"])


def test_octavo_rl_sends_its_rows(tmp_path: Path) -> None:
    config = RLConfig(run={"dir": tmp_path / "run", "wandb": "mine", "mlflow": "mine", "report": False})
    reporter = RunReporter(config)
    reporter.write(rl_row(1))
    reporter.__exit__(RuntimeError, RuntimeError(), None)
    found = of_mlflow("mine")
    assert found["info"].status == "FAILED"
    assert found["history"]["reward/mean"] == [(1, rl_row(1)["reward/mean"])]
    ((steps,),) = of_wandb(tmp_path / "run").values()
    assert steps[1]["reward/mean"] == rl_row(1)["reward/mean"]


def test_a_server_that_is_not_there_ends_no_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("MLFLOW_TRACKING_URI", "http://127.0.0.1:9")
    monkeypatch.setenv("MLFLOW_HTTP_REQUEST_MAX_RETRIES", "0")
    failures = WriteFailures()
    with Sinks(tmp_path, 0, mlflow="mine", config={}, failures=failures) as sinks:
        sinks.write({"step": 1, "loss": 0.5})
    assert failures.counts == {"MLflow's log": 1}
    assert "MLflow's log was not written, the run goes on" in caplog.text
