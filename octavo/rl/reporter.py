"""What a run leaves for people beside its metrics: config, transcripts, passed limits, W&B, report.html at the end."""

import json
from importlib import import_module
from typing import Any, Self

import torch

from octavo.errors import ConfigError
from octavo.models.tokenizer import Tokenizer
from octavo.rl.config import RLConfig
from octavo.rl.health import Alert
from octavo.rl.history import CONFIG_FILE, HEALTH_FILE, StepRow, append_lines
from octavo.rl.report import REPORT_FILE, write_report
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.transcripts import TRANSCRIPTS_FILE, append_transcripts, choose_transcripts
from octavo.run.metrics import METRICS_FILE
from octavo.run.write_failures import WriteFailures

REPORTER_FILES = (CONFIG_FILE, HEALTH_FILE, TRANSCRIPTS_FILE, REPORT_FILE)
_WANDB = "W&B's log"


class RunReporter:
    """Writes beside a MetricsWriter that is closed after it; to be used in a with statement.

    Args:
        config: all of the run's; its [run] says what is written, and where.
        failures: where writes that fail are counted; they raise nothing.
        writes: False writes nothing: another rank does.
    Raises:
        ConfigError: W&B was asked for and is not installed.
    """

    def __init__(self, config: RLConfig, failures: WriteFailures | None = None, *, writes: bool = True) -> None:
        run, self._writes, self._wandb = config.run, writes, None
        self._directory, self._every, self._writes_report = run.dir, run.transcripts_every, run.report
        self._failures = failures or WriteFailures()
        if not writes:
            return
        plain = config.model_dump(mode="json")
        with self._failures.caught(CONFIG_FILE):
            run.dir.mkdir(parents=True, exist_ok=True)
            (run.dir / CONFIG_FILE).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")
        if run.wandb:
            wandb = require_wandb(run.wandb)
            with self._failures.caught(_WANDB):
                self._wandb = wandb.init(project=run.wandb, name=run.dir.name, dir=str(run.dir), config=plain)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _: object, error: BaseException | None, __: object) -> None:
        if self._wandb is not None:
            with self._failures.caught(_WANDB):
                self._wandb.finish(exit_code=0 if error is None else 1)
        if not self._writes:
            return
        metrics = self._directory / METRICS_FILE
        with self._failures.caught(REPORT_FILE):
            if self._writes_report and metrics.exists() and metrics.stat().st_size:
                write_report(self._directory)

    def write(self, row: StepRow, alerts: tuple[Alert, ...] = ()) -> None:
        """Log a step, and what was beyond its limit in it."""
        if alerts and self._writes:
            with self._failures.caught(HEALTH_FILE):
                append_lines(self._directory / HEALTH_FILE, (alert.as_dict() for alert in alerts))
        if self._wandb is not None:
            with self._failures.caught(_WANDB):
                self._wandb.log({key: value for key, value in row.as_dict().items() if key != "step"}, step=row.step)

    def keep_transcripts(
        self,
        step: int,
        rollouts: Rollouts,
        trainer_logprobs: torch.Tensor,
        tokenizer: Tokenizer,
        *,
        is_last: bool = False,
    ) -> None:
        """Write a few of a step's responses, where it is one of those that are asked for.

        Args:
            trainer_logprobs: [tokens] fp32, as in rollouts.rollout_logprobs.
        """
        if self._writes and self._every and (is_last or step == 1 or step % self._every == 0):
            with self._failures.caught(TRANSCRIPTS_FILE):
                chosen = choose_transcripts(step, rollouts, trainer_logprobs, tokenizer)
                append_transcripts(self._directory / TRANSCRIPTS_FILE, chosen)


def require_wandb(project: str) -> Any:
    """The wandb module, before any work is done for a run that asks for it.

    Raises:
        ConfigError: it is not installed.
    """
    try:
        return import_module("wandb")
    except ImportError:
        raise ConfigError(
            f"run.wandb = {project!r} needs the wandb package, which is not installed; pip install wandb, or leave "
            "run.wandb empty: metrics.jsonl and TensorBoard have the same numbers"
        ) from None
