"""The reinforcement loop: sample, score, compare logprobs bit by bit, learn, refit; one step after the other.

`octavo rl` and the demo call `run`. The policy lives once: trainer, sampler and evaluator share its parameters.
"""

import copy
import dataclasses
import itertools
import time
from collections.abc import Callable
from pathlib import Path

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder, load_model, save_model
from octavo.models.initial import STD as INIT_STD
from octavo.models.tokenizer import Tokenizer, char_tokenizer, load_tokenizer
from octavo.rl.advantage import grpo_advantages, overlong_penalty, rloo_advantages
from octavo.rl.config import RLConfig
from octavo.rl.evaluate import Evaluator
from octavo.rl.history import StepRow
from octavo.rl.learner import Learner
from octavo.rl.metrics import reward_metrics
from octavo.rl.progress import RLProgress
from octavo.rl.refit import RefitReport, refit, share_weights
from octavo.rl.rollout import Rollouts, generate_rollouts
from octavo.rl.tasks import Task
from octavo.rl.warmup import WarmupStep, warm_up
from octavo.serve import LLM
from octavo.train.atomic import move_aside
from octavo.train.build import build_model_config, find_device
from octavo.train.metrics import METRICS_FILE, TENSORBOARD_DIR, MetricsWriter

_DEFAULT_CONTEXT = 256
_FINAL = "final"  # the checkpoint at the end
_SEED_STRIDE = 1_000_003  # keeps the prompts of one seed's steps apart from those of the next seed
_GEN_BATCH_STRIDE = 1_000_000_007  # and those that dynamic sampling adds from all of them


@dataclasses.dataclass(frozen=True)
class RLResult:
    """What a run leaves behind.

    Attributes:
        model: the trained policy, in the trainer's numerics.
        tokenizer: its tokenizer.
        history: one row a step.
        warmup: the warm start's steps, empty where there was none.
        accuracy_before, accuracy_after: held-out accuracy by the bf16 greedy engine, around the history.
        last_rollouts: of the last step, to look at.
        checkpoint: where the policy was saved, or None.
    """

    model: Decoder
    tokenizer: Tokenizer
    history: list[StepRow]
    warmup: list[WarmupStep]
    accuracy_before: float
    accuracy_after: float
    last_rollouts: Rollouts
    checkpoint: Path | None


def run(
    config: RLConfig,
    *,
    model: Decoder | None = None,
    tokenizer: Tokenizer | None = None,
    task: Task | None = None,
    on_step: Callable[[StepRow], None] | None = None,
    progress: bool = True,
) -> RLResult:
    """Reinforce a policy.

    Args:
        config: everything else.
        model: a policy that is warm already; trained in place, config.model and config.warmup then have no say. None
            builds or loads one and warms it up.
        tokenizer: the model's; needed where a model is given.
        task: a task of one's own instead of config.task.
        on_step: called with each step's row.
        progress: show a live line.
    Returns:
        RLResult; metrics.jsonl, TensorBoard events and the checkpoint are under config.run.dir.
    Raises:
        ExactnessError: exact mode, and a trainer's logprob is not the sampler's.
        DataError: a verifier that raises or gives no finite reward. NonFiniteError: a loss or gradient went bad.
        ConfigError, CheckpointError: what cannot be built.
    """
    task = task or config.task.build()
    heldout = _draw_heldout(config, task)
    with RLProgress(progress) as view:
        warmup: list[WarmupStep] = []
        if model is None:
            model, tokenizer, warmup = warm_start(config, task=task, progress=view)
        if tokenizer is None:
            raise ConfigError("run(model=...) needs the model's tokenizer too; pass tokenizer=...")
        return _Loop(config, model, tokenizer, task, heldout, view).run(on_step or (lambda _: None), warmup)


def warm_start(
    config: RLConfig, *, task: Task | None = None, progress: RLProgress | None = None
) -> tuple[Decoder, Tokenizer, list[WarmupStep]]:
    """Build or load the policy of config.model, and train it on right answers by config.warmup.

    The warm start computes in bf16, not exact, whatever the run's numerics: it only sets the starting point.

    Returns:
        (model, tokenizer, the warm start's steps).
    """
    task = task or config.task.build()
    progress = progress or RLProgress(enabled=False)
    model, tokenizer = build_policy(config, task)
    if not config.warmup.steps:
        return model, tokenizer, []
    evaluator = _build_evaluator(config, model, tokenizer, task)
    prompts = task.prompts("train", config.warmup.check_prompts, config.run.seed)
    progress.begin("warm start", config.warmup.steps)
    steps = warm_up(
        evaluator.model,
        tokenizer,
        task,
        config.warmup,
        seed=config.run.seed,
        accuracy=lambda: evaluator.accuracy(prompts, config.rollout.temperature),
        on_step=progress.show_warmup,
    )
    progress.end()
    if steps[-1].accuracy is not None and steps[-1].accuracy < config.warmup.target_accuracy:
        progress.say(
            f"warning: the warm start ended at accuracy {steps[-1].accuracy:.2f}, below warmup.target_accuracy = "
            f"{config.warmup.target_accuracy}; what is never right cannot be reinforced: raise warmup.steps"
        )
    model.mark_weights_updated()  # the warm start's optimizer knows its bf16 view alone
    return model, tokenizer, steps


def build_policy(config: RLConfig, task: Task) -> tuple[Decoder, Tokenizer]:
    """The untrained policy of config.model: a checkpoint, or random weights over the task's alphabet."""
    device = find_device(config.run.device)
    if config.model.path:
        return load_model(config.model.path, device=device, trainable=True), load_tokenizer(config.model.path)
    tokenizer = char_tokenizer(task.alphabet)
    architecture = build_model_config(config.model, tokenizer.vocab_size, tokenizer.eos_id, _DEFAULT_CONTEXT)
    model = Decoder(architecture, device=device, seed=config.run.seed)
    with torch.no_grad():
        for param in model.parameters():
            if param.dim() == 2:
                param.mul_(config.warmup.init_std / INIT_STD)
    model.mark_weights_updated()
    return model, tokenizer


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
        self.sampler = model if config.exact else share_weights(model, config.rollout_numerics)
        self.llm = LLM(
            self.sampler, tokenizer=tokenizer, max_num_seqs=config.rollout.max_num_seqs, seed=config.run.seed
        )
        reference = copy.deepcopy(model).requires_grad_(False) if config.algorithm.kl_coef else None
        self.learner = Learner(model, config, reference)
        self.evaluator = _build_evaluator(config, model, tokenizer, task)
        self.last_rollouts: Rollouts | None = None
        self.num_gen_batches = 0

    def run(self, on_step: Callable[[StepRow], None], warmup: list[WarmupStep]) -> RLResult:
        """All steps; see the module's run."""
        config = self.config
        history: list[StepRow] = []
        self._refit()
        before = after = self.evaluator.accuracy(self.heldout)
        self.progress.say(f"held-out accuracy before: {before:.3f} ({config.eval.num_prompts} prompts, bf16, greedy)")
        self.progress.begin("reinforce", config.trainer.steps)
        began = time.monotonic()
        move_aside(config.run.dir, (METRICS_FILE, TENSORBOARD_DIR, _FINAL))
        with MetricsWriter(config.run.dir, 0, config.run.tensorboard) as writer:
            for step in range(1, config.trainer.steps + 1):
                metrics = self._step(step)
                is_last = step == config.trainer.steps or self._out_of_time(began)
                if is_last or (config.eval.every and step % config.eval.every == 0):
                    after = metrics["eval/accuracy"] = self.evaluator.accuracy(self.heldout)
                history.append(_make_row(step, metrics, time.monotonic() - began))
                writer.write(history[-1])
                self.progress.show_step(history[-1])
                on_step(history[-1])
                if is_last:
                    break
        self.progress.end()
        self.progress.say(f"held-out accuracy after: {after:.3f}")
        assert self.last_rollouts is not None, "trainer.steps is positive"
        return RLResult(self.model, self.tokenizer, history, warmup, before, after, self.last_rollouts, self._save())

    def _step(self, step: int) -> dict[str, float]:
        """Sample, score, learn, refit."""
        marks = [time.perf_counter()]
        rollouts = self.last_rollouts = self._sample(step)
        advantages = self._advantages(rollouts)
        policy_lag = self.model.weight_version - rollouts.weight_versions
        marks.append(time.perf_counter())
        update = self.learner.learn(rollouts, advantages, step)
        marks.append(time.perf_counter())
        report = self._refit()
        marks.append(time.perf_counter())
        seconds = dict(zip(("gen", "update_actor", "refit"), itertools.pairwise(marks), strict=True))
        return {
            **reward_metrics(rollouts.rewards, advantages, rollouts.response_lens, rollouts.rollout_logprobs),
            **update.metrics,
            "response/finished_share": float(rollouts.is_finished.float().mean()),
            "mismatch/policy_lag_max": float(policy_lag.max()),
            "rollout/num_gen_batches": float(self.num_gen_batches),
            "refit/weight_version": float(report.weight_version),
            "refit/bytes": float(report.num_bytes),
            **{f"timing_s/{name}": end - start for name, (start, end) in seconds.items()},
            "perf/tokens_per_s": sum(map(len, rollouts.sequences)) / (marks[-1] - marks[0]),
        }

    def _advantages(self, rollouts: Rollouts) -> torch.Tensor:
        """[sequences] fp32, of the rewards with what an overlong response loses."""
        algorithm = self.config.algorithm
        rewards = rollouts.rewards + overlong_penalty(
            rollouts.response_lens,
            self.config.rollout.max_tokens,
            algorithm.overlong_buffer,
            algorithm.overlong_penalty,
        )
        if algorithm.name == "rloo":
            return rloo_advantages(rewards, rollouts.group_ids)
        by_std = algorithm.name == "grpo" and algorithm.norm_adv_by_std
        return grpo_advantages(rewards, rollouts.group_ids, norm_by_std=by_std)

    def _sample(self, step: int) -> Rollouts:
        """The step's rollouts, in an order in which every minibatch mixes prompts."""
        config, seed = self.config, self.config.run.seed * _SEED_STRIDE + step
        rollouts = self._generate(seed)
        self.num_gen_batches = 1
        if config.algorithm.filter_groups:
            rollouts = self._fill_with_informative(rollouts, seed)
        return rollouts.shuffled(seed) if config.trainer.minibatches > 1 else rollouts

    def _fill_with_informative(self, rollouts: Rollouts, seed: int) -> Rollouts:
        """Groups with different rewards in the place of those without, as long as max_gen_batches lets it."""
        wanted = self.config.rollout.prompts_per_step
        found, spare = rollouts.split_groups()
        while len(found) < wanted and self.num_gen_batches < self.config.algorithm.max_gen_batches:
            more, _ = self._generate(seed + self.num_gen_batches * _GEN_BATCH_STRIDE).split_groups()
            found += more
            self.num_gen_batches += 1
        return Rollouts.join((found + spare)[:wanted])

    def _generate(self, seed: int) -> Rollouts:
        section = self.config.rollout
        return generate_rollouts(
            self.llm,
            self.task,
            self.task.prompts("train", section.prompts_per_step, seed),
            samples_per_prompt=section.samples_per_prompt,
            max_tokens=section.max_tokens,
            temperature=section.temperature,
        )

    def _refit(self) -> RefitReport:
        return refit(self.model, self.sampler, self.llm)

    def _out_of_time(self, began: float) -> bool:
        limit = self.config.run.max_seconds
        return limit > 0 and time.monotonic() - began >= limit

    def _save(self) -> Path | None:
        if not self.config.run.save:
            return None
        path = self.config.run.dir / _FINAL
        save_model(self.model, path, tokenizer=self.tokenizer)
        return path


def _draw_heldout(config: RLConfig, task: Task) -> list[str]:
    """The evaluation's prompts; drawn first, so that a task with too few of them fails before any work."""
    try:
        return task.prompts("heldout", config.eval.num_prompts, 0)
    except ConfigError as error:
        raise ConfigError(f"{error}; lower eval.num_prompts, which is {config.eval.num_prompts}") from None


def _build_evaluator(config: RLConfig, model: Decoder, tokenizer: Tokenizer, task: Task) -> Evaluator:
    return Evaluator(model, tokenizer, task, config.rollout.max_tokens, config.rollout.max_num_seqs)


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
