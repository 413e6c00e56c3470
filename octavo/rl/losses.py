"""The policy loss: clipped ratio, KL to a reference and entropy, summed with coefficients that are global.

Every function works on the packed response tokens of some sequences, [tokens]. `token_coefficients` is computed
once over all sequences of an optimizer step, so a loss split over micro-batches is the same sum.
"""

import dataclasses

import torch

LOG_RATIO_BOUND = 20.0
KL_BOUND = 10.0


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
    Source: PPO (arXiv 1707.06347), dual clip (arXiv 1912.09729), DAPO's asymmetric clip (arXiv 2503.14476).
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


def reference_kl(logprobs: torch.Tensor, reference_logprobs: torch.Tensor) -> torch.Tensor:
    """The k3 estimate of KL(pi_theta || pi_reference) of each token: exp(d) - d - 1, d = log(pi_ref / pi_theta).

    Args:
        logprobs: [tokens] fp32 with gradient. reference_logprobs: [tokens] fp32.
    Returns:
        [tokens] fp32 in [0, 10]; d is clamped to +-20.
    Source: Schulman, "Approximating KL divergence" (2020).
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


def token_coefficients(response_lens: list[int], aggregation: str = "token-mean") -> torch.Tensor:
    """What each token's loss is multiplied by before all are summed.

    Args:
        response_lens: tokens of each sequence of the whole optimizer step, not of one micro-batch.
        aggregation: "token-mean" (every token alike) or "seq-mean-token-mean" (every sequence alike).
    Returns:
        [sum of lens] fp32; sums to 1.
    """
    lens = torch.tensor(response_lens, dtype=torch.int64)
    if aggregation == "token-mean":
        return torch.full((int(lens.sum()),), 1.0 / max(int(lens.sum()), 1), dtype=torch.float32)
    assert aggregation == "seq-mean-token-mean", f"unknown aggregation {aggregation!r} passed the config"
    each = 1.0 / (lens.clamp_min(1).float() * max(len(response_lens), 1))  # [sequences]
    return each.repeat_interleave(lens)
