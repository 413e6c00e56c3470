"""What a step reports: how far trainer and sampler are apart, importance weights, rewards, lengths, entropy.

Names are verl's where verl has one (`training/...`, `rollout_corr/...`); `mismatch/...` are octavo's own.
"""

import torch

from octavo.rl.correction import LOG_RATIO_BOUND


def mismatch_metrics(
    trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, response_lens: list[int], cap: float = 2.0
) -> dict[str, float]:
    """All of mismatch, weight and perplexity metrics of one batch of rollouts.

    Args:
        trainer_logprobs, rollout_logprobs: [tokens] fp32, packed, under the same weights.
        response_lens: tokens of each sequence, in order.
        cap: the threshold that "high", "low" and the clamped weights refer to.
    Returns:
        metric name -> number.
    """
    trainer, rollout = trainer_logprobs.detach().double(), rollout_logprobs.detach().double()
    return (
        _logprob_metrics(trainer, rollout)
        | _probability_metrics(trainer, rollout)
        | _sequence_metrics(trainer, rollout, response_lens)
        | _weight_metrics(trainer - rollout, cap)
    )


def _logprob_metrics(trainer: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """KL estimators over sampled tokens: k1 may be negative, k3 may not. `d` = log(pi_trainer / pi_rollout)."""
    d = trainer - rollout
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "rollout_corr/kl": _number((-d).mean()),
        "rollout_corr/k3_kl": _number((torch.expm1(bounded) - bounded).mean()),
        "rollout_corr/chi2_token": _number((2 * bounded).exp().mean() - 1),
        "mismatch/logprob_abs_diff_max": _number(d.abs().max()),
        "mismatch/logprob_abs_diff_mean": _number(d.abs().mean()),
        "mismatch/tokens_differing_share": _number((d != 0).double().mean()),
    }


def _probability_metrics(trainer: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """Differences of probabilities, not logprobs: verl's names mean that."""
    p, q = trainer.exp(), rollout.exp()
    difference = (p - q).abs()
    return {
        "training/rollout_probs_diff_mean": _number(difference.mean()),
        "training/rollout_probs_diff_max": _number(difference.max()),
        "training/rollout_probs_diff_std": _number(difference.std()) if p.numel() > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
    }


def _sequence_metrics(trainer: torch.Tensor, rollout: torch.Tensor, response_lens: list[int]) -> dict[str, float]:
    t_mean = torch.stack([part.mean() for part in trainer.split(response_lens)])  # [sequences]
    r_mean = torch.stack([part.mean() for part in rollout.split(response_lens)])  # [sequences]
    sums = torch.stack([part.sum() for part in (trainer - rollout).split(response_lens)])  # [sequences]
    gap = r_mean - t_mean
    return {
        "rollout_corr/training_ppl": _number((-t_mean).exp().mean()),
        "rollout_corr/rollout_ppl": _number((-r_mean).exp().mean()),
        "rollout_corr/ppl_ratio": _number(gap.exp().mean()),
        "rollout_corr/log_ppl_diff": _number(gap.mean()),
        "rollout_corr/log_ppl_abs_diff": _number(gap.abs().mean()),
        "rollout_corr/log_ppl_diff_max": _number(gap.max()),
        "rollout_corr/log_ppl_diff_min": _number(gap.min()),
        "rollout_corr/chi2_seq": _number((2 * sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp().mean() - 1),
    }


def _weight_metrics(log_ratio: torch.Tensor, cap: float) -> dict[str, float]:
    """Mean, min and max of the raw weights; std and effective sample size of those clamped to [1 / cap, cap]."""
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()  # [tokens]
    clamped = raw.clamp(1.0 / cap, cap)
    normalized = clamped / clamped.mean()
    return {
        "rollout_corr/rollout_is_mean": _number(raw.mean()),
        "rollout_corr/rollout_is_min": _number(raw.min()),
        "rollout_corr/rollout_is_max": _number(raw.max()),
        "rollout_corr/rollout_is_std": _number(clamped.std(correction=0)),
        "rollout_corr/rollout_is_eff_sample_size": _number(1.0 / normalized.square().mean()),
        "rollout_corr/rollout_is_ratio_fraction_high": _number((raw > cap).double().mean()),
        "rollout_corr/rollout_is_ratio_fraction_low": _number((raw < 1.0 / cap).double().mean()),
    }


def reward_metrics(
    rewards: torch.Tensor, advantages: torch.Tensor, response_lens: list[int], rollout_logprobs: torch.Tensor
) -> dict[str, float]:
    """Reward, length and entropy of a batch of rollouts.

    Entropy is the mean of -logprob over sampled tokens: an unbiased estimate under the sampler's own distribution.

    Args:
        rewards, advantages: [sequences]. rollout_logprobs: [tokens].
    """
    lens = torch.tensor(response_lens, dtype=torch.float64)
    return {
        "reward/mean": _number(rewards.double().mean()),
        "reward/max": _number(rewards.double().max()),
        "reward/informative_share": _number((advantages != 0).double().mean()),
        "response_length/mean": _number(lens.mean()),
        "response_length/max": _number(lens.max()),
        "actor/entropy": _number(-rollout_logprobs.double().mean()),
    }


def correction_effect(
    plain: list[torch.Tensor], corrected: list[torch.Tensor], plain_loss: float, corrected_loss: float
) -> dict[str, float]:
    """What the importance weights changed on the very same rollouts.

    Args:
        plain, corrected: the gradients of all parameters without and with the weights.
        plain_loss, corrected_loss: the two losses.
    """
    without, with_weights = (torch.cat([grad.double().flatten() for grad in grads]) for grads in (plain, corrected))
    norm_plain, norm_corrected = without.norm(), with_weights.norm()
    cosine = (without @ with_weights) / (norm_plain * norm_corrected).clamp_min(1e-30)
    gap = (without - with_weights).norm()
    return {
        "correction/loss_without": plain_loss,
        "correction/loss_with": corrected_loss,
        "correction/grad_norm_without": _number(norm_plain),
        "correction/grad_norm_with": _number(norm_corrected),
        "correction/grad_cosine": _number(cosine),
        "correction/grad_relative_change": _number(gap / norm_plain.clamp_min(1e-30)),
    }


def _pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    """Correlation; 1 where the two are equal, 0 where one of them is constant."""
    if torch.equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    scale = x.norm() * y.norm()
    return _number((x * y).sum() / scale) if scale > 0 else 0.0


def _number(value: torch.Tensor | float) -> float:
    return float(value)
