"""report.html of a reinforcement-learning run: curves, passed limits, transcripts; made of the run's own files.

`octavo rl` writes it at the end of a run; `octavo rl config.toml --report` at any time, also while one goes on.
"""

import json
import math
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from octavo.errors import DataError
from octavo.report.axes import number
from octavo.report.charts import SMALL, Series, line_chart, smooth
from octavo.report.page import Section, figure, folded, over_steps, paragraph, plots, render, table
from octavo.rl.history import CONFIG_FILE, HEALTH_FILE, StepRow, read_alerts
from octavo.rl.phases import JOULES, SECONDS
from octavo.rl.report_transcripts import TRANSCRIPT_CSS, render_transcripts
from octavo.rl.step_table import PREEMPTIONS, SUMMARY, cells, headers, phases_of, preemptions
from octavo.rl.transcripts import TRANSCRIPTS_FILE, Transcript, read_transcripts
from octavo.run.metrics import METRICS_FILE, read_metrics

REPORT_FILE = "report.html"
_SMOOTHED_SHARE = 20
_ROWS_SHOWN = 20

# title, metrics with their names in the legend, whether y is logarithmic, what to look for
_CURVES: tuple[tuple[str, tuple[tuple[str, str], ...], bool, str], ...] = (
    ("reward", (("reward/mean", "mean"),), False, "Mean reward of each step's rollouts."),
    (
        "held-out reward",
        (("eval/reward", "held-out"),),
        False,
        "Mean over held-out prompts, by one bf16 greedy engine, whatever the run's own.",
    ),
    ("response length", (("response_length/mean", "mean"), ("response_length/max", "longest")), False, "In tokens."),
    ("entropy", (("actor/entropy", "entropy"),), False, "Nats a token. A fall to 0 is a policy that explores no more."),
    (
        "mismatch KL",
        (("rollout_corr/k3_kl", "k3"), ("mismatch/logprob_abs_diff_max", "max |delta logprob|")),
        True,
        "Between sampler and trainer. Exact runs lie on 0; in others look for growth. octavo doctor mismatch says what "
        "it comes from.",
    ),
    (
        "effective sample size",
        (("rollout_corr/rollout_is_eff_sample_size", "clamped weights"), ("mismatch/eff_sample_size", "raw weights")),
        False,
        "As a share of the tokens; 1 where both sides agree.",
    ),
    ("tokens a second", (("perf/tokens_per_s", "tokens/s"),), False, "Over whole steps."),
)


def write_report(directory: Path) -> Path:
    """Write the page of the run in a directory.

    Returns:
        Its path, directory/report.html.
    Raises:
        DataError: no run has written a step there yet.
    """
    rows = read_metrics(directory / METRICS_FILE, StepRow)
    if not rows:
        raise DataError(
            f"{directory / METRICS_FILE} has no steps yet: there is nothing to report; give a run's run.dir"
        )
    config = directory / CONFIG_FILE
    text = render_report(
        directory.name,
        rows,
        read_transcripts(directory / TRANSCRIPTS_FILE),
        read_alerts(directory / HEALTH_FILE),
        json.loads(config.read_text(encoding="utf-8")) if config.exists() else {},
    )
    path = directory / REPORT_FILE
    path.write_text(text, encoding="utf-8")
    return path


def render_report(
    name: str,
    rows: Sequence[StepRow],
    transcripts: Sequence[Transcript],
    alerts: Sequence[dict[str, Any]],
    config: dict[str, Any],
) -> str:
    """The page as HTML that refers to nothing outside of it.

    Args:
        rows: a run's steps, at least one.
        alerts: as octavo.rl.health.Alert.as_dict gives them.
        config: the run's, as plain values.
    """
    none = paragraph("None.")
    passed = [(alert["step"], alert["action"], alert["text"]) for alert in alerts[-200:]]
    sections = [
        Section("curves", "Curves", _curves(rows)),
        Section("phases", "Time and energy", _phases(rows)),
        Section("health", "Limits that were passed", table(["step", "action", "what"], passed) if passed else none),
        Section("transcripts", "Transcripts", render_transcripts(transcripts) if transcripts else none),
        Section("steps", "Last steps", _steps(rows)),
        Section("config", "Configuration", folded("show", json.dumps(config, indent=2))),
    ]
    return render(f"octavo rl: {name}", _lead(rows), sections, TRANSCRIPT_CSS)


def _lead(rows: Sequence[StepRow]) -> str:
    first, last = rows[0], rows[-1]
    lines = [
        (label, number(first[key], form), number(last[key], form))
        for label, key, form in SUMMARY
        if key in first.metrics and key in last.metrics
    ]
    held_out = [row.metrics["eval/reward"] for row in rows if "eval/reward" in row.metrics]
    text = f"{len(rows)} steps up to step {last.step}, {last.seconds:,.0f} s."
    text += f" Held-out reward at the last evaluation: {held_out[-1]:.3f}." if held_out else ""
    worst = max((row.metrics.get("mismatch/logprob_abs_diff_max", math.nan) for row in rows), default=math.nan)
    text += " Trainer and sampler were equal in bits at every step." if worst == 0.0 else ""
    return paragraph(text) + table(["", f"step {first.step}", f"step {last.step}"], lines)


Reader = Callable[[StepRow], float | None]


def _metric(key: str) -> Reader:
    return lambda row: row.metrics.get(key)


def _curves(rows: Sequence[StepRow]) -> str:
    drawn = (
        _chart(title, [(label, _metric(key)) for key, label in series], rows, log_y, caption)
        for title, series, log_y, caption in _CURVES
    )
    return plots([pair for pairs in drawn for pair in pairs])


def _phases(rows: Sequence[StepRow]) -> str:
    phases = phases_of(rows[0].metrics)
    charts: list[tuple[str, str]] = []
    for prefix, title, caption in (
        (SECONDS, "seconds of each phase", "Wall clock."),
        (JOULES, "joules of each phase", "By the GPU's own counter."),
    ):
        series = [(phase, _metric(prefix + phase)) for phase in phases]
        charts += _chart(title, series, rows, False, caption)
    before = {id(row): earlier for earlier, row in zip([None, *rows[:-1]], rows, strict=True)}
    if any(PREEMPTIONS in row.metrics for row in rows):

        def each(row: StepRow) -> float | None:
            return preemptions(row, before[id(row)])

        caption = "Sequences that lost their pages, a step."
        charts += _chart("preemptions", [("preemptions", each)], rows, False, caption)
    absent = "" if any(key.startswith(JOULES) for key in rows[0].metrics) else "Energy was not measured. "
    return (paragraph(absent) if absent else "") + plots(charts)


def _chart(
    title: str,
    series: Sequence[tuple[str, Reader]],
    rows: Sequence[StepRow],
    log_y: bool,
    caption: str,
) -> list[tuple[str, str]]:
    """One figure and its heading before it; none where nothing of it was measured."""
    lines: list[Series] = []
    window, is_smoothed = max(1, len(rows) // _SMOOTHED_SHARE), False
    for label, read in series:
        measured = ((float(row.step), read(row)) for row in rows)
        points = [(step, value) for step, value in measured if value is not None and math.isfinite(value)]
        is_sparse = len(points) < len(rows) / 2
        if points:
            if not (log_y or is_sparse):
                points, is_smoothed = smooth(points, window), True
            lines.append(Series(label, points, dashed=bool(lines), dots=is_sparse))
    if not lines:
        return []
    axes: dict[str, Any] = {"log_y": log_y, "from_zero": not log_y, "x_range": (rows[0].step, rows[-1].step)}
    svg = line_chart(lines, title=title, x_label="step", y_label="", size=SMALL, **axes)
    text = f"{caption} {over_steps(window).capitalize()}." if is_smoothed else caption
    return [(title, figure(svg, text))]


def _steps(rows: Sequence[StepRow]) -> str:
    phases = phases_of(rows[0].metrics)
    pairs = list(zip([None, *rows[:-1]], rows, strict=True))[-_ROWS_SHOWN:]
    return table(headers(phases), [cells(row, before, phases) for before, row in pairs])
