"""W&B and MLflow: where a run's numbers go beside metrics.jsonl; their own settings say to which server, and as whom.

A resumed run goes on with the run that it had there, whose id is in the run's folder.
"""

import json
import re
import time
import uuid
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, Protocol, Self

from octavo.errors import ConfigError
from octavo.run.atomic import write_atomic
from octavo.run.checkpoint_store import flatten
from octavo.run.write_failures import WriteFailures

SINKS_FILE = "sinks.json"
_SHOWN = {"wandb": "W&B's log", "mlflow": "MLflow's log"}
_Opened = tuple["Sink", str, int]  # and its run's id, and the first step that it does not have
_MAX_PARAMETERS = 100  # of one request of MLflow's


class Sink(Protocol):
    """One of the two; each call may raise anything."""

    def log(self, values: dict[str, float], step: int) -> None:
        """Send a step's values by their names."""

    def finish(self, exit_code: int) -> None:
        """End the run there: 0 for well."""


class Sinks:
    """Sends rows to W&B, MLflow, both or none; to be used in a with statement. What cannot be sent ends no run.

    Args:
        directory: the run's; its name is the run's name there.
        done_steps: the step that the run resumes after, in the runs that it had there; 0 begins new ones.
        earlier: rows up to there; those that a killed process could not send any more are sent now.
        wandb: a project; "" for no W&B.
        mlflow: an experiment; "" for no MLflow.
        config: the run's, shown beside its numbers; api_key and admin_key of any section are left out.
        failures: where what could not be sent is counted; it raises nothing.
        writes: False sends nothing: another rank does.
    """

    def __init__(
        self,
        directory: Path,
        done_steps: int,
        earlier: Sequence[Mapping[str, Any]] = (),
        *,
        wandb: str = "",
        mlflow: str = "",
        config: Mapping[str, Any],
        failures: WriteFailures,
        writes: bool = True,
    ) -> None:
        self._failures, self._sinks = failures, dict[str, Sink]()
        path, ids, shown = directory / SINKS_FILE, dict[str, str](), _without_secrets(config)
        for name, project in {"wandb": wandb, "mlflow": mlflow}.items():
            if not project or not writes:
                continue
            with failures.caught(_SHOWN[name]):
                directory.mkdir(parents=True, exist_ok=True)
                ids = json.loads(path.read_text()) if path.exists() and done_steps else ids
                sink, ids[name], next_step = _OPENERS[name](project, directory, shown, ids.get(name))
                self._sinks[name] = sink
                write_atomic(path, json.dumps(ids) + "\n")
                for row in earlier:
                    if row["step"] >= next_step:
                        sink.log(_values(row), step=row["step"])

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        for name, sink in self._sinks.items():
            with self._failures.caught(_SHOWN[name]):
                sink.finish(exit_code=0 if error is None else 1)

    def write(self, row: Mapping[str, Any]) -> None:
        """Send one row of metrics: its "step", and numbers by their names."""
        for name, sink in self._sinks.items():
            with self._failures.caught(_SHOWN[name]):
                sink.log(_values(row), step=row["step"])


def require_sinks(section: str, *, wandb: str = "", mlflow: str = "") -> None:
    """Refuse, before any work is done, a run that asks for what is not installed.

    Args:
        section: of the config, for the error: it has the keys wandb and mlflow.
    Raises:
        ConfigError: a package is missing.
    """
    for package, project, find in (("wandb", wandb, _wandb), ("mlflow", mlflow, _mlflow)):
        try:
            if project:
                find()
        except ImportError:
            raise ConfigError(
                f"{section}.{package} = {project!r} needs the {package} package, which is not installed; pip install "
                f"{package}, or leave {section}.{package} empty: metrics.jsonl and TensorBoard have the same numbers"
            ) from None


def _values(row: Mapping[str, Any]) -> dict[str, float]:
    return {key: value for key, value in row.items() if key != "step"}


def _without_secrets(config: Mapping[str, Any]) -> dict[str, Any]:
    shown = {key: value for key, value in config.items() if key not in ("api_key", "admin_key")}
    return {key: _without_secrets(value) if isinstance(value, Mapping) else value for key, value in shown.items()}


def _wandb() -> Any:
    import wandb

    return wandb


def _mlflow() -> Any:
    import mlflow

    return mlflow


def _open_wandb(project: str, directory: Path, config: dict[str, Any], known: str | None) -> _Opened:
    run_id = known or uuid.uuid4().hex[:8]
    place = {"project": project, "name": directory.name, "dir": str(directory), "id": run_id, "resume": "allow"}
    # the console is the run's: W&B would copy its progress bars
    run = _wandb().init(**place, config=config, settings={"console": "off"})
    return run, run_id, run.step


def _open_mlflow(experiment: str, directory: Path, config: dict[str, Any], known: str | None) -> _Opened:
    sink = _MLflow(_mlflow(), experiment, directory.name, config, known)
    return sink, sink.run_id, sink.last_step + 1


class _MLflow:
    """A run of MLflow's, by its client: the global run, which a user's own code may have, is left alone."""

    def __init__(self, mlflow: Any, experiment: str, name: str, config: dict[str, Any], known: str | None) -> None:
        self._client, self._entities = mlflow.MlflowClient(), mlflow.entities
        self.last_step, found = 0, self._client.get_experiment_by_name(experiment)
        if known is not None:
            self.run_id = known
            self._client.update_run(known, status="RUNNING")
            sent = self._client.get_metric_history(known, "seconds")  # which each row has
            self.last_step = max((metric.step for metric in sent), default=0)
            return
        home = self._client.create_experiment(experiment) if found is None else found.experiment_id
        self.run_id = self._client.create_run(home, run_name=name).info.run_id
        parameters = [self._entities.Param(key, str(value)) for key, value in flatten(config) if value != ""]
        self._client.log_batch(self.run_id, params=parameters[:_MAX_PARAMETERS])

    def log(self, values: dict[str, float], step: int) -> None:
        """Rows that a killed run had sent already are left out: MLflow would show both."""
        if step <= self.last_step:
            return
        now = int(time.time() * 1000)
        metrics = [self._entities.Metric(_allowed(key), float(value), now, step) for key, value in values.items()]
        self._client.log_batch(self.run_id, metrics=metrics)

    def finish(self, exit_code: int) -> None:
        """As MLflow names it."""
        self._client.set_terminated(self.run_id, status="FAILED" if exit_code else "FINISHED")


def _allowed(name: str) -> str:
    """MLflow's names have letters, digits and a few marks."""
    return re.sub(r"[^\w\-. /]", "_", name)


_OPENERS: dict[str, Callable[..., _Opened]] = {"wandb": _open_wandb, "mlflow": _open_mlflow}
