"""The trainer: a run's steps one after the other, with evaluations, metrics and checkpoints between them.

Who does what in a step: RolloutWorker samples and scores, Learner learns, Evaluator evaluates, Trainer keeps the order.
"""

import contextlib
import dataclasses
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import torch

from octavo.deprecation import former_attribute
from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.errors import StorageError
from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl import checkpoint
from octavo.rl.advantage import advantages_of
from octavo.rl.config import RLConfig
from octavo.rl.history import StepRow
from octavo.rl.last_step import LastStep
from octavo.rl.learner import Learner, Update
from octavo.rl.metrics import reward_metrics
from octavo.rl.phases import PhaseMeter
from octavo.rl.policy import build_evaluator, build_reference
from octavo.rl.progress import RLProgress
from octavo.rl.ranks import Ranks, share_policy
from octavo.rl.reporter import REPORTER_FILES, RunReporter
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.rollout_worker import RolloutWorker
from octavo.rl.tasks import Task
from octavo.rl.warmup import WarmupStep
from octavo.run.checkpoint_store import Checkpoint
from octavo.run.energy import energy_counter
from octavo.run.metrics import METRICS_FILE, MetricsWriter
from octavo.run.start_over import start_over
from octavo.run.stopping import raise_on_signals, stop_on_signals
from octavo.run.tensorboard import TENSORBOARD_DIR

_FINAL = "final"  # the checkpoint at the end
_EQUAL_REMINDER = 10  # steps in a row without anything to learn, after which it is said again


@dataclasses.dataclass(frozen=True)
class RLResult:
    """What a run leaves behind.

    Attributes:
        model: the trained policy, in the trainer's numerics.
        tokenizer: its tokenizer.
        history: one row a step, those before a resume included.
        warmup: the warm start's steps, empty where there was none.
        heldout_reward_before: mean reward over held-out prompts by the bf16 greedy engine, before the history.
        heldout_reward_after: the same, after it.
        last_rollouts: of the last step, to look at.
        checkpoint: where the policy was saved, or None.
        stopped_by: the signal that ended the run early, or None.
        first_step: steps that were done before this call.
    """

    model: Decoder
    tokenizer: Tokenizer
    history: list[StepRow]
    warmup: list[WarmupStep]
    heldout_reward_before: float
    heldout_reward_after: float
    last_rollouts: Rollouts
    checkpoint: Path | None
    stopped_by: str | None = None
    first_step: int = 0

    accuracy_before = former_attribute("RLResult", "accuracy_before", "heldout_reward_before")
    accuracy_after = former_attribute("RLResult", "accuracy_after", "heldout_reward_after")


class Trainer:
    """Makes a run of its parts.

    Args:
        model: the policy; trained in place, and sharded in place where there are several ranks.
        heldout: the evaluation's prompts.
        mesh: of the ranks, each of which has a Trainer over the same; the first one writes.

    Attributes:
        history: a row a step, those before a resume included.
        last_rollouts: of the last step; unset before the first.
        last_update: of the last step; unset before the first.
    """

    last_rollouts: Rollouts
    last_update: Update

    def __init__(
        self,
        config: RLConfig,
        model: Decoder,
        tokenizer: Tokenizer,
        task: Task,
        heldout: list[str],
        progress: RLProgress,
        mesh: Mesh = ONE_PROCESS,
    ) -> None:
        self.config, self.model, self.tokenizer, self.progress = config, model, tokenizer, progress
        self.heldout, self.mesh, self._dtype = heldout, mesh, model.dtype
        share_policy(mesh, model)
        model.set_numerics(config.trainer_numerics)
        reference, ranks = build_reference(config, model), None
        if mesh.world_size > 1:
            ranks = Ranks.shard(config, mesh, model, reference)
            progress.say(f"sharded over {mesh.world_size} ranks: {ranks.report.summary}")
        self.worker = RolloutWorker(config, model, tokenizer, task, progress, ranks)
        self.learner = Learner(model, config, reference, mesh)
        self.evaluator = build_evaluator(config, model, tokenizer, task, ranks, self.worker.sampler)
        self.history: list[StepRow] = []
        self._last_step = LastStep(self.worker, self.learner)
        self._saved_step = 0
        self._num_equal_steps = 0  # in a row
        self._joules, _ = energy_counter(model.device)

    def close(self) -> None:
        """Stop sampling, and let go of the engine."""
        self.worker.close()

    def run(
        self, on_step: Callable[[StepRow], None], warmup: list[WarmupStep], found: Checkpoint | None = None
    ) -> RLResult:
        """All steps, or those after a checkpoint; see octavo.rl.loop.run."""
        config, failures, writes = self.config, self.progress.failures, self.mesh.is_first
        with raise_on_signals():
            start = self._begin() if found is None else self._resume(found)
        self._start, self._heldout_reward = start, start.heldout_reward
        self.worker.start(start.step + 1)
        self.progress.begin("reinforce", config.trainer.steps)
        self._began = time.monotonic() - start.seconds
        with (
            stop_on_signals() as stop,
            MetricsWriter(
                config.run.dir, start.step, config.run.tensorboard, StepRow, failures, writes=writes
            ) as writer,
            RunReporter(config, failures, start.step, writer.rows, writes=writes) as reporter,
            self._saved_on_errors(writer),
        ):
            self.history = list(writer.rows)
            for row in self.history:  # what limits with patience remember
                self.learner.health.check(row.step, row.metrics)
            for step in range(start.step + 1, config.trainer.steps + 1):
                metrics = self.step(step)
                self._note_step(step, metrics)
                is_last = step == config.trainer.steps or self._is_out_of_time()
                if is_last or (config.eval.every and step % config.eval.every == 0):
                    self.mesh.at(f"step {step}: evaluation")
                    self._heldout_reward = metrics["eval/reward"] = self.evaluator.mean_reward(self.heldout)
                row = self._record(step, metrics, writer, reporter, is_last=is_last)
                is_saved = self._is_checkpoint_due(step, is_last=is_last)
                if is_saved:
                    self._save_checkpoint(row, writer)
                with failures.caught("progress"):
                    self.progress.show_step(row)
                on_step(row)
                self.last_update.health.raise_if_stopped()
                reasons = [reason for reason in self.mesh.gather_objects(stop.reason) if reason is not None]
                if reasons and not is_last:
                    if not is_saved:
                        self._save_checkpoint(row, writer)
                    return self._result(warmup, checkpoint.path_of(config, step) / "model", stopped_by=reasons[0])
                if is_last:
                    break
        self.progress.end()
        self.progress.say(f"held-out reward after: {self._heldout_reward:.3f}")
        return self._result(warmup, self._save_policy())

    def step(self, step: int) -> dict[str, float]:
        """One step: sample (or take what was sampled ahead), score, learn, publish.

        Returns:
            Its metrics.
        """
        meter = PhaseMeter(self._joules)
        self.mesh.at(f"step {step}: sampling")
        rollouts, ahead = self.worker.take(step)
        advantages = advantages_of(rollouts, self.config)
        policy_lag = self.model.weight_version - rollouts.weight_versions
        equal_share = self._equal_groups_share(rollouts, advantages, step)
        meter.end("gen")
        update = self.learner.learn(rollouts, advantages, step)
        meter.end("update_actor")
        self.mesh.at(f"step {step}: refit")
        report, kv_metrics = self.worker.finish_step(rollouts)
        meter.end("refit")
        self.last_rollouts, self.last_update = rollouts, update
        return {
            **reward_metrics(rollouts.rewards, advantages, rollouts.response_lens, rollouts.rollout_logprobs),
            **update.metrics,
            **kv_metrics,
            **ahead,
            "reward/equal_groups_share": equal_share,
            "response/finished_share": float(rollouts.is_finished.float().mean()),
            "mismatch/policy_lag_max": float(policy_lag.max()),
            "rollout/num_gen_batches": float(self.worker.take_num_gen_batches(step)),
            "refit/weight_version": float(report.weight_version),
            "refit/bytes": float(report.num_bytes),
            **{f"engine/{name}": value for name, value in self.worker.engine.stats().items()},
            **meter.metrics(),
            "perf/tokens_per_s": sum(map(len, rollouts.sequences)) / meter.seconds,
        }

    def _begin(self) -> checkpoint.Progress:
        """A new run: the first weights and evaluation; an earlier run's files are moved aside."""
        run = self.config.run
        self.worker.calibrate_first()  # a remote engine gets the scales with the first weights
        self.worker.publish()
        before = self.evaluator.mean_reward(self.heldout)
        num_prompts = len(self.heldout)
        which = "" if num_prompts == self.config.eval.num_prompts else ": all that the held-out set has"
        self.progress.say(f"held-out reward before: {before:.3f} ({num_prompts} prompts{which}; bf16, greedy)")
        aside = None
        if self.mesh.is_first:
            aside = start_over(
                run.dir, (METRICS_FILE, TENSORBOARD_DIR, _FINAL, checkpoint.CHECKPOINTS, *REPORTER_FILES)
            )
        self.mesh.barrier()
        if aside is not None:
            self.progress.say(f"note: the earlier run in {run.dir} was moved to {aside}; this one starts from step 1")
        num_requests = self.worker.engine.num_requests
        return checkpoint.Progress(0, 0, num_requests, self.model.weight_version, before, before, 0.0)

    def _resume(self, found: Checkpoint) -> checkpoint.Progress:
        """The run as it was when the checkpoint was written."""
        start, notes = checkpoint.load(found, self.config, self._parts())
        self.learner.num_updates = start.num_updates
        table, engine = self.worker.kv_scales.table, self.worker.engine
        if table is not None and table.source == "trainer":
            checkpoint.load_kv_table(found, table)  # a remote engine gets them with the weights
        self.worker.publish()
        if table is not None:
            checkpoint.load_kv_table(found, table)
            if table.high_precision:
                engine.reallocate()
        if start.num_requests is not None and engine.num_requests is not None:
            engine.num_requests = start.num_requests
        for note in notes:
            self.progress.say(f"note: {note}")
        self.progress.say(f"going on from {found.path}, after step {start.step}")
        return start

    def _equal_groups_share(self, rollouts: Rollouts, advantages: torch.Tensor, step: int) -> float:
        """The share of groups that teach nothing; a person is told where it is all of them."""
        num_equal, num_groups = rollouts.count_equal_groups(advantages)
        self._num_equal_steps = self._num_equal_steps + 1 if num_equal == num_groups else 0
        if self._num_equal_steps in (1, _EQUAL_REMINDER):
            self.progress.say(
                f"step {step}: the rewards of each of the {num_groups} groups are all equal, so nothing can be learned "
                "from them; look at the task's difficulty, or set algorithm.filter_groups = true"
            )
        return num_equal / num_groups

    def _record(
        self,
        step: int,
        metrics: dict[str, float],
        writer: MetricsWriter[StepRow],
        reporter: RunReporter,
        *,
        is_last: bool,
    ) -> StepRow:
        """Write a step's row, and what people look at beside it."""
        if self.progress.failures.total:
            metrics["run/failed_writes"] = float(self.progress.failures.total)
        row = self._make_row(step, metrics)
        self.history.append(row)
        writer.write(row)
        alerts = self.last_update.health.alerts
        for alert in alerts:
            self.progress.say(f"step {step}: {alert.text}")
        reporter.write(row, alerts)
        logprobs = self.last_update.trainer_logprobs
        reporter.keep_transcripts(step, self.last_rollouts, logprobs, self.tokenizer, is_last=is_last)
        return row

    def _make_row(self, step: int, metrics: dict[str, float]) -> StepRow:
        return StepRow(
            step=step,
            loss=metrics["actor/loss"],
            lr=metrics["actor/lr"],
            grad_norm=metrics["actor/grad_norm"],
            tokens_per_s=metrics["perf/tokens_per_s"],
            seconds=time.monotonic() - self._began,
            metrics=metrics,
        )

    def _is_out_of_time(self) -> bool:
        limit = self.config.run.max_seconds
        return limit > 0 and self.mesh.any(time.monotonic() - self._began - self._start.seconds >= limit)

    def _is_checkpoint_due(self, step: int, *, is_last: bool) -> bool:
        """A resumed run leaves one at its end, lest it be repeated from the older one."""
        every = self.config.run.checkpoint_every
        return (is_last and (every > 0 or self._start.step > 0)) or (every > 0 and step % every == 0)

    def _save_checkpoint(self, row: StepRow, writer: MetricsWriter[StepRow]) -> None:
        """Once the metrics before it are on disk."""
        writer.sync()
        self.mesh.at(f"step {row.step}: save")
        with self.worker.engine.exclusive():
            checkpoint.save(self.config, self._parts(), self._progress_of(row))
        self._saved_step = row.step

    def _parts(self) -> checkpoint.Parts:
        learner = self.learner
        table = self.worker.kv_scales.table
        return checkpoint.Parts(
            self.model, learner.optimizer, self.tokenizer, learner.reference, table, self.mesh, self._dtype
        )

    def _progress_of(self, row: StepRow) -> checkpoint.Progress:
        return checkpoint.Progress(
            step=row.step,
            num_updates=self.learner.num_updates,
            num_requests=self.worker.engine.num_requests,
            weight_version=self.model.weight_version,
            heldout_reward_before=self._start.heldout_reward_before,
            heldout_reward=self._heldout_reward,
            seconds=row.seconds,
        )

    def _note_step(self, step: int, metrics: dict[str, float]) -> None:
        """From here on the step is what a failure is answered with, where the run makes checkpoints."""
        if self.config.run.checkpoint_every:
            row = self._make_row(step, dict(metrics))
            self._last_step.note(row, self._progress_of(row))

    @contextlib.contextmanager
    def _saved_on_errors(self, writer: MetricsWriter[StepRow]) -> Iterator[None]:
        """A checkpoint as of the last whole step where a later one fails, and a note on the error that says so."""
        try:
            yield
        except StorageError:
            raise
        except Exception as error:
            # of several ranks some may not have failed, and a checkpoint is of all
            if self.config.run.checkpoint_every and self.mesh.world_size == 1:
                try:
                    error.add_note(self._save_last_step(writer))
                except Exception as second:  # the first error is the one to be seen
                    error.add_note(f"a checkpoint of the last step could not be written either: {second}")
            raise

    def _save_last_step(self, writer: MetricsWriter[StepRow]) -> str:
        """Save the last whole step, if it was not; says where it is."""
        last = self._last_step
        if last.is_intact and last.row is not None and last.progress is not None:
            path = checkpoint.path_of(self.config, last.row.step)
            if self._saved_step != last.row.step:
                if not writer.rows or writer.rows[-1].step < last.row.step:
                    writer.write(last.row)  # its evaluation failed
                writer.sync()
                with self.worker.engine.exclusive():
                    last.put_back()
                    checkpoint.save(self.config, self._parts(), last.progress)
            if last.row.step == self.config.trainer.steps:
                return f"saved after step {last.row.step}, the last: {path}"
            return f"saved after step {last.row.step}: {path}; the same command goes on from there"
        newest = checkpoint.open_store(self.config).newest()
        if newest is None:
            return "nothing was saved"
        return f"the last checkpoint is {newest}; the same command goes on from there"

    def _save_policy(self) -> Path | None:
        """The policy at the end of the run, where that is asked for."""
        if not self.config.run.save:
            return None
        path = self.config.run.dir / _FINAL
        self.mesh.at("save the policy")
        self._parts().export().write(path, group=self.mesh.host_group)
        return path

    def _result(self, warmup: list[WarmupStep], saved: Path | None, stopped_by: str | None = None) -> RLResult:
        return RLResult(
            model=self.model,
            tokenizer=self.tokenizer,
            history=self.history,
            warmup=warmup,
            heldout_reward_before=self._start.heldout_reward_before,
            heldout_reward_after=self._heldout_reward,
            last_rollouts=self.last_rollouts,
            checkpoint=saved,
            stopped_by=stopped_by,
            first_step=self._start.step,
        )
