"""The reinforcement loop: sample, score, compare logprobs bit by bit, learn, refit; one step after the other.

`octavo rl` and the demo call `run`. The policy lives once: trainer, sampler and evaluator share its parameters.
"""

import contextlib
import dataclasses
import logging
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from octavo.errors import ConfigError, StorageError
from octavo.models import Decoder, save_model
from octavo.models.checkpoint.storage import check_writable
from octavo.models.tokenizer import Tokenizer
from octavo.rl import checkpoint
from octavo.rl.batches import BatchSampler
from octavo.rl.cautions import cautions
from octavo.rl.config import RLConfig
from octavo.rl.engines.build import check_engine
from octavo.rl.history import StepRow, read_steps
from octavo.rl.last_step import LastStep
from octavo.rl.learner import Learner
from octavo.rl.policy import build_evaluator, build_policy, build_reference, mask_padded_ids, warm_policy
from octavo.rl.progress import RLProgress
from octavo.rl.prompts import check_known_prompts, draw_heldout
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.rollout_worker import RolloutWorker
from octavo.rl.stepper import Stepper
from octavo.rl.stopping import raise_on_signals
from octavo.rl.tasks import Task
from octavo.rl.warmup import WarmupStep
from octavo.rl.watch import WATCH_FILES, Watch, require_wandb
from octavo.run.atomic import move_aside
from octavo.run.checkpoint_store import Checkpoint
from octavo.run.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsWriter
from octavo.run.stopping import stop_on_signals

logger = logging.getLogger(__name__)

_FINAL = "final"  # the checkpoint at the end


@dataclasses.dataclass(frozen=True)
class RLResult:
    """What a run leaves behind.

    Attributes:
        model: the trained policy, in the trainer's numerics.
        tokenizer: its tokenizer.
        history: one row a step, those before a resume included.
        warmup: the warm start's steps, empty where there was none.
        accuracy_before, accuracy_after: held-out accuracy by the bf16 greedy engine, around the history.
        last_rollouts: of the last step, to look at.
        checkpoint: where the policy was saved, or None.
        stopped_by: the signal that ended the run early, or None.
        first_step: steps that were done before this call.
    """

    model: Decoder
    tokenizer: Tokenizer
    history: list[StepRow]
    warmup: list[WarmupStep]
    accuracy_before: float
    accuracy_after: float
    last_rollouts: Rollouts
    checkpoint: Path | None
    stopped_by: str | None = None
    first_step: int = 0


def run(
    config: RLConfig,
    *,
    model: Decoder | None = None,
    tokenizer: Tokenizer | None = None,
    task: Task | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
    resume: bool = True,
) -> RLResult:
    """Reinforce a policy.

    Args:
        config: everything else.
        model: a policy that is warm already; trained in place, config.model and config.warmup then have no say. None
            builds or loads one and warms it up. Ids that rollout.mask_padded_ids masks stay masked.
        tokenizer: the model's; needed where a model is given.
        task: a task of one's own instead of config.task.
        on_step: called with each step's row.
        progress: show a live line.
        resume: go on from the last checkpoint under config.run.dir, if there is one, with the bits of a run that was
            never interrupted (but for asynchronous mode, whose rollouts under way are sampled anew). False moves an
            earlier run aside.
    Returns:
        RLResult; metrics.jsonl, TensorBoard events and the checkpoint are under config.run.dir. SIGTERM and Ctrl-C end
            a run after the step under way, with its state saved to go on from and no last evaluation.
    Raises:
        ExactnessError: exact mode, and a trainer's logprob is not the sampler's.
        EngineError, WeightAuditError: an engine elsewhere cannot be reached (asked before any work), failed, or did not
            get the trainer's weights.
        DataError: a verifier that raises or gives no finite reward. NonFiniteError: a loss or gradient went bad.
        StorageError: run.dir cannot be written (asked before any work), or a checkpoint could not be, and then the
            message names the last good one.
        ConfigError, CheckpointError: what cannot be built. FinishedRunError: a resume with no step left.
        StoppedBeforeStepError: one of these signals came before the first step.
        Whatever ends a run with run.checkpoint_every > 0, a checkpoint as of the last whole step is written first,
        unless the failed step had begun to update the weights; a note on the error says where it is.
    """
    if config.run.wandb:
        require_wandb(config.run.wandb)
    check_writable(config.run.dir, "run.dir")
    for caution in cautions(config):
        logger.warning(caution)
    task = task or config.task.build()
    heldout = draw_heldout(config.eval, task)
    found = checkpoint.open_store(config).find_latest() if resume else None
    if found is not None:
        checkpoint.check_steps_left(found, config)
    check_engine(config.engine, config.rollout_numerics)
    with RLProgress(progress) as view:
        with raise_on_signals():
            is_cold = model is None and found is None
            if model is None:
                model, tokenizer = build_policy(config, task)
            if tokenizer is None:
                raise ConfigError("run(model=...) needs the model's tokenizer too; pass tokenizer=...")
            if said := mask_padded_ids(config, model, tokenizer):
                view.say(f"note: {said}")
            context = model.config.max_position_embeddings
            check_known_prompts(task, heldout, tokenizer, config.rollout.max_tokens, context)
            warmup = warm_policy(config, model, tokenizer, task, view) if is_cold else []
            loop = _Loop(config, model, tokenizer, task, heldout, view)
        with contextlib.closing(loop):
            return loop.run(on_step or (lambda _: None), warmup, found)


class _Loop:
    """One run's parts, wired together."""

    def __init__(
        self,
        config: RLConfig,
        model: Decoder,
        tokenizer: Tokenizer,
        task: Task,
        heldout: list[str],
        progress: RLProgress,
    ) -> None:
        self.config, self.model, self.tokenizer, self.task, self.progress = config, model, tokenizer, task, progress
        self.heldout = heldout
        model.set_numerics(config.trainer_numerics)
        self.side = RolloutWorker(config, model, tokenizer, task, progress)
        self.batches = BatchSampler(config, self.side, task)
        self.learner = Learner(model, config, build_reference(config, model))
        self.stepper = Stepper(config, self.side, self.batches, self.learner, progress)
        self.evaluator = build_evaluator(config, model, tokenizer, task)
        self.store = checkpoint.open_store(config)
        self.last_step = LastStep(self.side, self.learner)
        self.failures = progress.failures
        self._saved_step = 0

    def close(self) -> None:
        """Stop sampling, and let go of the engine."""
        self.stepper.close()
        self.side.engine.close()

    def run(
        self, on_step: Callable[[StepRow], None], warmup: list[WarmupStep], found: Checkpoint | None = None
    ) -> RLResult:
        """All steps, or those after a checkpoint; see the module's run."""
        config = self.config
        with raise_on_signals():
            start = self._begin() if found is None else self._go_on(found)
        self.stepper.start_sampling(start.step + 1)
        after = start.accuracy
        self.progress.begin("reinforce", config.trainer.steps)
        began = time.monotonic() - start.seconds
        with (
            stop_on_signals() as stop,
            MetricsWriter(config.run.dir, start.step, config.run.tensorboard, read_steps, self.failures) as writer,
            self._open_watch() as watch,
            self._saved_on_errors(writer),
        ):
            history = [row for row in writer.rows if isinstance(row, StepRow)]
            for row in history:  # what limits with patience remember
                self.learner.health.check(row.step, row.metrics)
            for step in range(start.step + 1, config.trainer.steps + 1):
                metrics = self.stepper.step(step)
                self._note_step(step, metrics, time.monotonic() - began, start, after)
                is_last = step == config.trainer.steps or self._out_of_time(began + start.seconds)
                if is_last or (config.eval.every and step % config.eval.every == 0):
                    after = metrics["eval/accuracy"] = self.evaluator.accuracy(self.heldout)
                if self.failures.total:
                    metrics["run/failed_writes"] = float(self.failures.total)
                history.append(_make_row(step, metrics, time.monotonic() - began))
                writer.write(history[-1])
                self._watch(watch, history[-1], is_last)
                is_saved = self._is_checkpoint_due(step, is_last, is_resumed=found is not None)
                if is_saved:
                    self._save_checkpoint(writer, start, history[-1], after)
                with self.failures.caught("progress"):
                    self.progress.show_step(history[-1])
                on_step(history[-1])
                self.stepper.last_update.verdict.raise_if_stopped()
                if stop and not is_last:
                    if not is_saved:
                        self._save_checkpoint(writer, start, history[-1], after)
                    return self._result(history, warmup, start, after, stopped_by=stop.reason)
                if is_last:
                    break
        self.progress.end()
        self.progress.say(f"held-out accuracy after: {after:.3f}")
        return self._result(history, warmup, start, after)

    def _result(
        self,
        history: list[StepRow],
        warmup: list[WarmupStep],
        start: checkpoint.Progress,
        accuracy: float,
        stopped_by: str | None = None,
    ) -> RLResult:
        """What the run leaves; the policy is saved, or was with the checkpoint that a stop made."""
        return RLResult(
            model=self.model,
            tokenizer=self.tokenizer,
            history=history,
            warmup=warmup,
            accuracy_before=start.accuracy_before,
            accuracy_after=accuracy,
            last_rollouts=self.stepper.last_rollouts,
            checkpoint=self.store.path_of(history[-1].step) / "model" if stopped_by else self._save(),
            stopped_by=stopped_by,
            first_step=start.step,
        )

    def _begin(self) -> checkpoint.Progress:
        """A new run: the first refit and evaluation; an earlier run's files are moved aside."""
        run = self.config.run
        self.side.calibrate_on_prompts(self.batches.prompts(1))  # an engine elsewhere gets them with the first weights
        self.side.refit()
        before = self.evaluator.accuracy(self.heldout)
        num_prompts = len(self.heldout)
        which = "" if num_prompts == self.config.eval.num_prompts else ": all that the held-out set has"
        self.progress.say(f"held-out accuracy before: {before:.3f} ({num_prompts} prompts{which}; bf16, greedy)")
        aside = move_aside(run.dir, (METRICS_FILE, TENSORBOARD_DIR, _FINAL, checkpoint.CHECKPOINTS, *WATCH_FILES))
        if aside is not None:
            self.progress.say(f"note: the earlier run in {run.dir} was moved to {aside}; this one starts anew")
        return checkpoint.Progress(0, 0, self.side.num_requests, self.model.weight_version, before, before, 0.0)

    def _go_on(self, found: Checkpoint) -> checkpoint.Progress:
        """The run as it was when the checkpoint was written."""
        start, notes = checkpoint.load(found, self.config, self._parts())
        self.learner.num_updates = start.num_updates
        table = self.side.kv_scales.table
        if table is not None and table.source == "trainer":
            checkpoint.load_kv_table(found, table)  # an engine elsewhere gets them with the weights
        self.side.refit()
        if table is not None:
            checkpoint.load_kv_table(found, table)
            self.side.lay_out_cache()
        self.side.num_requests = start.num_requests
        for note in notes:
            self.progress.say(f"note: {note}")
        self.progress.say(f"going on from {found.path}, after step {start.step}")
        return start

    def _open_watch(self) -> Watch:
        run = self.config.run
        fields = {"wandb_project": run.wandb, "transcripts_every": run.transcripts_every, "report": run.report}
        return Watch(run.dir, self.config, failures=self.failures, **fields)  # type: ignore[arg-type]

    def _watch(self, watch: Watch, row: StepRow, is_last: bool) -> None:
        """Show and keep what people look at beside the metrics."""
        update = self.stepper.last_update
        findings = update.verdict.findings
        for finding in findings:
            self.progress.say(f"step {row.step}: {finding.text}")
        watch.write(row, findings)
        rollouts, logprobs = self.stepper.last_rollouts, update.trainer_logprobs
        watch.keep_transcripts(row.step, rollouts, logprobs, self.tokenizer, is_last=is_last)

    def _parts(self) -> checkpoint.Parts:
        learner = self.learner
        table = self.side.kv_scales.table
        return checkpoint.Parts(self.model, learner.optimizer, self.tokenizer, learner.reference, table)

    def _is_checkpoint_due(self, step: int, is_last: bool, *, is_resumed: bool) -> bool:
        """A run that went on from a checkpoint leaves one at its end, lest it be repeated from the older one."""
        every = self.config.run.checkpoint_every
        return (is_last and (every > 0 or is_resumed)) or (every > 0 and step % every == 0)

    def _save_checkpoint(
        self, writer: MetricsWriter, start: checkpoint.Progress, row: StepRow, accuracy: float
    ) -> None:
        """Once the metrics before it are on disk."""
        writer.sync()
        with self.side.exclusive():
            checkpoint.save(self.store, self.config, self._parts(), self._progress_of(row, start, accuracy))
        self._saved_step = row.step

    def _progress_of(self, row: StepRow, start: checkpoint.Progress, accuracy: float) -> checkpoint.Progress:
        """What is known after a step."""
        return checkpoint.Progress(
            step=row.step,
            num_updates=self.learner.num_updates,
            num_requests=self.side.num_requests,
            weight_version=self.model.weight_version,
            accuracy_before=start.accuracy_before,
            accuracy=accuracy,
            seconds=row.seconds,
        )

    def _note_step(
        self, step: int, metrics: dict[str, float], seconds: float, start: checkpoint.Progress, accuracy: float
    ) -> None:
        """From here on the step is what a failure is answered with, where the recipe asks for checkpoints."""
        if self.config.run.checkpoint_every:
            row = _make_row(step, dict(metrics), seconds)
            self.last_step.note(row, self._progress_of(row, start, accuracy))

    @contextlib.contextmanager
    def _saved_on_errors(self, writer: MetricsWriter) -> Iterator[None]:
        """A checkpoint as of the last whole step where a later one fails, and a note on the error that says so."""
        try:
            yield
        except Exception as error:
            if self.config.run.checkpoint_every and not isinstance(error, StorageError):
                try:
                    error.add_note(self._save_last_step(writer))
                except Exception as second:  # the first error is the one to be seen
                    error.add_note(f"a checkpoint of the last step could not be written either: {second}")
            raise

    def _save_last_step(self, writer: MetricsWriter) -> str:
        """Save the last whole step, if it was not; says where it is."""
        last = self.last_step
        if last.is_intact and last.row is not None and last.progress is not None:
            path = self.store.path_of(last.row.step)
            if self._saved_step != last.row.step:
                if not writer.rows or writer.rows[-1].step < last.row.step:
                    writer.write(last.row)  # its evaluation failed
                writer.sync()
                with self.side.exclusive():
                    last.put_back()
                    checkpoint.save(self.store, self.config, self._parts(), last.progress)
            if last.row.step == self.config.trainer.steps:
                return f"saved after step {last.row.step}, the last: {path}"
            return f"saved after step {last.row.step}: {path}; the same command goes on from there"
        newest = self.store.newest()
        if newest is None:
            return "nothing was saved"
        return f"the last checkpoint is {newest}; the same command goes on from there"

    def _out_of_time(self, began: float) -> bool:
        limit = self.config.run.max_seconds
        return limit > 0 and time.monotonic() - began >= limit

    def _save(self) -> Path | None:
        if not self.config.run.save:
            return None
        path = self.config.run.dir / _FINAL
        save_model(self.model, path, tokenizer=self.tokenizer)
        return path


def _make_row(step: int, metrics: dict[str, float], seconds: float) -> StepRow:
    return StepRow(
        step=step,
        loss=metrics["actor/loss"],
        lr=metrics["actor/lr"],
        grad_norm=metrics["actor/grad_norm"],
        tokens_per_s=metrics["perf/tokens_per_s"],
        seconds=seconds,
        metrics=metrics,
    )
