"""The table of a run's last steps: what a person watches, in columns; terminal, plain lines and report share it."""

import math
from collections.abc import Mapping, Sequence

from rich.table import Table

from octavo.report.axes import number
from octavo.rl.history import StepRow
from octavo.rl.phases import JOULES, SECONDS

PREEMPTIONS = "engine/num_preemptions"  # counted since the engine's start
_COLUMNS = (
    ("reward", "reward/mean", ".3f"),
    ("length", "response_length/mean", ".1f"),
    ("entropy", "actor/entropy", ".3f"),
    ("KL (k3)", "rollout_corr/k3_kl", ".1e"),
    ("ESS", "rollout_corr/rollout_is_eff_sample_size", ".3f"),
    ("preempt.", PREEMPTIONS, ".0f"),
    ("tokens/s", "perf/tokens_per_s", ",.0f"),
)
# of a run's first and last step beside each other: label, metric, how it is written
SUMMARY = (
    ("mean reward (sampled)", "reward/mean", ".3f"),
    ("entropy, nats a token", "actor/entropy", ".3f"),
    ("response length", "response_length/mean", ".1f"),
    ("max |delta logprob|", "mismatch/logprob_abs_diff_max", ".2e"),
    ("mismatch KL (k3)", "rollout_corr/k3_kl", ".2e"),
)
_PHASE_NAMES = {"gen": "sample", "old_log_prob": "score", "update_actor": "learn"}


def phases_of(metrics: Mapping[str, float]) -> list[str]:
    """The phases that a step measured, in their order, without the whole."""
    names = [key.removeprefix(SECONDS) for key in metrics if key.startswith(SECONDS)]
    return [name for name in names if name != "step"]


def headers(phases: Sequence[str]) -> list[str]:
    """Titles of the columns; phases are those of the run's first step."""
    return ["step", *(title for title, *_ in _COLUMNS), *(_PHASE_NAMES.get(phase, phase) for phase in phases)]


def cells(row: StepRow, before: StepRow | None, phases: Sequence[str]) -> list[str]:
    """A step as texts under headers(phases), of a phase "1.2 s 340 J"; what it did not measure is empty.

    Args:
        before: the step before it, for what is counted since the start; None for the first.
    """
    found = [str(row.step)]
    for _, key, form in _COLUMNS:
        value = preemptions(row, before) if key == PREEMPTIONS else row.metrics.get(key)
        found.append("" if value is None else number(value, form))
    for phase in phases:
        seconds, joules = row.metrics.get(SECONDS + phase), row.metrics.get(JOULES + phase)
        energy = "" if joules is None else f" {joules:,.0f} J"
        found.append("" if seconds is None or not math.isfinite(seconds) else f"{seconds:.3g} s{energy}")
    return found


def preemptions(row: StepRow, before: StepRow | None) -> float | None:
    """Preemptions in this step alone; None where the engine does not tell."""
    count = row.metrics.get(PREEMPTIONS)
    if count is None:
        return None
    earlier = 0.0 if before is None else before.metrics.get(PREEMPTIONS, 0.0)
    return count - earlier if count >= earlier else count  # a new engine counts from 0


def make_table(rows: Sequence[StepRow], before: StepRow | None = None) -> Table:
    """The rows as a terminal table; `before` is the step before the first of them."""
    phases = phases_of(rows[0].metrics) if rows else []
    table = Table(box=None, pad_edge=False, header_style="bold")
    for title in headers(phases):
        table.add_column(title, justify="right", no_wrap=True)
    for row in rows:
        style = "yellow" if row.metrics.get("health/num_findings", 0.0) > 0 else None
        table.add_row(*cells(row, before, phases), style=style)
        before = row
    return table
