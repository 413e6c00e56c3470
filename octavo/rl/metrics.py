"""What a step reports: how far trainer and sampler are apart, importance weights, rewards, lengths, entropy.

Names are verl's where verl has one (`training/...`, `rollout_corr/...`); `mismatch/...` are octavo's own.
"""

from collections import Counter
from collections.abc import Sequence

import torch

from octavo.errors import ShapeError
from octavo.rl.correction import LOG_RATIO_BOUND

_MIN_REPETITION_LEN, _REPETITION_SHARE = 32, 0.9


def mismatch_metrics(
    trainer_logprobs: torch.Tensor,
    rollout_logprobs: torch.Tensor,
    response_lens: list[int],
    cap: float = 2.0,
    low: float | None = None,
) -> dict[str, float]:
    """All of mismatch, weight and perplexity metrics of one batch of rollouts.

    Args:
        trainer_logprobs: [tokens] fp32, packed.
        rollout_logprobs: [tokens] fp32, packed, under the same weights.
        response_lens: tokens of each sequence, in order.
        cap: the upper bound that "high" and the clamped weights refer to.
        low: the lower bound that "low" and the clamped weights refer to; 1 / cap unless a correction has one of its own
            (IcePop), and then the share outside of both is "rollout_is_oob_ratio".
    Returns:
        metric name -> number. A response without tokens has no say.
    Raises:
        ShapeError: no tokens at all, or logprobs that are not those of the responses.
    Source:
        verl's rollout correction metrics, but for `mismatch/...`; `mismatch/token_mult_prob_error` is NeMo-RL's.
    """
    trainer, rollout = trainer_logprobs.detach().double(), rollout_logprobs.detach().double()
    lens = [length for length in response_lens if length]
    if not lens or trainer.shape != rollout.shape or trainer.shape[0] != sum(lens):
        raise ShapeError(
            f"mismatch is measured over the tokens of both sides, at least one; got {tuple(trainer.shape)} and "
            f"{tuple(rollout.shape)} logprobs for responses of {sum(lens)} tokens"
        )
    return (
        _logprob_metrics(trainer, rollout)
        | _probability_metrics(trainer, rollout)
        | _sequence_metrics(trainer, rollout, lens)
        | _weight_metrics(trainer - rollout, low or 1.0 / cap, cap, has_band=low is not None)
        | _sequence_weight_metrics(trainer - rollout, lens, low or 1.0 / cap, cap)
    )


def _logprob_metrics(trainer: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """KL estimators over sampled tokens: k1 may be negative, k3 may not. `d` = log(pi_trainer / pi_rollout)."""
    d = trainer - rollout
    bounded = d.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return {
        "rollout_corr/kl": float((-d).mean()),
        "rollout_corr/k3_kl": float((torch.expm1(bounded) - bounded).mean()),
        "rollout_corr/chi2_token": float((2 * bounded).exp().mean() - 1),
        "mismatch/token_mult_prob_error": float(bounded.abs().exp().mean()),
        "mismatch/logprob_abs_diff_max": float(d.abs().max()),
        "mismatch/logprob_abs_diff_mean": float(d.abs().mean()),
        "mismatch/tokens_differing_share": float((d != 0).double().mean()),
    }


def _probability_metrics(trainer: torch.Tensor, rollout: torch.Tensor) -> dict[str, float]:
    """Differences of probabilities, not logprobs: verl's names mean that."""
    p, q = trainer.exp(), rollout.exp()
    difference = (p - q).abs()
    return {
        "training/rollout_probs_diff_mean": float(difference.mean()),
        "training/rollout_probs_diff_max": float(difference.max()),
        "training/rollout_probs_diff_std": float(difference.std()) if p.numel() > 1 else 0.0,
        "training/rollout_actor_probs_pearson_corr": _pearson(p, q),
    }


def _sequence_metrics(trainer: torch.Tensor, rollout: torch.Tensor, response_lens: list[int]) -> dict[str, float]:
    t_mean = torch.stack([part.mean() for part in trainer.split(response_lens)])  # [sequences]
    r_mean = torch.stack([part.mean() for part in rollout.split(response_lens)])  # [sequences]
    sums = torch.stack([part.sum() for part in (trainer - rollout).split(response_lens)])  # [sequences]
    gap = r_mean - t_mean
    return {
        "rollout_corr/training_ppl": float((-t_mean).exp().mean()),
        "rollout_corr/training_log_ppl": float(-t_mean.mean()),
        "rollout_corr/rollout_ppl": float((-r_mean).exp().mean()),
        "rollout_corr/rollout_log_ppl": float(-r_mean.mean()),
        "rollout_corr/ppl_ratio": float(gap.exp().mean()),
        "rollout_corr/log_ppl_diff": float(gap.mean()),
        "rollout_corr/log_ppl_abs_diff": float(gap.abs().mean()),
        "rollout_corr/log_ppl_diff_max": float(gap.max()),
        "rollout_corr/log_ppl_diff_min": float(gap.min()),
        "rollout_corr/chi2_seq": float((2 * sums.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)).exp().mean() - 1),
    }


def _weight_metrics(log_ratio: torch.Tensor, low: float, cap: float, *, has_band: bool) -> dict[str, float]:
    """Mean, min and max of the raw weights; std and effective sample size of those clamped to [low, cap]."""
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()  # [tokens]
    clamped = raw.clamp(low, cap)
    high_share, low_share = (float(outside.double().mean()) for outside in (raw > cap, raw < low))
    oob = {"rollout_corr/rollout_is_oob_ratio": high_share + low_share} if has_band else {}
    return oob | {
        "rollout_corr/rollout_is_mean": float(raw.mean()),
        "rollout_corr/rollout_is_min": float(raw.min()),
        "rollout_corr/rollout_is_max": float(raw.max()),
        "rollout_corr/rollout_is_std": float(clamped.std(correction=0)),
        "rollout_corr/rollout_is_eff_sample_size": _effective_share(clamped),
        # of the raw ones too: clamped to [0.5, 2] no weights have a share below 0.64 or a deviation above 0.75
        "mismatch/eff_sample_size": _effective_share(raw),
        "mismatch/weight_std": float(raw.std(correction=0)),
        "rollout_corr/rollout_is_ratio_fraction_high": high_share,
        "rollout_corr/rollout_is_ratio_fraction_low": low_share,
    }


def _sequence_weight_metrics(
    log_ratio: torch.Tensor, response_lens: list[int], low: float, cap: float
) -> dict[str, float]:
    """The mean weight of each sequence's tokens: how it is spread over the sequences."""
    raw = log_ratio.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND).exp()  # [tokens]
    means = torch.stack([part.mean() for part in raw.split(response_lens)])  # [sequences]
    prefix = "rollout_corr/rollout_is_seq"
    return {
        f"{prefix}_mean": float(means.mean()),
        f"{prefix}_std": float(means.std()) if means.numel() > 1 else 0.0,
        f"{prefix}_min": float(means.min()),
        f"{prefix}_max": float(means.max()),
        f"{prefix}_max_deviation": float((means - 1.0).abs().max()),
        f"{prefix}_fraction_high": float((means > cap).double().mean()),
        f"{prefix}_fraction_low": float((means < low).double().mean()),
    }


def reward_metrics(
    rewards: torch.Tensor, advantages: torch.Tensor, response_lens: list[int], rollout_logprobs: torch.Tensor
) -> dict[str, float]:
    """Reward, length and entropy of a batch of rollouts.

    Entropy is the mean of -logprob over sampled tokens: an unbiased estimate under the sampler's own distribution.

    Args:
        rewards: [sequences].
        advantages: [sequences].
        rollout_logprobs: [tokens].
    """
    lens = torch.tensor(response_lens, dtype=torch.float64)
    return {
        "reward/mean": float(rewards.double().mean()),
        "reward/max": float(rewards.double().max()),
        "reward/informative_share": float((advantages != 0).double().mean()),
        "response_length/mean": float(lens.mean()),
        "response_length/max": float(lens.max()),
        "actor/entropy": float(-rollout_logprobs.double().mean()),
    }


def repetition_share(responses: Sequence[Sequence[int]]) -> float:
    """Share of the responses that say one or two tokens over and over: the garbage that broken scales give.

    Args:
        responses: token ids. Those of fewer than 32 tokens have no say.
    Returns:
        0 to 1: of the long ones, how many consist to 90 % or more of their two commonest tokens; 0 where none is long.
    """
    long = [response for response in responses if len(response) >= _MIN_REPETITION_LEN]
    tops = [sum(count for _, count in Counter(response).most_common(2)) / len(response) for response in long]
    return sum(top >= _REPETITION_SHARE for top in tops) / len(long) if long else 0.0


def correction_effect(
    plain: list[torch.Tensor], corrected: list[torch.Tensor], plain_loss: float, corrected_loss: float
) -> dict[str, float]:
    """What the importance weights changed on the very same rollouts.

    Args:
        plain: the gradients of all parameters without the weights.
        corrected: the gradients of all parameters with the weights.
        plain_loss: the loss without the weights.
        corrected_loss: the loss with the weights.
    """
    without, with_weights = (torch.cat([grad.double().flatten() for grad in grads]) for grads in (plain, corrected))
    norm_plain, norm_corrected = without.norm(), with_weights.norm()
    cosine = (without @ with_weights) / (norm_plain * norm_corrected).clamp_min(1e-30)
    gap = (without - with_weights).norm()
    return {
        "correction/loss_without": plain_loss,
        "correction/loss_with": corrected_loss,
        "correction/grad_norm_without": float(norm_plain),
        "correction/grad_norm_with": float(norm_corrected),
        "correction/grad_cosine": float(cosine),
        "correction/grad_relative_change": float(gap / norm_plain.clamp_min(1e-30)),
    }


def _effective_share(weights: torch.Tensor) -> float:
    """Effective sample size as a share of the tokens: 1 where all weights are equal."""
    return float(1.0 / (weights / weights.mean()).square().mean())


def _pearson(x: torch.Tensor, y: torch.Tensor) -> float:
    """Correlation; 1 where the two are equal, 0 where one of them is constant."""
    if torch.equal(x, y):
        return 1.0
    x, y = x - x.mean(), y - y.mean()
    scale = x.norm() * y.norm()
    return float((x * y).sum() / scale) if scale > 0 else 0.0
