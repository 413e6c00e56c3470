"""The numbers of one rollout step, and the files of a run that they are read from again."""

import dataclasses
import json
from pathlib import Path
from typing import Any

from octavo.train.metrics import Row

CONFIG_FILE = "config.json"
HEALTH_FILE = "health.jsonl"
_ROW_FIELDS = tuple(field.name for field in dataclasses.fields(Row))


@dataclasses.dataclass(frozen=True)
class StepRow(Row):
    """One rollout step: the fields of a training row (loss, lr, ...) and every metric by its name.

    Attributes:
        metrics: names as in octavo.rl.metrics, with "eval/accuracy" where the step was followed by an evaluation.
    """

    metrics: dict[str, float] = dataclasses.field(default_factory=dict)

    def __getitem__(self, name: str) -> float:
        return self.metrics[name]

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as one flat dict."""
        flat = super().as_dict()
        return {**{key: value for key, value in flat.items() if key != "metrics"}, **self.metrics}

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> "StepRow":
        """as_dict's inverse."""
        fields = {key: value for key, value in flat.items() if key in _ROW_FIELDS}
        return cls(**fields, metrics={key: value for key, value in flat.items() if key not in _ROW_FIELDS})

    @property
    def summary(self) -> str:
        """One line for a person."""
        m = self.metrics
        text = (
            f"reward {m['reward/mean']:.3f}  length {m['response_length/mean']:.1f}  "
            f"entropy {m['actor/entropy']:.2f}  mismatch KL {m['rollout_corr/k3_kl']:.1e}  "
            f"max |delta logprob| {m['mismatch/logprob_abs_diff_max']:.1e}"
        )
        return text + (f"  held-out {m['eval/accuracy']:.3f}" if "eval/accuracy" in m else "")


def read_steps(path: Path) -> list[StepRow]:
    """The rows of a run's metrics.jsonl, up to the first line that a kill cut short; none where there is no file."""
    rows: list[StepRow] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(StepRow.from_dict(json.loads(line)))
        except (ValueError, TypeError):
            break
    return rows


def read_findings(path: Path) -> list[dict[str, Any]]:
    """The lines of a run's health.jsonl; none where there is no file."""
    if not path.exists():
        return []
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines() if line.endswith("}")]
