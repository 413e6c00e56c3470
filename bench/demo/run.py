"""One demo run, stage by stage: train, compare, sample, reinforce, report."""

import shutil
from pathlib import Path

import torch
from rich.console import Console
from rich.table import Table

from bench.demo.budget import Budget, check_seconds
from bench.demo.compare import compare
from bench.demo.display import Display
from bench.demo.machine import machine_facts
from bench.demo.pretrain import VARIANTS, pretrain
from bench.demo.reinforce import reinforce, warm_up_policy
from bench.demo.report import headline_rows, write_report
from bench.demo.results import DemoResults
from bench.demo.sampling import sample
from bench.demo.sizes import sizes_for
from bench.demo.start import prepare_start
from bench.demo.workers import Workers, one_thread
from octavo.errors import ConfigError
from octavo.models.checkpoint.storage import check_writable

REPORT, FORMER_REPORT = "report.html", "report-previous.html"
_MARKER = ".octavo-demo"

# Stage -> its share of the time, in order.
SHARES = {
    "text": 0.05,
    "train": 0.5,
    "compare": 0.05,
    "sample": 0.05,
    "warm start": 0.06,
    "reinforce": 0.28,
    "report": 0.01,
}
_AIM = 0.88  # stages are planned into this share of the seconds: steps are estimated, not known


def run_demo(seconds: float, out: Path, seed: int, *, console: Console | None = None) -> Path:
    """Run the demo.

    Args:
        seconds: what all of it may take, at least 20.
        out: directory for checkpoints, metrics and the report; an earlier demo there is replaced.
        seed: of weights, data order and sampling.
    Returns:
        The report's path.
    Raises:
        ConfigError: too few seconds, or `out` holds something else.
        ExactnessError: exact mode was not exact. Any other error of a variant, with the variant's name.
    """
    check_seconds(seconds)
    budget = Budget(seconds * _AIM, SHARES)
    display = Display(console)
    device = "cuda" if torch.cuda.is_available() else "cpu"
    sizes = sizes_for(device).within(seconds)
    make_directory(out)
    display.say(f"this takes about {seconds:.0f} s, more where the cores are busy; the report comes at the end")
    with Workers(len(VARIANTS) if sizes.parallel else 0) as workers, one_thread(sizes.parallel):
        display.stage(1, 5, "Read Python's own sources, train a tokenizer")
        with budget.stage("text"), display.working("reading and tokenizing"):
            base, text = prepare_start(sizes, out, seed, device)
        display.say(f"{len(text.train):,} training tokens, {len(text.validation):,} for validation")
        display.stage(2, 5, "Train the same model in bf16 and in FP8")
        with budget.stage("train") as allowed_s:
            pretraining = pretrain(base, text, out, allowed_s, workers, display)
        display.stage(3, 5, "Export in FP8, compare, sample with the FP8 KV cache")
        with budget.stage("compare"):
            comparison = compare(pretraining, text, out, device, display)
        with budget.stage("sample"):
            sampling = sample(pretraining, comparison, text.tokenizer, device, seed, display)
        display.stage(
            4, 5, "Reinforce: exact FP8; a bf16 trainer with FP8 rollouts, corrected by importance weights (TIS)"
        )
        with budget.stage("warm start"):
            rl_base, num_warmup_steps, warmup_s = warm_up_policy(sizes, out, seed, device, workers, display)
        with budget.stage("reinforce") as allowed_s:
            reinforcement = reinforce(rl_base, num_warmup_steps, warmup_s, out, allowed_s, workers, display)
    display.stage(5, 5, "Write the report")
    results = DemoResults(
        pretraining=pretraining,
        comparison=comparison,
        sampling=sampling,
        reinforcement=reinforcement,
        seconds_asked=seconds,
        seed=seed,
        machine=machine_facts(device),
        stage_seconds=dict(budget.spent),
    )
    write_report(results, out / REPORT)
    _print_summary(results, out / REPORT, budget.elapsed, display)
    return out / REPORT


def make_directory(out: Path) -> None:
    """An empty directory but for an earlier demo's tokens and report; refuses one that holds anything else."""
    if out.exists() and not out.is_dir():
        raise ConfigError(f"--out {out} is a file; give a directory")
    if out.exists() and any(out.iterdir()) and not (out / _MARKER).exists():
        raise ConfigError(f"--out {out} holds files that no demo wrote; give an empty or a new directory")
    check_writable(out, "--out")
    for name in ("start", "pretrain", "rl", "export-fp8", "one", "ranks", "rl-one", "rl-ranks"):
        shutil.rmtree(out / name, ignore_errors=True)
    if (out / REPORT).exists():
        (out / REPORT).replace(out / FORMER_REPORT)
    out.mkdir(parents=True, exist_ok=True)
    (out / _MARKER).touch()


def _print_summary(results: DemoResults, report: Path, elapsed_s: float, display: Display) -> None:
    table = Table(title="octavo demo", title_justify="left", show_header=False)
    for name, value in headline_rows(results):
        table.add_row(name, value)
    stages = ", ".join(f"{name} {seconds:.0f}" for name, seconds in results.stage_seconds.items())
    table.add_row("seconds", f"{elapsed_s:.0f} ({stages})")
    display.console.print()
    display.console.print(table)
    display.console.print(f"report: {report.resolve()}", markup=False, highlight=False, soft_wrap=True)
