"""What a micro-batch minimizes: the algorithm's loss over packed response tokens, with and without correction."""

import dataclasses
from typing import Any, Self

import torch

from octavo.nn import HISTORY_BUFFER
from octavo.rl.config import AlgorithmSection
from octavo.rl.correction import CorrectionSection, correction_weights
from octavo.rl.losses import (
    PolicyTerms,
    cispo_terms,
    clipped_policy_terms,
    entropy_surrogate,
    gspo_terms,
    reference_kl,
)
from octavo.rl.metrics import correction_effect


@dataclasses.dataclass(frozen=True)
class TokenBatch:
    """What the loss of each response token needs besides its logprob; every tensor is [tokens] fp32.

    Attributes:
        rollout_logprobs: by the sampler.
        advantages: of each token's sequence.
        coefficients: what each token's loss is multiplied by in the sum; global over the optimizer step.
        old_logprobs: by the trainer before the step's first update; None where no update came between.
        reference_logprobs: by the reference policy, or None.
        sequence_ids: [tokens] int64, the sequence that each token is of; None where no loss asks for it.
        weights: importance weights that were made for the whole step; None for those that a token has by itself.
    """

    rollout_logprobs: torch.Tensor
    advantages: torch.Tensor
    coefficients: torch.Tensor
    old_logprobs: torch.Tensor | None = None
    reference_logprobs: torch.Tensor | None = None
    sequence_ids: torch.Tensor | None = None
    weights: torch.Tensor | None = None

    def narrow(self, start: int, stop: int) -> Self:
        """The tokens start to stop."""
        rows = slice(start, stop)
        fields: dict[str, Any] = {}
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            fields[field.name] = None if value is None else value[rows]
        return type(self)(**fields)


@dataclasses.dataclass(frozen=True)
class Objective:
    """A micro-batch's share of the loss.

    Attributes:
        loss: what is back-propagated.
        uncorrected_loss: the same without importance weights (the same tensor where there are none).
        sums: metric name -> this micro-batch's share; shares add up over an optimizer step.
    """

    loss: torch.Tensor
    uncorrected_loss: torch.Tensor
    sums: dict[str, float]


def policy_objective(
    logprobs: torch.Tensor, batch: TokenBatch, algorithm: AlgorithmSection, correction: CorrectionSection
) -> Objective:
    """The loss of one micro-batch.

    Args:
        logprobs: [tokens] fp32 with gradient, by the trainer.
    """
    now = logprobs.detach()
    old = now if batch.old_logprobs is None else batch.old_logprobs
    weights = batch.weights
    if weights is None and not correction.needs_whole_step:
        weights = correction_weights(correction, old, batch.rollout_logprobs)
    terms = _policy_terms(logprobs, old, batch, algorithm)

    def total(per_token: torch.Tensor) -> torch.Tensor:
        return (per_token * batch.coefficients).sum()

    uncorrected = total(terms.per_token)
    policy_loss = uncorrected if weights is None else total(terms.per_token * weights)
    penalty, sums = _penalties(logprobs, batch, algorithm)
    sums |= {
        "actor/pg_loss": float(policy_loss.detach()),
        "actor/pg_clipfrac": float(total(terms.is_clipped.float())),
        "actor/ppo_kl": float(total(old - now)),
    }
    if weights is not None:
        sums["correction/weight_mean"] = float(total(weights))
    if penalty is not None:
        uncorrected, policy_loss = uncorrected + penalty, policy_loss + penalty
    sums["actor/loss"] = float(policy_loss.detach())
    return Objective(policy_loss, uncorrected, sums)


def _policy_terms(
    logprobs: torch.Tensor, old: torch.Tensor, batch: TokenBatch, algorithm: AlgorithmSection
) -> PolicyTerms:
    bounds = {"clip_low": algorithm.clip_low, "clip_high": algorithm.clip_high}
    if algorithm.policy_loss == "cispo":
        return cispo_terms(logprobs, old, batch.advantages, **bounds)
    clip_c = algorithm.clip_c or None
    if algorithm.policy_loss == "gspo":
        assert batch.sequence_ids is not None, "the learner knows which token is whose"
        return gspo_terms(logprobs, old, batch.advantages, batch.sequence_ids, **bounds, clip_c=clip_c)
    return clipped_policy_terms(logprobs, old, batch.advantages, **bounds, clip_c=clip_c)


def _penalties(
    logprobs: torch.Tensor, batch: TokenBatch, algorithm: AlgorithmSection
) -> tuple[torch.Tensor | None, dict[str, float]]:
    """KL to the reference and entropy bonus, or None where neither is asked for."""
    per_token, sums = None, {}
    if batch.reference_logprobs is not None:
        kl = reference_kl(logprobs, batch.reference_logprobs)
        sums["actor/kl_loss"] = float((kl.detach() * batch.coefficients).sum())
        per_token = algorithm.kl_coef * kl
    if algorithm.entropy_coef:
        bonus = -algorithm.entropy_coef * entropy_surrogate(logprobs)
        per_token = bonus if per_token is None else per_token + bonus
    return None if per_token is None else (per_token * batch.coefficients).sum(), sums


class CorrectionProbe:
    """Measures what importance weights change: the gradients of both losses on the same rollouts.

    Args:
        model: whose trainable parameters the gradients are of.
    """

    def __init__(self, model: torch.nn.Module) -> None:
        self._params = [param for param in model.parameters() if param.requires_grad]
        self._without = [torch.zeros_like(param, dtype=torch.float32) for param in self._params]
        self._with = [torch.zeros_like(param, dtype=torch.float32) for param in self._params]
        self._losses = [0.0, 0.0]
        self._histories = [x for name, x in model.named_buffers() if name.endswith(HISTORY_BUFFER)]

    def add(self, objective: Objective) -> None:
        """Add a micro-batch's gradients; its graph stays for the backward pass that learns."""
        staged = [history[0].clone() for history in self._histories]
        pairs = ((self._without, objective.uncorrected_loss), (self._with, objective.loss))
        for index, (sums, loss) in enumerate(pairs):
            self._losses[index] += float(loss.detach())
            grads = torch.autograd.grad(loss, self._params, retain_graph=True, allow_unused=True)
            for total, grad in zip(sums, grads, strict=True):
                if grad is not None:
                    total += grad
        for history, row in zip(self._histories, staged, strict=True):
            history[0] = row  # a measurement leaves no trace in delayed scaling's state

    def metrics(self) -> dict[str, float]:
        """See octavo.rl.metrics.correction_effect."""
        return correction_effect(self._without, self._with, *self._losses)
