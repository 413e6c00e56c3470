"""The numbers of one rollout step, and where they go: octavo.train's writer, so JSONL and TensorBoard alike."""

import dataclasses
from typing import Any

from octavo.train.metrics import Row


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
