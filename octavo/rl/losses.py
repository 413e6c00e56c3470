"""The policy loss: clipped ratio, KL to a reference and entropy, summed with coefficients that are global.

Every function works on the packed response tokens of some sequences, [tokens]. `token_coefficients` is computed
once over all sequences of an optimizer step, so a loss split over micro-batches is the same sum.
"""

import dataclasses

import torch

LOG_RATIO_BOUND = 20.0
KL_BOUND = 10.0
GSPO_BOUND = 10.0


@dataclasses.dataclass(frozen=True)
class PolicyTerms:
    """Loss of each token and where the clip acted.

    Attributes:
        per_token: [tokens] fp32, differentiable in logprobs.
        ratio: [tokens] fp32, pi_theta / pi_old, no gradient.
        is_clipped: [tokens] bool: the clipped branch was taken, so that the token has no gradient.
    """

    per_token: torch.Tensor
    ratio: torch.Tensor
    is_clipped: torch.Tensor


def clipped_policy_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    *,
    clip_low: float = 0.2,
    clip_high: float = 0.2,
    clip_c: float | None = 3.0,
) -> PolicyTerms:
    """PPO's clipped loss with separate bounds and dual clip.

    L = max(-A r, -A clip(r, 1 - clip_low, 1 + clip_high)); where A < 0, L = min(L, -A clip_c).

    Args:
        logprobs: [tokens] fp32 under the policy that trains, with gradient.
        old_logprobs: [tokens] fp32 under the policy at rollout time, in the trainer's numerics.
        advantages: [tokens] fp32.
        clip_c: bound of the loss of a token with A < 0; None for none.
    Source:
        PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), DAPO's asymmetric clip (arXiv 2503.14476).
    """
    log_ratio = (logprobs - old_logprobs.detach()).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    plain = -advantages * ratio
    clipped = -advantages * ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    loss = torch.maximum(plain, clipped)
    is_clipped = clipped > plain
    if clip_c is not None:
        bound = -advantages * clip_c
        is_bounded = (advantages < 0) & (bound < loss)
        loss = torch.where(is_bounded, bound, loss)
        is_clipped = is_clipped | is_bounded
    return PolicyTerms(loss, ratio.detach(), is_clipped.detach())


def gspo_terms(
    logprobs: torch.Tensor,
    old_logprobs: torch.Tensor,
    advantages: torch.Tensor,
    sequence_ids: torch.Tensor,
    *,
    clip_low: float,
    clip_high: float,
    clip_c: float | None = None,
) -> PolicyTerms:
    """clipped_policy_terms with one ratio a sequence: exp(mean log ratio), each token with its own share of gradient.

    Args:
        sequence_ids: [tokens] int64, equal for the tokens of a sequence, all of which are here.
    Source:
        GSPO (arXiv 2507.18071), its token form.
    """
    log_ratio = logprobs - old_logprobs.detach()
    _, inverse, counts = sequence_ids.unique(return_inverse=True, return_counts=True)
    sums = torch.zeros(counts.shape, dtype=log_ratio.dtype).index_add_(0, inverse, log_ratio.detach())
    mean = (sums / counts)[inverse].clamp(max=GSPO_BOUND)
    # the sequence's ratio in value, the token's logprob in gradient
    return clipped_policy_terms(
        mean + (logprobs - logprobs.detach()),
        torch.zeros_like(mean),
        advantages,
        clip_low=clip_low,
        clip_high=clip_high,
        clip_c=clip_c,
    )


def cispo_terms(
    logprobs: torch.Tensor, old_logprobs: torch.Tensor, advantages: torch.Tensor, *, clip_low: float, clip_high: float
) -> PolicyTerms:
    """-sg[clip(ratio, 1 - clip_low, 1 + clip_high)] * A * logprob: a clipped token keeps its gradient.

    Source:
        MiniMax-M1 (arXiv 2506.13585).
    """
    log_ratio = (logprobs - old_logprobs).detach().clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    ratio = log_ratio.exp()
    bounded = ratio.clamp(1.0 - clip_low, 1.0 + clip_high)
    return PolicyTerms(-bounded * advantages * logprobs, ratio, bounded != ratio)


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(pi_theta || pi_reference) of each token: exp(d) - d - 1, d = log(pi_ref / pi_theta).

    Args:
        logprobs: [tokens] fp32 with gradient.
        reference_logprobs: [tokens] fp32.
    Returns:
        [tokens] fp32 in [0, 10]; d is clamped to +-20.
    Source:
        Schulman, "Approximating KL divergence" (2020).
    """
    d = (reference_logprobs.detach() - logprobs).clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)
    return (torch.expm1(d) - d).clamp(max=KL_BOUND)


def entropy_surrogate(logprobs: torch.Tensor) -> torch.Tensor:
    """A term whose gradient, over tokens that pi_theta sampled, is that of pi_theta's entropy.

    grad H = -E[log pi * grad log pi], so the term is -sg[log pi] * log pi; the value means nothing. Only the sampled
    tokens' logprobs are needed, never the full distribution.

    Args:
        logprobs: [tokens] fp32 with gradient.
    Returns:
        [tokens] fp32.
    """
    return -logprobs.detach() * logprobs


def token_coefficients(
    response_lens: list[int],
    aggregation: str = "token-mean",
    *,
    is_kept: torch.Tensor | None = None,
    max_tokens: int = 1,
) -> torch.Tensor:
    """What each token's loss is multiplied by before all are summed.

    Args:
        response_lens: tokens of each sequence of the whole optimizer step, not of one micro-batch.
        aggregation: "token-mean" (every token alike), "seq-mean-token-mean" (every sequence alike),
            "seq-mean-token-sum" (mean over sequences of sums), "seq-mean-token-sum-norm" (that over max_tokens).
        is_kept: [tokens] bool: tokens that count; the others' coefficient is 0, and no mean counts them. A sequence
            without any does not count either.
    Returns:
        [sum of lens] fp32; the means sum to 1.
    """
    lens = torch.tensor(response_lens, dtype=torch.int64)
    kept = torch.ones(int(lens.sum())) if is_kept is None else is_kept.float().cpu()
    counts = torch.stack([part.sum() for part in kept.split(response_lens)]) if len(response_lens) else kept
    if aggregation == "token-mean":
        return kept / kept.sum().clamp_min(1)
    num_sequences = (counts > 0).sum().clamp_min(1)
    if aggregation == "seq-mean-token-mean":
        each = 1.0 / (counts.clamp_min(1) * num_sequences)  # [sequences]
    else:
        divisor = {"seq-mean-token-sum": 1, "seq-mean-token-sum-norm": max_tokens}[aggregation]
        each = torch.full(counts.shape, 1.0) / (num_sequences * divisor)
    return each.repeat_interleave(lens) * kept
