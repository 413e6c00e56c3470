"""The numbers of one rollout step, and the files of a run that they are read from again."""

import contextlib
import dataclasses
import json
import os
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any, Self

from octavo.report.axes import number
from octavo.run.metrics import Row

CONFIG_FILE = "config.json"
HEALTH_FILE = "health.jsonl"
_FORMER = {"eval/accuracy": "eval/reward"}  # metrics by the names that older files have
_ROW_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


@dataclasses.dataclass(frozen=True)
class StepRow(Row):
    """One rollout step: the fields of a training row (loss, lr, ...) and every metric by its name.

    Attributes:
        metrics: names as in octavo.rl.metrics, with "eval/reward" where the step was followed by an evaluation.
    """

    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as one flat dict."""
        flat = super().as_dict()
        return {**{key: value for key, value in flat.items() if key != "metrics"}, **self.metrics}

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> Self:
        """as_dict's inverse; of an older run's rows too."""
        flat = with_current_names(flat)
        fields = {key: value for key, value in flat.items() if key in _ROW_FIELDS}
        return cls(**fields, metrics={key: value for key, value in flat.items() if key not in _ROW_FIELDS})

    @property
    def summary(self) -> str:
        """One line for a person."""
        m = self.metrics
        text = (
            f"reward {m['reward/mean']:.3f}  length {m['response_length/mean']:.1f}  "
            f"entropy {m['actor/entropy']:.2f}  mismatch KL {number(m['rollout_corr/k3_kl'], '.1e')}  "
            f"max |delta logprob| {number(m['mismatch/logprob_abs_diff_max'], '.1e')}"
        )
        return text + (f"  held-out {m['eval/reward']:.3f}" if "eval/reward" in m else "")


def with_current_names(flat: Mapping[str, Any]) -> dict[str, Any]:
    """A row of a metrics.jsonl, with today's names where an older octavo wrote it."""
    return {_FORMER.get(key, key): value for key, value in flat.items()}


def read_alerts(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's health.jsonl; none where there is no file."""
    return list(read_lines(path))


def append_lines(path: Path, rows: Iterable[Mapping[str, Any]]) -> None:
    """Add rows to a file of JSON lines; a line that was cut short is ended first, lest it spoil the next one."""
    text = "".join(json.dumps(row) + "\n" for row in rows)
    with path.open("ab+") as file:
        if file.tell():
            file.seek(-1, os.SEEK_END)
            text = text if file.read(1) == b"\n" else "\n" + text
        file.write(text.encode())


def read_lines(path: Path) -> Iterator[dict[str, Any]]:
    """The rows of such a file without those that a kill or a full disk cut short; none where there is no file."""
    if not path.exists():
        return
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        with contextlib.suppress(ValueError):
            yield json.loads(line)
