"""Rollout correction: importance weights for tokens that another numerics sampled than the one that trains.

In exact mode both sides agree bit for bit, every weight is 1 and nothing needs correcting.
"""

from collections.abc import Callable
from typing import Literal, NamedTuple, Self

import torch
from pydantic import Field, NonNegativeInt, PositiveFloat, model_validator

from octavo.config import Config

LOG_RATIO_BOUND = 20.0  # keeps exp finite; a token beyond it is broken, not unlikely


class CorrectionSection(Config):
    """What is done about a sampler whose numerics are not the trainer's.

    Args:
        kind: "none", or weights: "token_tis" and "sequence_tis" (truncated importance sampling, token by token or of
            the whole sequence), "icepop" (the ratio between low and cap, 0 outside).
        cap: the largest weight.
        low: of icepop.
        reject: "none", or what leaves the loss for a ratio outside [reject_low, reject_high]: single tokens ("token"),
            sequences by the product of their ratios ("sequence"), by its geometric mean ("geometric"), or by a mean k3
            above reject_high ("k3").
        veto: sequences with a token whose ratio is below it leave the loss; 0 for none.
        batch_normalize: divide the weights by their mean over the step.
        effect_every: steps between measurements of loss and gradient with and without the weights, on the same
            rollouts (two more backward passes of the first minibatch); 0 for none.
    """

    kind: Literal["none", "token_tis", "sequence_tis", "icepop"] = "none"
    cap: float = Field(default=2.0, ge=1.0)
    low: float = Field(default=0.5, gt=0.0, le=1.0)
    reject: Literal["none", "token", "sequence", "geometric", "k3"] = "none"
    reject_low: float = Field(default=0.5, gt=0.0, le=1.0)
    reject_high: PositiveFloat = 2.0
    veto: float = Field(default=0.0, ge=0.0, lt=1.0)
    batch_normalize: bool = False
    effect_every: NonNegativeInt = 0

    @property
    def needs_whole_step(self) -> bool:
        """Whether it needs all tokens' logprobs before the first backward pass."""
        return self.reject != "none" or self.veto > 0 or self.batch_normalize or self.kind == "sequence_tis"

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.batch_normalize and self.kind == "none":
            raise ValueError(
                "correction.batch_normalize has no weights to divide: kind is 'none'; set kind = 'token_tis'"
            )
        if self.reject in ("token", "sequence", "geometric") and self.reject_high < 1.0:
            raise ValueError(
                f"correction.reject_high={self.reject_high} would reject tokens on which both sides agree (ratio 1); "
                "give at least 1"
            )
        return self


def log_importance_ratio(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
    """log(pi_trainer / pi_rollout), clamped to +-20, without gradient.

    Args:
        trainer_logprobs: [tokens] fp32.
        rollout_logprobs: [tokens] fp32, of the same tokens under the same weights.
    Returns:
        [tokens] fp32.
    """
    difference = trainer_logprobs.detach().float() - rollout_logprobs.detach().float()
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_tis_weights(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Token-level truncated importance sampling: min(pi_trainer / pi_rollout, cap), a constant to autograd.

    Args:
        trainer_logprobs: [tokens] fp32.
        rollout_logprobs: [tokens] fp32.
        cap: upper bound of a weight; there is no lower one.
    Returns:
        [tokens] fp32 in (0, cap].
    Source:
        FP8-RL (arXiv 2601.18150), which recommends cap 2 for every FP8 rollout.
    """
    return log_importance_ratio(trainer_logprobs, rollout_logprobs).exp().clamp(max=cap)


def icepop_weights(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, low: float = 0.5, high: float = 5.0
) -> torch.Tensor:
    """IcePop: the ratio itself where low <= pi_trainer / pi_rollout <= high, else 0; [tokens] fp32, a constant.

    Source:
        IcePop (Ring-1T's report, arXiv 2510.18855).
    """
    ratio = log_importance_ratio(trainer_logprobs, rollout_logprobs).exp()
    return torch.where((ratio >= low) & (ratio <= high), ratio, 0.0)


def sequence_tis_weights(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_lens: list[int], cap: float = 2.0
) -> torch.Tensor:
    """Sequence-level truncated importance sampling: min(product of the ratios, cap) at every token of a sequence.

    Unbiased but for the cap, and of a variance that grows with the length. [tokens] fp32, a constant.
    """
    sums = _by_sequence(log_importance_ratio(trainer_logprobs, rollout_logprobs), response_lens, torch.sum)
    weights = sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp().clamp(max=cap)
    return _spread(weights, response_lens)


def kept_tokens(
    kind: str,
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_lens: list[int],
    low: float,
    high: float,
) -> torch.Tensor:
    """Which tokens rejection leaves; the bounds are of the ratio pi_trainer / pi_rollout itself, not of its inverse.

    Args:
        kind: "token" (each token by its own ratio), "sequence" (all of a sequence by the product of its ratios),
            "geometric" (by their geometric mean, which no length drives away from 1), or "k3" (by the mean of
            ratio - 1 - log ratio, which is never negative: low has no say).
    Returns:
        [tokens] bool.
    """
    log_ratio = log_importance_ratio(trainer_logprobs, rollout_logprobs)
    if kind == "token":
        return _is_between(log_ratio.exp(), low, high)
    if kind == "k3":
        means = _by_sequence(torch.expm1(log_ratio) - log_ratio, response_lens, torch.mean)
        return _spread(means <= high, response_lens)
    reduce: Callable[[torch.Tensor], torch.Tensor] = torch.sum if kind == "sequence" else torch.mean
    ratios = _by_sequence(log_ratio, response_lens, reduce).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()
    return _spread(_is_between(ratios, low, high), response_lens)


def unvetoed_tokens(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_lens: list[int], floor: float
) -> torch.Tensor:
    """The tokens of sequences in which no token's ratio is below the floor: [tokens] bool."""
    ratio = log_importance_ratio(trainer_logprobs, rollout_logprobs).exp()
    return _spread(_by_sequence(ratio, response_lens, torch.min) >= floor, response_lens)


class Correction(NamedTuple):
    """What correction makes of a step's tokens.

    Attributes:
        weights: [tokens] fp32, 0 where rejected; None for all ones.
        is_kept: [tokens] bool; None for all.
        metrics: how much was rejected, and the mean that weights were divided by, under verl's names: of what the veto
            drops "rollout_token_veto_fraction" counts tokens, "rollout_is_veto_fraction" sequences, and
            "rollout_is_catastrophic_token_fraction" the tokens below the floor themselves.
    """

    weights: torch.Tensor | None
    is_kept: torch.Tensor | None
    metrics: dict[str, float]


def correct(
    section: CorrectionSection,
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_lens: list[int],
) -> Correction:
    """Weights and rejections of a whole step: rejection first, then weights, then their mean over what is left to 1."""
    pair = (trainer_logprobs.detach(), rollout_logprobs)
    is_kept = None
    metrics = {}
    if section.reject != "none":
        is_kept = kept_tokens(section.reject, *pair, response_lens, section.reject_low, section.reject_high)
        metrics[f"rollout_corr/rollout_rs_{section.reject}_masked_fraction"] = _share(~is_kept)
    if section.veto:
        unvetoed = unvetoed_tokens(*pair, response_lens, section.veto)
        metrics["rollout_corr/rollout_token_veto_fraction"] = _share(~unvetoed)
        vetoed = _by_sequence((~unvetoed).float(), response_lens, torch.max)
        metrics["rollout_corr/rollout_is_veto_fraction"] = _share(vetoed > 0)
        is_below = ~(log_importance_ratio(*pair).exp() >= section.veto)  # so written that NaN is below
        metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] = _share(is_below)
        is_kept = unvetoed if is_kept is None else is_kept & unvetoed
    if is_kept is not None:
        metrics["rollout_corr/rollout_rs_masked_fraction"] = _share(~is_kept)
        whole = _by_sequence(is_kept.float(), response_lens, torch.max)
        metrics["rollout_corr/rollout_rs_seq_masked_fraction"] = _share(whole == 0)
    weights = correction_weights(section, *pair, response_lens)
    if weights is not None and is_kept is not None:
        weights = torch.where(is_kept, weights, 0.0)
    if weights is not None and section.batch_normalize:
        counted = weights if is_kept is None else weights[is_kept]
        mean = (counted.mean() if counted.numel() else weights.new_ones(())).clamp_min(1e-8)
        weights = weights / mean
        metrics["rollout_corr/rollout_is_batch_norm_factor"] = float(mean)
    return Correction(weights, is_kept, metrics)


def correction_weights(
    section: CorrectionSection,
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_lens: list[int] | None = None,
) -> torch.Tensor | None:
    """The weights that `correction.kind` asks for: None for "none".

    Args:
        response_lens: needed by "sequence_tis" alone.
    """
    if section.kind == "none":
        return None
    if section.kind == "token_tis":
        return token_tis_weights(trainer_logprobs, rollout_logprobs, section.cap)
    if section.kind == "icepop":
        return icepop_weights(trainer_logprobs, rollout_logprobs, section.low, section.cap)
    assert section.kind == "sequence_tis", f"unknown correction {section.kind!r} passed the config"
    assert response_lens is not None, "a sequence's weight needs to know where it ends"
    return sequence_tis_weights(trainer_logprobs, rollout_logprobs, response_lens, section.cap)


def _is_between(ratio: torch.Tensor, low: float, high: float) -> torch.Tensor:
    return (ratio >= low) & (ratio <= high)


def _by_sequence(
    per_token: torch.Tensor, response_lens: list[int], reduce: Callable[[torch.Tensor], torch.Tensor]
) -> torch.Tensor:
    """One number a sequence; those without tokens have 0."""
    parts = per_token.split(response_lens)
    return torch.stack([reduce(part) if part.numel() else per_token.new_zeros(()) for part in parts])


def _spread(per_sequence: torch.Tensor, response_lens: list[int]) -> torch.Tensor:
    """A sequence's number at each of its tokens."""
    return per_sequence.repeat_interleave(torch.tensor(response_lens, device=per_sequence.device))


def _share(mask: torch.Tensor) -> float:
    return float(mask.double().mean()) if mask.numel() else 0.0
