"""The routers of the policy that trains, and router replay (R3), which sends tokens to the sampler's experts.

The weights of replayed choices are the trainer's own, of its own logits, so that routers learn. Replay is for engines
that do not compute as the trainer does; exact mode makes the same choices by itself.
Source:
    Ma et al. 2025, "Stabilizing MoE Reinforcement Learning by Aligning Training and Inference Routers".
"""

import contextlib
import functools
from collections.abc import Iterator

import torch

from octavo.errors import ConfigError
from octavo.models import Decoder
from octavo.nn.load_balance import metrics_of
from octavo.nn.router_watch import sparse_blocks
from octavo.rl.config import RLConfig
from octavo.rl.rollout_batch import Rollouts
from octavo.run.build import watch_routers
from octavo.weights.errors import EngineAnswerError


class PolicyRouters:
    """What the learner does about routers; nothing for a dense policy.

    Args:
        model: the policy that trains.
    Raises:
        ConfigError: router losses or router replay for a policy without experts.
    """

    def __init__(self, model: Decoder, config: RLConfig) -> None:
        self._watch = watch_routers(model, config.model, measures=True)
        self._sums: torch.Tensor | None = None
        self.replay = RouterReplay(model) if config.router_replay else None

    def scoring(self, rollouts: Rollouts) -> contextlib.AbstractContextManager[None]:
        """Within, the policy scores these rollouts before any update."""
        return contextlib.nullcontext() if self.replay is None else self.replay.of(rollouts)

    def training(
        self, rollouts: Rollouts, num_tokens: int, *, is_on_policy: bool
    ) -> contextlib.AbstractContextManager[None]:
        """Within, forward and backward of a micro-batch.

        Args:
            rollouts: its sequences.
            num_tokens: of the whole optimizer step's sequences, prompts included.
        """
        self._watch.scale(sum(map(len, rollouts.sequences)) / max(num_tokens, 1))
        return contextlib.nullcontext() if self.replay is None else self.replay.of(rollouts, is_counted=is_on_policy)

    def take(self) -> torch.Tensor | None:
        """What the routers chose in the last micro-batch, where the model is; None for a dense policy."""
        return self._watch.take()

    def add(self, sums: torch.Tensor | None) -> None:
        """Count a micro-batch, taken on any rank and moved to the CPU."""
        if sums is not None:
            self._sums = sums if self._sums is None else self._sums + sums

    def metrics(self) -> dict[str, float]:
        """router/... (see octavo.nn.load_balance.metrics_of) of what was added, and router_replay/... of what was
        trained on."""
        sums, self._sums = self._sums, None
        found = {} if sums is None else {f"router/{name}": value for name, value in metrics_of(sums).items()}
        return found if self.replay is None else found | self.replay.metrics()


class RouterReplay:
    """Makes a model compute rollouts with their own experts, and counts where it would have chosen others.

    Args:
        model: with experts.
    Raises:
        ConfigError: a model without.
    """

    def __init__(self, model: Decoder) -> None:
        self._device, self._num_experts = model.device, model.config.num_experts
        self._blocks = sparse_blocks(model)
        if not self._blocks:
            raise ConfigError("a router replay replays the choice of experts, and this model has none")
        self._num_pairs = 0  # of token and layer
        self._flipped = torch.zeros(2, dtype=torch.int64, device=self._device)  # pairs, choices

    @contextlib.contextmanager
    def of(self, rollouts: Rollouts, *, is_counted: bool = True) -> Iterator[None]:
        """Within, the model's forward passes and their backward are over the packed tokens of these rollouts.

        Args:
            is_counted: what differs goes into the metrics: only where the weights are still the sampler's.
        Raises:
            EngineAnswerError: a sequence without the experts of each of its tokens.
        """
        chosen = self._packed(rollouts).to(self._device, torch.int64)
        for layer, block in enumerate(self._blocks):
            block.replay = functools.partial(self._choose, chosen[:, layer].contiguous(), is_counted)
        try:
            yield
        finally:
            for block in self._blocks:
                block.replay = None

    def metrics(self) -> dict[str, float]:
        """Shares of what was counted since the last call; empty where nothing was.

        Returns:
            "router_replay/flipped_tokens_share": of (token, layer) pairs, those in which the trainer's own router would
            have chosen any other expert; "router_replay/flipped_choices_share": of all choices, those that differ.
        """
        if not self._num_pairs:
            return {}
        pairs, choices = (self._flipped.double() / self._num_pairs).tolist()
        self._num_pairs = 0
        self._flipped.zero_()
        return {
            "router_replay/flipped_tokens_share": pairs,
            "router_replay/flipped_choices_share": choices / self._blocks[0].num_experts_per_tok,
        }

    def _choose(self, chosen: torch.Tensor, is_counted: bool, own: torch.Tensor) -> torch.Tensor:
        """SparseMoE.replay: the sampler's choice [T, S] in the place of the router's own."""
        if own.shape != chosen.shape:
            raise EngineAnswerError(
                f"the sampler's experts are of {tuple(chosen.shape)} (tokens, experts a token), the trainer's batch "
                f"has {tuple(own.shape)}"
            )
        if is_counted:
            differs = (chosen[:, :, None] != own[:, None, :]).all(dim=2)  # [T, S]
            self._num_pairs += len(own)
            self._flipped += torch.stack([differs.any(dim=1).sum(), differs.sum()])
        return chosen

    def _packed(self, rollouts: Rollouts) -> torch.Tensor:
        """[tokens that are computed, L, S], checked."""
        given = rollouts.routed_experts
        if len(given) != len(rollouts):
            raise EngineAnswerError(
                f"router_replay = true: {len(given)} of {len(rollouts)} sequences came with the experts of their tokens"
            )
        inner = (len(self._blocks), self._blocks[0].num_experts_per_tok)
        for index, (ids, experts) in enumerate(zip(rollouts.sequences, given, strict=True)):
            if tuple(experts.shape) != (len(ids) - 1, *inner):
                raise EngineAnswerError(
                    f"sequence {index} has {len(ids)} tokens; experts of shape {(len(ids) - 1, *inner)} (tokens but "
                    f"the last, layers, experts a token) are needed, got {tuple(experts.shape)}"
                )
        packed = torch.cat(given)
        ranked = packed.sort(dim=-1).values
        is_twice = (ranked[..., 1:] == ranked[..., :-1]).any()
        if packed.numel() and (is_twice or int(ranked.min()) < 0 or int(ranked.max()) >= self._num_experts):
            raise EngineAnswerError(
                f"the experts of a token must be different ones of 0 to {self._num_experts - 1}; the engine sent "
                f"{int(ranked.min())} to {int(ranked.max())}{', one of them twice for a token' if is_twice else ''}"
            )
        return packed
