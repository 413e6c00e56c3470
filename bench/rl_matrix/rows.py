"""The learning matrix's rows: what is kept of each run, as JSON lines for the report; and lines for people."""

import json
import statistics
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from bench.report import format_table, number
from bench.rl_matrix.jobs import JOB_FILE, MatrixJob
from bench.rl_matrix.run import ABOUT_FILE
from octavo.rl.history import StepRow
from octavo.run.atomic import write_atomic
from octavo.run.metrics import METRICS_FILE, read_metrics

HELDOUT, REWARD = "eval/reward", "reward/mean"
DIFF_MEAN, DIFF_MAX = "mismatch/logprob_abs_diff_mean", "mismatch/logprob_abs_diff_max"
K3, CLIPPED, FLUSHED = "rollout_corr/k3_kl", "kv/clipped_share_max", "kv/flushed_share_max"
KEPT = (
    "step",
    "seconds",
    "loss",
    "grad_norm",
    HELDOUT,
    REWARD,
    "reward/informative_share",
    "response_length/mean",
    "actor/entropy",
    DIFF_MEAN,
    DIFF_MAX,
    K3,
    "mismatch/tokens_differing_share",
    "mismatch/eff_sample_size",
    "rollout_corr/rollout_is_max",
    "rollout_corr/rollout_is_oob_ratio",
    CLIPPED,
    FLUSHED,
    "kv/num_bf16_layers",
    "router/idle_experts_share",
    "timing_s/gen",
    "timing_s/update_actor",
    "timing_s/refit",
)
Row = dict[str, Any]


def collect(work: Path, target: Path, tag: str = "") -> None:
    """All jobs' rows in one file: a "start", the "step" rows, and an "end" where there is one.

    Args:
        work: folder of the jobs, those of earlier commands included.
        tag: of the runs that count.
    """
    jobs = [MatrixJob.load(path) for path in sorted(work.glob(f"*/{JOB_FILE}"))]
    chosen = [job for job in jobs if job.is_start or job.tag == tag]
    lines = [json.dumps({"run": job.name, **row}) for job in chosen for row in _rows(job)]
    write_atomic(target, "".join(f"{line}\n" for line in lines))


def _rows(job: MatrixJob) -> list[Row]:
    about = job.folder / ABOUT_FILE
    if not about.is_file():
        return []
    rows: list[Row] = [{"kind": "start", **json.loads(about.read_text())}]
    rows += [{"kind": "step", **_thinned(row)} for row in read_metrics(job.folder / METRICS_FILE, StepRow)]
    if job.end_file.is_file():
        rows.append({"kind": "end", **json.loads(job.end_file.read_text())})
    return rows


def _thinned(row: StepRow) -> Row:
    flat = row.as_dict()
    return {key: float(f"{flat[key]:.6g}") for key in KEPT if key in flat}


def progress_of(jobs: Iterable[MatrixJob]) -> str:
    """The last step of every run under way."""
    parts = []
    for job in jobs:
        rows = read_metrics(job.folder / METRICS_FILE, StepRow)
        if rows:
            parts.append(f"{job.name} {rows[-1].step}: {rows[-1][REWARD]:.3f} ({rows[-1].seconds:.0f} s)")
    return "; ".join(parts) or "starting"


def format_summary(jobs: Sequence[MatrixJob]) -> str:
    """For people: a line a job."""
    lines = []
    for job in jobs:
        end = json.loads(job.end_file.read_text()) if job.end_file.is_file() else {}
        rows = read_metrics(job.folder / METRICS_FILE, StepRow)
        if job.is_start and end:
            lines.append((job.name, str(end["steps"]), "", number(end["accuracy"], ".3f"), *[""] * 5))
        elif rows and not job.is_start:
            scores = [row[HELDOUT] for row in rows if HELDOUT in row.metrics]
            reward, diff = (statistics.fmean(row[key] for row in rows[-10:]) for key in (REWARD, DIFF_MEAN))
            largest, seconds = max(row[DIFF_MAX] for row in rows), rows[-1].seconds / rows[-1].step
            known = (number(end.get("accuracy_before"), ".3f"), number(scores[-1] if scores else None, ".3f"))
            now = (f"{reward:.3f}", f"{diff:.2e}", f"{largest:.2e}", f"{seconds:.2f}", end.get("error", ""))
            lines.append((job.name, str(rows[-1].step), *known, *now))
    headings = ("job", "steps", "before", "after", "reward", "mean diff", "largest", "s a step", "")
    return format_table(headings, lines)
