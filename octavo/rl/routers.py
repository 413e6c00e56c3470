"""The routers of the policy that trains: replayed choices, their losses' weight in each micro-batch, metrics."""

import contextlib

from octavo.models import Decoder
from octavo.rl.config import RLConfig
from octavo.rl.rollout_batch import Rollouts
from octavo.rl.router_replay import RouterReplay
from octavo.run.build import watch_routers


class PolicyRouters:
    """What the learner does about routers; nothing for a dense policy.

    Args:
        model: the policy that trains.
    Raises:
        ConfigError: router losses or router replay for a policy without experts.
    """

    def __init__(self, model: Decoder, config: RLConfig) -> None:
        self._watch = watch_routers(model, config.model, measures=True)
        self.replay = RouterReplay(model) if config.router_replay else None

    def scoring(self, rollouts: Rollouts) -> contextlib.AbstractContextManager[None]:
        """Within, the policy scores these rollouts before any update."""
        return contextlib.nullcontext() if self.replay is None else self.replay.of(rollouts)

    def training(
        self, rollouts: Rollouts, num_tokens: int, *, is_on_policy: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Within, forward and backward of a micro-batch.

        Args:
            rollouts: its sequences. num_tokens: of the whole optimizer step's sequences, prompts included.
        """
        self._watch.scale(sum(map(len, rollouts.sequences)) / max(num_tokens, 1))
        return contextlib.nullcontext() if self.replay is None else self.replay.of(rollouts, is_counted=is_on_policy)

    def metrics(self) -> dict[str, float]:
        """router/... (see octavo.nn.load_balance.metrics_of) and router_replay/..., of what was trained on."""
        found = {f"router/{name}": value for name, value in self._watch.metrics().items()}
        return found if self.replay is None else found | self.replay.metrics()
