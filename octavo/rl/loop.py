"""`octavo rl` and the demo call `run`: it checks what a run needs, builds the policy and hands both to the Trainer."""

import contextlib
import logging
from collections.abc import Callable

from octavo.distributed.mesh import Mesh
from octavo.distributed.outcome import all_do, everyone
from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.models.checkpoint.storage import check_writable
from octavo.models.tokenizer import Tokenizer
from octavo.rl import checkpoint
from octavo.rl.cautions import cautions
from octavo.rl.config import RLConfig
from octavo.rl.engines.build import check_engine
from octavo.rl.history import StepRow
from octavo.rl.policy import build_policy, build_tokenizer, mask_padded_ids, warm_policy
from octavo.rl.progress import RLProgress
from octavo.rl.prompts import check_known_prompts, draw_heldout, drop_long_prompts, step_limits, with_steps
from octavo.rl.ranks import check_cut, check_ranks
from octavo.rl.tasks import Task
from octavo.rl.trainer import RLResult, Trainer
from octavo.run.build import find_device
from octavo.run.busy_cpu import threads_advice
from octavo.run.folder_lock import locked_folder
from octavo.run.sinks import require_sinks
from octavo.run.start_over import has_started_over
from octavo.run.stopping import raise_on_signals

logger = logging.getLogger(__name__)


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

    Whatever ends a run with run.checkpoint_every > 0, a checkpoint as of the last whole step is written first, unless
    the failed step had begun to update the weights; a note on the error says where it is.

    Args:
        config: everything else.
        model: a policy that is warm already; trained in place, config.model and config.warmup then have no say. None
            builds or loads one and warms it up. Ids that rollout.mask_padded_ids masks stay masked.
        tokenizer: the model's; needed where a model is given.
        task: a task of one's own instead of config.task.
        on_step: called with each step's row.
        progress: show a live line.
        resume: go on from the last checkpoint under config.run.dir, if there is one, with the bits of a run that was
            never interrupted (but for asynchronous mode, whose rollouts under way are sampled again). False moves an
            earlier run aside, once in a job of torchrun's, whose later tries go on.
    Returns:
        RLResult; metrics.jsonl, TensorBoard events and the checkpoint are under config.run.dir. SIGTERM and Ctrl-C end
            a run after the step under way, with its state saved to go on from and no last evaluation. Under torchrun
            every rank samples and learns its share and returns the same; the first one writes.
    Raises:
        ExactnessError: exact mode, and a trainer's logprob is not the sampler's.
        EngineError: a remote engine cannot be reached (asked before any work), or failed.
        WeightAuditError: a remote engine did not get the trainer's weights.
        DataError: a verifier that raises or gives no finite reward.
        NonFiniteError: a loss or gradient went bad.
        StorageError: run.dir cannot be written (asked before any work), or a checkpoint could not be, and then the
            message names the last good one.
        ConfigError: what cannot be built, or not on several ranks; they do not run the same.
        CheckpointError: what cannot be built.
        FinishedRunError: a resume with no step left.
        StoppedBeforeStepError: one of these signals came before the first step.
    Exactness: with exact = true and parallel.reduction = "ordered" a run on several ranks has the bits of one on a
        single process: tokens, metrics and weights.
    """
    check_writable(config.run.dir, "run.dir")
    find_device(config.run.device)  # which says what is wrong with the name
    config.parallel.refuse_tensor("octavo rl")
    mesh = Mesh.from_config(config.parallel, config.run.device)
    on_step = on_step or (lambda _: None)
    resume = resume or has_started_over(config.run.dir)
    with locked_folder(config.run.dir, mesh):
        return _run(config, mesh, model, tokenizer, task, on_step, progress and mesh.is_first, resume)


def _run(
    config: RLConfig,
    mesh: Mesh,
    model: Decoder | None,
    tokenizer: Tokenizer | None,
    task: Task | None,
    on_step: Callable[[StepRow], None],
    progress: bool,
    resume: bool,
) -> RLResult:
    require_sinks("run", wandb=config.run.wandb, mlflow=config.run.mlflow)
    for caution in cautions(config) if mesh.is_first else ():
        logger.warning(caution)
    task = task or config.task.build()
    ranks = everyone()  # what is the user's may fail on one of them
    said = all_do(ranks, lambda: drop_long_prompts(task, lambda: tokenizer or build_tokenizer(config, task)))
    limits, config = step_limits(config, task), with_steps(config, task)
    heldout = all_do(ranks, lambda: draw_heldout(config.eval, task))
    check_ranks(config, mesh, heldout)
    found = checkpoint.open_store(config, mesh).find_latest() if resume else None
    if found is not None:
        checkpoint.check_steps_left(found, config, limits)
    check_engine(config.engine, config.rollout_numerics)
    with RLProgress(progress) as view:
        if advice := threads_advice(mesh.device):
            view.say(f"note: {advice}, or steps take much longer")
        if said:
            view.say(f"note: {said}")
        with raise_on_signals():
            is_cold = model is None and found is None
            if model is None:
                model, tokenizer = build_policy(config, task)
            if tokenizer is None:
                raise ConfigError("run(model=...) needs the model's tokenizer too; pass tokenizer=...")
            if said := mask_padded_ids(config, model, tokenizer):
                view.say(f"note: {said}")
            if said := check_cut(config, mesh, model):
                view.say(said)
            context = model.config.max_position_embeddings
            known = (task, heldout, tokenizer, config.rollout.max_tokens, context)
            all_do(ranks, lambda: check_known_prompts(*known))
            policy = (model, tokenizer)
            warmup = all_do(ranks, lambda: warm_policy(config, *policy, task, view)) if is_cold else []
            trainer = Trainer(config, model, tokenizer, task, heldout, view, mesh)
        with contextlib.closing(trainer):
            return trainer.run(on_step, warmup, found)
