"""What a run leaves for people beside its metrics: config, transcripts, passed limits, W&B, MLflow, report.html."""

import json
from collections.abc import Sequence
from typing import Self

import torch

from octavo.models.tokenizer import Tokenizer
from octavo.rl.config import RLConfig
from octavo.rl.health import Alert
from octavo.rl.history import CONFIG_FILE, HEALTH_FILE, StepRow, append_lines
from octavo.rl.report import REPORT_FILE, write_report
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.transcripts import TRANSCRIPTS_FILE, append_transcripts, choose_transcripts
from octavo.run.metrics import METRICS_FILE
from octavo.run.sinks import SINKS_FILE, Sinks
from octavo.run.write_failures import WriteFailures

REPORTER_FILES = (CONFIG_FILE, HEALTH_FILE, TRANSCRIPTS_FILE, REPORT_FILE, SINKS_FILE)


class RunReporter:
    """Writes beside a MetricsWriter that is closed after it; to be used in a with statement.

    Args:
        config: all of the run's; its [run] says what is written, and where.
        failures: where writes that fail are counted; they raise nothing.
        done_steps: the step that the run resumes after.
        earlier: its rows up to there.
        writes: False writes nothing: another rank does.
    """

    def __init__(
        self,
        config: RLConfig,
        failures: WriteFailures | None = None,
        done_steps: int = 0,
        earlier: Sequence[StepRow] = (),
        *,
        writes: bool = True,
    ) -> None:
        run, self._writes = config.run, writes
        self._directory, self._every, self._writes_report = run.dir, run.transcripts_every, run.report
        self._failures = failures or WriteFailures()
        plain = config.model_dump(mode="json")
        self._sinks = Sinks(
            run.dir,
            done_steps,
            [row.as_dict() for row in earlier],
            wandb=run.wandb,
            mlflow=run.mlflow,
            config=plain,
            failures=self._failures,
            writes=writes,
        )
        if not writes:
            return
        with self._failures.caught(CONFIG_FILE):
            run.dir.mkdir(parents=True, exist_ok=True)
            (run.dir / CONFIG_FILE).write_text(json.dumps(plain, indent=2) + "\n", encoding="utf-8")

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: object, error: BaseException | None, trace: object) -> None:
        self._sinks.__exit__(kind, error, trace)
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
        self._sinks.write(row.as_dict())

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
