"""A step's rollouts: its prompts, sampled and scored, filled up by dynamic sampling and shuffled."""

import torch

from octavo.errors import DataError
from octavo.rl.config import RLConfig
from octavo.rl.engines.probe import LogprobProbe
from octavo.rl.rollout import generate_rollouts
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.rollout_worker import RolloutWorker
from octavo.rl.tasks import Task

_SEED_STRIDE = 1_000_003  # keeps the prompts of one seed's steps apart from those of the next seed
_GEN_BATCH_STRIDE = 1_000_000_007  # and those that dynamic sampling adds from all of them


class BatchSampler:
    """Samples steps; a step's prompts follow from the run's seed and its number alone.

    Args:
        side: who samples.
    """

    def __init__(self, config: RLConfig, side: RolloutWorker, task: Task) -> None:
        self._config, self._side, self._task = config, side, task
        self._probe = LogprobProbe(
            side.sampler,
            num_sequences=config.engine.probe_sequences if side.engine.is_remote else 0,
            temperature=config.rollout.temperature,
            tolerance=config.engine.probe_tolerance,
        )
        self._num_gen_batches: dict[int, int] = {}

    def sample(self, step: int) -> Rollouts:
        """The step's rollouts, in an order in which every minibatch mixes prompts.

        Raises:
            DataError: a reward that is no finite number. What generate_rollouts raises.
        """
        config, seed = self._config, self._seed(step)
        rollouts, num_batches = self._generate(seed), 1
        if config.algorithm.filter_groups:
            rollouts, num_batches = self._fill_with_informative(rollouts, seed)
        _check_rewards(rollouts, step)
        self._num_gen_batches[step] = num_batches
        return rollouts.shuffled(seed) if config.trainer.minibatches > 1 else rollouts

    def prompts(self, step: int) -> list[str]:
        """The prompts of a step's first batch."""
        return self._task.prompts("train", self._config.rollout.prompts_per_step, self._seed(step))

    def take_num_gen_batches(self, step: int) -> int:
        """How many batches a step took; once."""
        return self._num_gen_batches.pop(step)

    def _seed(self, step: int) -> int:
        return self._config.run.seed * _SEED_STRIDE + step

    def _fill_with_informative(self, rollouts: Rollouts, seed: int) -> tuple[Rollouts, int]:
        """Groups with different rewards in the place of those without, as long as max_gen_batches lets it."""
        wanted, num_batches = self._config.rollout.prompts_per_step, 1
        found, spare = rollouts.split_groups()
        while len(found) < wanted and num_batches < self._config.algorithm.max_gen_batches:
            more, _ = self._generate(seed + num_batches * _GEN_BATCH_STRIDE).split_groups()
            found += more
            num_batches += 1
        return Rollouts.join((found + spare)[:wanted]), num_batches

    def _generate(self, seed: int) -> Rollouts:
        section = self._config.rollout
        rollouts = generate_rollouts(
            self._side.engine,
            self._task,
            self._task.prompts("train", section.prompts_per_step, seed),
            samples_per_prompt=section.samples_per_prompt,
            max_tokens=section.max_tokens,
            temperature=section.temperature,
        )
        self._probe.check(rollouts)
        return rollouts


def equal_groups(rollouts: Rollouts) -> tuple[int, int]:
    """(groups whose rewards are all equal, which teach nothing; groups)."""
    groups = rollouts.group_ids.unique()
    equal = sum(len(rollouts.rewards[rollouts.group_ids == group].unique()) == 1 for group in groups)
    return equal, len(groups)


def _check_rewards(rollouts: Rollouts, step: int) -> None:
    bad = (~torch.isfinite(rollouts.rewards)).nonzero().flatten()
    if len(bad):
        i = int(bad[0])
        raise DataError(
            f"step {step}, sequence {i} (prompt {rollouts.prompts[i]!r}): the reward is {float(rollouts.rewards[i])}, "
            "and a reward must be a finite number; mend the verifier or the environment. Nothing was updated"
        )
