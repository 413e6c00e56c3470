"""One step of the reinforcement loop: sample (or take what was sampled ahead), learn, refit; and its metrics."""

import torch

from octavo.rl.advantage import grpo_advantages, overlong_penalty, rloo_advantages
from octavo.rl.asynchronous import AsyncEngine, RolloutProducer
from octavo.rl.batches import BatchSampler, equal_groups
from octavo.rl.config import RLConfig
from octavo.rl.learner import Learner, Update
from octavo.rl.metrics import reward_metrics
from octavo.rl.phases import PhaseMeter
from octavo.rl.progress import RLProgress
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.rollout_worker import RolloutWorker
from octavo.run.energy import energy_counter

_EQUAL_REMINDER = 10  # steps in a row without anything to learn, after which it is said again


class Stepper:
    """Makes a run's steps from its parts.

    Attributes:
        last_rollouts, last_update: of the last step; unset before the first.
    """

    last_rollouts: Rollouts
    last_update: Update

    def __init__(
        self, config: RLConfig, side: RolloutWorker, batches: BatchSampler, learner: Learner, progress: RLProgress
    ) -> None:
        self.config, self.side, self.batches, self.learner, self.progress = config, side, batches, learner, progress
        self._producer: RolloutProducer | None = None
        self._num_equal_steps = 0  # in a row
        self._joules, _ = energy_counter(learner.model.device)

    def close(self) -> None:
        """Stop sampling ahead."""
        if self._producer is not None:
            self._producer.close()

    def start_sampling(self, first_step: int) -> None:
        """In asynchronous mode: the thread that samples ahead."""
        if not isinstance(self.side.engine, AsyncEngine):
            return
        self._producer = RolloutProducer(
            self.batches.sample,
            self.side.engine,
            first_step=first_step,
            last_step=self.config.trainer.steps,
            max_policy_lag=self.config.asynchronous.max_policy_lag,
            weight_version=self.learner.model.weight_version,
        )
        self._producer.start()

    def step(self, step: int) -> dict[str, float]:
        """Sample, score, learn, refit."""
        meter = PhaseMeter(self._joules)
        rollouts, lag = self._producer.take(step) if self._producer else (self.batches.sample(step), {})
        self.last_rollouts = rollouts
        advantages = self._advantages(rollouts)
        policy_lag = self.learner.model.weight_version - rollouts.weight_versions
        num_equal, num_groups = equal_groups(rollouts)
        self._num_equal_steps = self._num_equal_steps + 1 if num_equal == num_groups else 0
        if self._num_equal_steps in (1, _EQUAL_REMINDER):
            self.progress.say(
                f"step {step}: the rewards of each of the {num_groups} groups are all equal, so nothing can be learned "
                "from them; look at the task's difficulty, or set algorithm.filter_groups = true"
            )
        meter.end("gen")
        update = self.last_update = self.learner.learn(rollouts, advantages, step)
        meter.end("update_actor")
        kv_metrics = self.side.finish_step(rollouts)
        report = self.side.refit(rollouts)
        if self._producer is not None:
            self._producer.note_published(report.weight_version)
        meter.end("refit")
        return {
            **reward_metrics(rollouts.rewards, advantages, rollouts.response_lens, rollouts.rollout_logprobs),
            **update.metrics,
            **kv_metrics,
            **lag,
            "reward/equal_groups_share": num_equal / num_groups,
            "response/finished_share": float(rollouts.is_finished.float().mean()),
            "mismatch/policy_lag_max": float(policy_lag.max()),
            "rollout/num_gen_batches": float(self.batches.take_num_gen_batches(step)),
            "refit/weight_version": float(report.weight_version),
            "refit/bytes": float(report.num_bytes),
            **{f"engine/{name}": value for name, value in self.side.engine.stats().items()},
            **meter.metrics(),
            "perf/tokens_per_s": sum(map(len, rollouts.sequences)) / meter.seconds,
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
