"""Rollout correction: importance weights for tokens that another numerics sampled than the one that trains.

In exact mode both sides agree bit for bit, every weight is 1 and nothing needs correcting.
"""

import torch

LOG_RATIO_BOUND = 20.0  # keeps exp finite; a token beyond it is broken, not unlikely


def log_importance_ratio(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor) -> torch.Tensor:
    """log(pi_trainer / pi_rollout), clamped to +-20, without gradient.

    Args:
        trainer_logprobs, rollout_logprobs: [tokens] fp32, of the same tokens under the same weights.
    Returns:
        [tokens] fp32.
    """
    difference = trainer_logprobs.detach().float() - rollout_logprobs.detach().float()
    return difference.clamp(-LOG_RATIO_BOUND, LOG_RATIO_BOUND)


def token_tis_weights(trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float = 2.0) -> torch.Tensor:
    """Token-level truncated importance sampling: min(pi_trainer / pi_rollout, cap), a constant to autograd.

    Args:
        trainer_logprobs, rollout_logprobs: [tokens] fp32.
        cap: upper bound of a weight; there is no lower one.
    Returns:
        [tokens] fp32 in (0, cap].
    Source: FP8-RL (arXiv 2601.18150), which recommends cap 2 for every FP8 rollout.
    """
    return log_importance_ratio(trainer_logprobs, rollout_logprobs).exp().clamp(max=cap)


def correction_weights(
    kind: str, trainer_logprobs: torch.Tensor, rollout_logprobs: torch.Tensor, cap: float
) -> torch.Tensor | None:
    """The weights that `correction.kind` asks for: None for "none"."""
    if kind == "none":
        return None
    assert kind == "token_tis", f"unknown correction {kind!r} passed the config"
    return token_tis_weights(trainer_logprobs, rollout_logprobs, cap)
