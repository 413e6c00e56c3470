"""The training run, from a TrainConfig to a checkpoint: the one loop that everything else in train/ serves."""

import dataclasses
import math
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, Self

import torch

from octavo.distributed.agreement import check_agreement, describe_process
from octavo.distributed.mesh import Mesh
from octavo.distributed.outcome import together
from octavo.errors import ConfigError
from octavo.models import Decoder, Tokenizer
from octavo.models.checkpoint import record
from octavo.models.checkpoint.storage import check_writable
from octavo.models.export import ModelExport
from octavo.models.save import save_model
from octavo.nn import ConversionReport
from octavo.nn.live_weights import stop_watching
from octavo.nn.load_balance import metrics_of
from octavo.nn.router_watch import RouterWatch
from octavo.parallel import CutReport, ShardReport, shard
from octavo.run.build import find_device, watch_routers
from octavo.run.busy_cpu import threads_advice
from octavo.run.checkpoint_store import CheckpointStore, flatten
from octavo.run.determinism import deterministic
from octavo.run.folder_lock import locked_folder
from octavo.run.metrics import METRICS_FILE, MetricsWriter, Row
from octavo.run.optimizer import MasterAdamW
from octavo.run.sinks import SINKS_FILE, Sinks, require_sinks
from octavo.run.start_over import has_started_over, start_over
from octavo.run.stopping import StopRequest, stop_on_signals
from octavo.run.tensorboard import TENSORBOARD_DIR
from octavo.run.trainer_state import num_checkpoint_bytes, restore, trainer_state
from octavo.run.write_failures import WriteFailures
from octavo.train.build import DTYPES, build_model, cut_linears
from octavo.train.config import TrainConfig
from octavo.train.dataset import Dataset, load_dataset
from octavo.train.evaluate import perplexity, validation_loss
from octavo.train.lora import AdapterExport, Adapters
from octavo.train.memory_plan import describe_model
from octavo.train.nonfinite import explain_nonfinite
from octavo.train.progress import TrainProgress
from octavo.train.resume import check_continues, describe
from octavo.train.schedule import learning_rate
from octavo.train.statistics import STATISTICS_FILE, RunStatistics
from octavo.train.step import TrainStepResult, summed_loss, train_step

CHECKPOINTS = "checkpoints"
MERGED = "model"  # where octavo generate and serve look in a run's folder
_OF_A_RUN = (METRICS_FILE, STATISTICS_FILE, TENSORBOARD_DIR, SINKS_FILE, CHECKPOINTS, MERGED)


@dataclasses.dataclass(frozen=True)
class TrainResult:
    """What a run left behind.

    Attributes:
        step: optimizer steps done in all.
        first_step: of these, the ones done before this call; equal to step where nothing was trained.
        rows: its metrics, those before a resume included.
        val_loss: of the last validation; None if a stop came before any.
        val_ppl: of the last validation; None if a stop came before any.
        checkpoint: the last checkpoint's directory; its model/ loads with octavo.load_model. Under [lora] it has
            adapter/ instead, PEFT's files.
        model: as it is at the end; under [lora] the base with its adapters.
        tokenizer: as it is at the end.
        conversion_report: which linears ran in FP8, which did not, and why.
        stopped_by: the signal that ended the run early, or None.
        merged: under [lora] the folder of the model with the adapters in its weights; None before the last step.
    """

    step: int
    rows: tuple[Row, ...]
    val_loss: float | None
    val_ppl: float | None
    checkpoint: Path
    model: Decoder
    tokenizer: Tokenizer
    conversion_report: ConversionReport
    stopped_by: str | None = None
    first_step: int = 0
    merged: Path | None = None

    @property
    def val_step(self) -> int | None:
        """The step after which val_loss was measured; before `step` where a stop came in between."""
        return next((row.step for row in reversed(self.rows) if row.val_loss is not None), None)


def train(
    config: TrainConfig,
    *,
    on_step: Callable[[Row], None] | None = None,
    progress: bool = True,
    resume: bool = True,
) -> TrainResult:
    """Train a language model.

    Args:
        on_step: called with every row of metrics, after it was written.
        progress: show a progress bar (plain lines where there is no terminal).
        resume: go on from run.dir's last whole checkpoint, if it has one. False moves what is there aside, once in a
            job of torchrun's, whose later tries go on.
    Returns:
        TrainResult. SIGTERM and Ctrl-C end a run early, with its state saved. Under torchrun every rank trains its
            share and returns the same; the first one writes.
    Raises:
        ConfigError: before anything is written; also where the ranks do not run the same.
        DataError: before anything is written.
        CheckpointError: run.dir holds a run of another architecture, or only damaged checkpoints.
        NonFiniteError: the loss or a gradient became inf or NaN; the last checkpoint is still there.
        StorageError: run.dir cannot be written (asked before any work), or a checkpoint could not be, and then the
            message names the last good one.
    Exactness: on a CPU, with one number of threads, a run that was killed and resumed ends with the bits of one that
        was not. On a GPU the same state is restored, but torch's attention adds its gradients in no fixed order
        unless run.deterministic is set; octavo's, of ragged packs on Hopper, adds them in a fixed one. With
        parallel.reduction = "ordered" a run on several ranks has the bits of one on a single process.
    """
    check_writable(config.run.dir, "run.dir")
    require_sinks("metrics", wandb=config.metrics.wandb, mlflow=config.metrics.mlflow)
    find_device(config.run.device)
    with deterministic(config.run.deterministic):  # from before the first product, when cuBLAS is asked for its order
        return _train(config, on_step, progress, resume)


def _train(config: TrainConfig, on_step: Callable[[Row], None] | None, progress: bool, resume: bool) -> TrainResult:
    mesh = Mesh.from_config(config.parallel, config.run.device)
    run = _Run.build(config, mesh)
    num_bytes = num_checkpoint_bytes(run.model, run.optimizer, run.export())
    if run.adapters is not None:  # and the merged model
        num_bytes += run.model.num_params * run.model.dtype.itemsize
    check_writable(config.run.dir, "run.dir", num_bytes=num_bytes)
    with locked_folder(config.run.dir, mesh):
        try:
            return run.train(on_step, progress and mesh.is_first, resume)
        except BaseException as error:
            try:
                run.store.wait()  # before the folder is another job's
            except Exception as second:  # the first error is the one to be seen
                error.add_note(f"the save in the background failed: {second}")
            raise


@dataclasses.dataclass(frozen=True)
class _Run:
    """The objects of a run and what is done with them at a step; steps are counted by how many are done."""

    config: TrainConfig
    dataset: Dataset
    model: Decoder
    optimizer: MasterAdamW
    store: CheckpointStore
    routers: RouterWatch
    mesh: Mesh
    cutting: CutReport | None
    sharding: ShardReport | None
    adapters: Adapters | None

    @classmethod
    def build(cls, config: TrainConfig, mesh: Mesh) -> Self:
        if config.lora is not None and mesh.device_mesh is not None:
            raise ConfigError("[lora] trains in one process, on one GPU, got several ranks; start it without torchrun")
        device = mesh.device if mesh.device_mesh is None else torch.device("cpu")  # where it is cut and sharded
        check_agreement(dict(flatten(config.model_dump(mode="json"), "config.")) | describe_process())
        mesh.own_share(config.data.num_micro_batches)
        if not config.model.path:
            describe_model(config)  # what it refuses is refused before a token is written
        loaded: list[Dataset] = []
        for is_turn in (mesh.is_first, not mesh.is_first):  # the first rank fills the cache for the others
            together(mesh.host_group, lambda now=is_turn: loaded.append(load_dataset(config)) if now else None)  # type: ignore[misc]
        (dataset,) = loaded
        check_agreement({"the data": dataset.fingerprint})
        tokenizer = dataset.tokenizer
        model = build_model(config, tokenizer.vocab_size, tokenizer.eos_id, device)
        adapters, cutting, sharding = Adapters.of_run(model, config), None, None
        if mesh.world_size > 1 and config.optimizer.master_weights == "fp32":
            model.float()  # fp32 shards are the masters; layers are gathered in the run's dtype
        if mesh.tensor_group is not None:
            cutting = cut_linears(model, mesh, config.parallel)
        if mesh.world_size == 1:
            model.to(mesh.device)
        else:
            sharding = shard(
                model,
                mesh,
                reduction=config.parallel.reduction,
                param_dtype=DTYPES[config.precision.dtype],
                all_gather_dtype="fp8" if config.parallel.all_gather_dtype == "fp8" else None,
            )
        optimizer, is_async = MasterAdamW(model, config.optimizer), config.checkpoint.async_mode == "async"
        optimizer.state_cuts()  # what it refuses is refused before the first step
        stop_watching(model)  # which nothing else writes
        folder = config.run.dir / CHECKPOINTS
        store = CheckpointStore(folder, config.checkpoint.keep, mesh, is_async=is_async, optimizer=optimizer)
        routers = watch_routers(model, config.model, measures=True)
        return cls(config, dataset, model, optimizer, store, routers, mesh, cutting, sharding, adapters)

    def train(self, on_step: Callable[[Row], None] | None, progress: bool, resume: bool) -> TrainResult:
        """Train to the end, or until asked to stop."""
        config = self.config
        if self.mesh.is_first and not resume and not has_started_over(config.run.dir):
            start_over(config.run.dir, _OF_A_RUN)
        self.mesh.barrier()
        first_step, notes = self.resume()
        if config.checkpoint.async_mode == "async":
            if first_step == 0:
                self.optimizer.init_state()  # the moments, too, want memory
            self.store.reserve(trainer_state(self.model, self.optimizer), self.export())
        failures = WriteFailures()
        with (
            TrainProgress(config.run.steps, first_step, progress) as bar,
            MetricsWriter[Row](
                config.run.dir, first_step, config.metrics.tensorboard, failures=failures, writes=self.mesh.is_first
            ) as metrics,
            Sinks(
                config.run.dir,
                first_step,
                [row.as_dict() for row in metrics.rows],
                wandb=config.metrics.wandb,
                mlflow=config.metrics.mlflow,
                config=config.model_dump(mode="json"),
                failures=failures,
                writes=self.mesh.is_first,
            ) as sinks,
            RunStatistics(
                self.model,
                config.run.dir,
                first_step,
                tensorboard=config.metrics.tensorboard,
                failures=failures,
                mesh=self.mesh,
                **config.statistics.model_dump(),
            ) as statistics,
            stop_on_signals() as stop,
        ):
            for note in (*self.introduction(), *notes) if first_step < config.run.steps else notes:
                bar.say(note)
            clock = _Clock(metrics.seconds)
            step, saved_step = first_step, first_step if first_step else None
            while step < config.run.steps and not self.mesh.any(bool(stop)):
                clock.start()
                result = self.train_step(step)
                clock.stop(result.num_tokens)
                step += 1
                statistics.step()
                row = self.measure(step, result, clock)
                if row is not None:
                    metrics.write(row)
                    sinks.write(row.as_dict())
                    with failures.caught("progress"):
                        bar.update(row)
                if self.is_due(step, config.checkpoint.every):
                    saved_step = self.save(step, metrics)
                if row is not None and on_step is not None:
                    on_step(row)
            if step != saved_step:
                self.save(step, metrics)
            self.store.wait()
            return self.finish(first_step, step, metrics, stop)

    def resume(self) -> tuple[int, list[str]]:
        """Take over the last whole checkpoint: (steps done, what a person should know)."""
        checkpoint = self.store.find_latest()
        if checkpoint is None:
            torch.manual_seed(self.config.run.seed)
            return 0, []
        changes = check_continues(checkpoint.description, self.describe(0))
        if checkpoint.step > self.config.run.steps:
            raise ConfigError(
                f"{checkpoint.path} is at step {checkpoint.step}, run.steps is {self.config.run.steps}; raise it, or "
                "start over with --no-resume"
            )
        version = int(checkpoint.description["weight_version"])
        like = None
        if self.mesh.device_mesh is not None:
            if checkpoint.step:
                self.optimizer.init_state()
            like = trainer_state(self.model, self.optimizer)
        state = checkpoint.load_state(like, self.optimizer.state_cuts())
        restored = restore(self.model, self.optimizer, state, version)
        if checkpoint.step == self.config.run.steps:
            return checkpoint.step, [f"{change}: without effect, for no step is left" for change in changes]
        return checkpoint.step, [f"resuming after step {checkpoint.step} of {checkpoint.path}", *changes, *restored]

    @property
    def place(self) -> str:
        """Where it is trained, for a person."""
        tensor = 1 if self.mesh.tensor_group is None else self.mesh.tensor_group.size
        if self.mesh.world_size * tensor == 1:
            return str(self.model.device)
        replicas = f", {self.mesh.num_replicas} replicas" if self.mesh.num_replicas > 1 else ""
        return f"{self.mesh.world_size * tensor} ranks ({self.model.device.type}{replicas})"

    def introduction(self) -> list[str]:
        """What is about to be trained, for a person."""
        report = self.model.conversion_report
        assert report is not None, "the model's numerics are set when it is built"
        recipe = self.model.numerics.recipe.name
        return [
            f"{self.model.num_params / 1e6:.2f}M parameters in {self.config.precision.dtype} on {self.place}; "
            f"recipe {recipe}: {len(report.fp8_names)} of {len(report.rows)} linears in FP8, "
            f"{report.fp8_flop_share:.1%} of linear FLOPs (lm_head not counted)",
            *([] if self.adapters is None else [self.adapters.summary(self.model)]),
            *_overrides(report),
            *([] if self.cutting is None else [str(self.cutting)]),
            *([] if self.sharding is None else [self.sharding.summary]),
            *self.dataset.summary,
            *([] if not (advice := threads_advice(self.model.device)) else [f"{advice}, or steps take much longer"]),
        ]

    def train_step(self, step: int) -> TrainStepResult:
        """Step number `step`, from 0."""
        optimizer = self.config.optimizer
        lr = learning_rate(step, self.config.run.steps, optimizer.lr, self.config.schedule)
        batches = self.dataset.batches(step)
        return train_step(
            self.model,
            self.optimizer,
            batches,
            lr=lr,
            max_grad_norm=optimizer.max_grad_norm,
            step=step + 1,
            mesh=self.mesh,
        )

    def is_due(self, step: int, every: int) -> bool:
        """Whether something that happens every so many steps, and at the end, happens after this one."""
        return step == self.config.run.steps or (every > 0 and step % every == 0)

    def measure(self, step: int, result: TrainStepResult, clock: "_Clock") -> Row | None:
        """The step's row of metrics, with a validation where one is due; None where nothing is."""
        metrics = self.config.metrics
        evaluates = self.is_due(step, metrics.eval_every)
        if not evaluates and not self.is_due(step, metrics.log_every):
            return None
        val_loss = self.validate(step) if evaluates else None
        optimizer = self.config.optimizer
        return Row(
            step=step,
            loss=result.loss,
            lr=learning_rate(step - 1, self.config.run.steps, optimizer.lr, self.config.schedule),
            grad_norm=result.grad_norm,
            tokens_per_s=clock.lap(),
            seconds=clock.seconds(),
            val_loss=val_loss,
            val_ppl=None if val_loss is None else perplexity(val_loss),
            **{f"router_{name}": value for name, value in self.router_metrics().items()},
        )

    def router_metrics(self) -> dict[str, float]:
        """See RouterWatch.metrics; of all ranks' micro-batches."""
        sums = self.routers.take()
        found = self.mesh.gather_data_objects(None if sums is None else sums.cpu())
        of_ranks = [each for each in found if each is not None]
        return metrics_of(torch.stack(of_ranks).sum(dim=0)) if of_ranks else {}

    def validate(self, step: int) -> float:
        """Validation loss in nats a token; NonFiniteError where it is none."""
        self.mesh.at(f"step {step}: validation")
        loss = validation_loss(self.model, self.dataset.validation_batches(), self.mesh)
        if not math.isfinite(loss):
            on_device = (batch.to(self.model.device) for batch in self.dataset.validation_batches())
            raise explain_nonfinite(self.model, on_device, summed_loss, step, self.mesh)
        return loss

    def save(self, step: int, metrics: MetricsWriter) -> int:
        """Write a checkpoint, once the metrics before it are on disk; returns the step."""
        self.mesh.at(f"step {step}: save")
        metrics.sync()
        self.store.save(
            self.describe(step),
            trainer_state(self.model, self.optimizer),
            self.export(),
            self.optimizer.state_cuts(),
        )
        return step

    def describe(self, step: int) -> dict[str, Any]:
        """See resume.describe."""
        return describe(step, self.config, self.model, self.dataset, self.adapters)

    def export(self) -> ModelExport:
        """The servable checkpoint of the model as it is, or its adapters alone."""
        if self.adapters is not None:
            return AdapterExport(self.model, self.dataset.tokenizer, self.adapters)
        return ModelExport(self.model, self.dataset.tokenizer, dtype=DTYPES[self.config.precision.dtype])

    def merge(self, step: int) -> Path | None:
        """Write the model with the adapters in its weights, after the last step of a run that has some: its folder."""
        folder = self.config.run.dir / MERGED
        if self.adapters is None or step < self.config.run.steps:
            return None
        merged = record.read(folder)  # of an earlier end, where a kill came before this one's was written
        if merged is None or merged.weight_version != self.model.weight_version:
            save_model(self.adapters.merged(self.model), folder, tokenizer=self.dataset.tokenizer)
        return folder

    def finish(self, first_step: int, step: int, metrics: MetricsWriter, stop: StopRequest) -> TrainResult:
        """The result, from the last validation and the last checkpoint."""
        reasons = [reason for reason in self.mesh.gather_objects(stop.reason) if reason is not None]
        validated = [row for row in metrics.rows if row.val_loss is not None]
        last = validated[-1] if validated else None
        assert self.model.conversion_report is not None, "the model's numerics are set when it is built"
        return TrainResult(
            step=step,
            rows=tuple(metrics.rows),
            val_loss=last.val_loss if last else None,
            val_ppl=last.val_ppl if last else None,
            checkpoint=self.store.path_of(step),
            model=self.model,
            tokenizer=self.dataset.tokenizer,
            conversion_report=self.model.conversion_report,
            stopped_by=reasons[0] if reasons and step < self.config.run.steps else None,
            first_step=first_step,
            merged=self.merge(step),
        )


def _overrides(report: ConversionReport) -> list[str]:
    """A line for each override; trainer.json has the recipe of every linear."""
    names: dict[str, list[str]] = {}
    for row in report.rows:
        if "override" in row.reason:
            names.setdefault(f"{row.recipe or 'bf16'} ({row.reason})", []).append(row.name)
    return [
        f"{', '.join(each[:2])}{f' and {len(each) - 2} more' if len(each) > 2 else ''}: {what}"
        for what, each in names.items()
    ]


class _Clock:
    """Seconds of the run, those before a resume included, and tokens a second of the steps since the last lap."""

    def __init__(self, seconds_before: float) -> None:
        self._began_s = time.monotonic() - seconds_before
        self._step_began_s = 0.0
        self._lap_s, self._lap_tokens = 0.0, 0

    def start(self) -> None:
        """A step begins."""
        self._step_began_s = time.monotonic()

    def stop(self, num_tokens: int) -> None:
        """A step of so many tokens has ended."""
        self._lap_s += time.monotonic() - self._step_began_s
        self._lap_tokens += num_tokens

    def lap(self) -> float:
        """Tokens a second since the last lap, validations and checkpoints not counted."""
        speed = self._lap_tokens / max(self._lap_s, 1e-9)
        self._lap_s, self._lap_tokens = 0.0, 0
        return speed

    def seconds(self) -> float:
        """Seconds of the run so far."""
        return time.monotonic() - self._began_s
