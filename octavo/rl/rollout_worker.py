"""The rollout worker: makes each step's rollouts, and keeps the engine that samples them at the trainer's weights."""

from typing import Any

from octavo.models import Decoder
from octavo.models.tokenizer import Tokenizer
from octavo.rl.asynchronous import AsyncEmbeddedEngine, RolloutProducer, own_weights
from octavo.rl.config import RLConfig
from octavo.rl.engines.build import build_engine, build_llm
from octavo.rl.engines.probe import LogprobProbe
from octavo.rl.engines.protocol import RolloutEngine
from octavo.rl.precision import audit_precision
from octavo.rl.progress import RLProgress
from octavo.rl.prompts import prompts_of_step
from octavo.rl.ranks import Ranks, check_rewards_agree
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts, check_rewards
from octavo.rl.tasks import Task, encode_prompts
from octavo.weights.kv_scales.keeper import FallbackRule, KVScaleKeeper
from octavo.weights.refit import RefitReport, share_weights

_SEED_STRIDE = 1_000_003  # keeps the prompts of one seed's steps apart from those of the next seed
_GEN_BATCH_STRIDE = 1_000_000_007  # and those that dynamic sampling adds from all of them


class RolloutWorker:
    """Samples and scores; a step's prompts follow from the run's seed and its number alone.

    Args:
        model: the policy, in the trainer's numerics; the sampler is the same object in exact mode, shares its tensors
            otherwise, and has a copy of its own in asynchronous mode.
        ranks: that the policy is sharded over, each of which samples its share; None for one process.

    Attributes:
        sampler: the policy in the sampler's numerics.
        engine: samples from it.
        kv_scales: keeps its KV scales.
    """

    engine: RolloutEngine

    def __init__(
        self,
        config: RLConfig,
        model: Decoder,
        tokenizer: Tokenizer,
        task: Task,
        progress: RLProgress,
        ranks: Ranks | None = None,
    ) -> None:
        self._config, self._model, self._tokenizer, self._task = config, model, tokenizer, task
        self.is_asynchronous = config.asynchronous.max_policy_lag > 0
        self._producer: RolloutProducer | None = None
        self._num_gen_batches: dict[int, int] = {}
        self._ranks = ranks
        rollout, numerics = config.rollout, config.rollout_numerics
        limits: dict[str, Any] = {"max_num_seqs": rollout.max_num_seqs, "seed": config.run.seed}
        if ranks is not None:
            keeps = rollout.keep_weights
            self.sampler = model if config.exact and not keeps else ranks.view(numerics)
            self.engine = ranks.engine(self.sampler, tokenizer, keeps_weights=keeps, **limits)
        elif self.is_asynchronous:
            self.sampler = own_weights(model, numerics)
            llm = build_llm(self.sampler, tokenizer, router_replay=config.router_replay, **limits)
            self.engine = self._async_engine = AsyncEmbeddedEngine(llm, config.asynchronous.partial_rollouts)
        else:
            self.sampler = model if config.exact else share_weights(model, numerics)
            self.engine = build_engine(
                config.engine, self.sampler, tokenizer, router_replay=config.router_replay, **limits
            )
        self.kv_scales = KVScaleKeeper(
            model,
            self.sampler,
            rule=FallbackRule(rollout.kv_fallback_clip_share, rollout.kv_fallback_flush_share),
            margin=rollout.kv_scale_margin,
            lay_out=self.engine.reallocate,
            say=progress.say,
        )
        self._probe = LogprobProbe(
            self.sampler,
            num_sequences=config.engine.probe_sequences if self.engine.is_remote else 0,
            temperature=rollout.temperature,
            tolerance=config.engine.probe_tolerance,
        )

    def calibrate_first(self) -> None:
        """Before the very first rollouts: KV scales from their prompts, where the trainer is to make them."""
        if self.kv_scales.needs_first_prompts:
            ids = encode_prompts(self._task, prompts_of_step(self._config, self._task, 1, self._seed), self._tokenizer)
            with self.engine.exclusive():
                self.kv_scales.calibrate(ids)()

    def start(self, first_step: int) -> None:
        """In asynchronous mode: start the thread that samples ahead."""
        if self.is_asynchronous:
            self._producer = RolloutProducer(
                self.sample,
                self._async_engine,
                first_step=first_step,
                last_step=self._config.trainer.steps,
                max_policy_lag=self._config.asynchronous.max_policy_lag,
                weight_version=self._model.weight_version,
            )
            self._producer.start()

    def close(self) -> None:
        """Stop to sample ahead, and let go of the engine."""
        if self._producer is not None:
            self._producer.close()
        self.engine.close()

    def take(self, step: int) -> tuple[Rollouts, dict[str, float]]:
        """A step's rollouts, sampled now or ahead, and async/... metrics."""
        return (self.sample(step), {}) if self._producer is None else self._producer.take(step)

    def sample(self, step: int) -> Rollouts:
        """The step's rollouts, in an order in which every minibatch mixes prompts.

        Raises:
            DataError: a reward that is no finite number, or another one on another rank. What generate_rollouts
                raises.
        """
        config, seed = self._config, self._seed(step)
        prompts = prompts_of_step(config, self._task, step, self._seed)
        rollouts, num_batches = self._generate(prompts, step), 1
        if config.algorithm.filter_groups:
            rollouts, num_batches = self._fill_with_informative(rollouts, step)
        check_rewards(rollouts, step)
        self._num_gen_batches[step] = num_batches
        return rollouts.shuffled(seed) if config.num_minibatches > 1 else rollouts

    def take_num_gen_batches(self, step: int) -> int:
        """How many batches a step took; once."""
        return self._num_gen_batches.pop(step)

    def finish_step(self, rollouts: Rollouts) -> tuple[RefitReport, dict[str, float]]:
        """After a step's update: publish its weights, and let KV caches that clip too much fall back to bf16.

        Returns:
            (what was published, kv/... metrics of the step's rollouts).
        """
        with self.engine.exclusive():
            metrics = self.kv_scales.finish_step(int(rollouts.weight_versions.max()))
        report = self.publish(rollouts)
        if self._producer is not None:
            self._producer.note_published(report.weight_version)
        return report, metrics

    def publish(self, rollouts: Rollouts | None = None) -> RefitReport:
        """Hand over the trainer's weights, with the KV scales where the trainer makes them.

        Args:
            rollouts: the batch that was just trained on; None before the first.
        Raises:
            RecipeError: a layer that does not compute in the numerics of its side. See RolloutEngine.publish.
        """
        audit_precision(self._model, "trainer")
        if self.sampler is not self._model:
            audit_precision(self.sampler, "sampler")
        hand_over = self.kv_scales.calibrate(rollouts.sequences) if rollouts is not None else lambda: None
        return self.engine.publish(self._model, self.sampler, hand_over)

    def _seed(self, step: int) -> int:
        return self._config.run.seed * _SEED_STRIDE + step

    def _fill_with_informative(self, rollouts: Rollouts, step: int) -> tuple[Rollouts, int]:
        """Groups with different rewards in the place of those without, as long as max_gen_batches lets it."""
        wanted, num_batches = self._config.rollout.prompts_per_step, 1
        found, spare = rollouts.split_groups()
        while len(found) < wanted and num_batches < self._config.algorithm.max_gen_batches:
            prompts = self._task.prompts("train", wanted, self._seed(step) + num_batches * _GEN_BATCH_STRIDE)
            more, _ = self._generate(prompts, step).split_groups()
            found += more
            num_batches += 1
        return Rollouts.join((found + spare)[:wanted]), num_batches

    def _generate(self, prompts: list[str], step: int) -> Rollouts:
        section = self._config.rollout
        rollouts = generate_rollouts(
            self.engine,
            self._task,
            prompts,
            samples_per_prompt=section.samples_per_prompt,
            max_tokens=section.max_tokens,
            temperature=section.temperature,
            group=None if self._ranks is None else self._ranks.mesh.host_group,
        )
        self._probe.check(rollouts)
        if self._ranks is not None:  # before anything is decided by them
            check_rewards_agree(rollouts, self._ranks.mesh, step)
        return rollouts
