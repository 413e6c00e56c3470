"""Group-relative advantages: how much better a completion is than its siblings of the same prompt."""

import torch

from octavo.errors import ShapeError
from octavo.rl.config import RLConfig
from octavo.rl.rollout_batch import Rollouts

STD_EPS = 1e-6


def advantages_of(rollouts: Rollouts, config: RLConfig) -> torch.Tensor:
    """[sequences] fp32, by the algorithm, of the rewards with what an overlong response loses."""
    algorithm = config.algorithm
    rewards = rollouts.rewards + overlong_penalty(
        rollouts.response_lens, config.rollout.max_tokens, algorithm.overlong_buffer, algorithm.overlong_penalty
    )
    if algorithm.name == "rloo":
        return rloo_advantages(rewards, rollouts.group_ids)
    by_std = algorithm.name == "grpo" and algorithm.norm_adv_by_std
    return grpo_advantages(rewards, rollouts.group_ids, norm_by_std=by_std)


def grpo_advantages(rewards: torch.Tensor, group_ids: torch.Tensor, *, norm_by_std: bool = True) -> torch.Tensor:
    """(reward - group mean) / (group std + 1e-6).

    A group whose rewards are all equal teaches nothing: its advantages are exactly 0, whatever the mean rounds
    to. A group of one has no siblings to be measured against: mean 0, std 1, as in verl.

    Args:
        rewards: [sequences] float.
        group_ids: [sequences] int64, equal for samples of one prompt.
        norm_by_std: divide by the unbiased standard deviation; False is Dr. GRPO.
    Returns:
        [sequences] fp32.
    Raises:
        ShapeError: where the two differ in length.
    Source:
        DeepSeekMath (arXiv 2402.03300) section 4.1; Dr. GRPO (arXiv 2503.20783).
    """
    if rewards.shape != group_ids.shape or rewards.dim() != 1:
        raise ShapeError(
            f"rewards and group_ids must be vectors of one length, got {tuple(rewards.shape)} and "
            f"{tuple(group_ids.shape)}"
        )
    advantages = torch.zeros(rewards.shape, dtype=torch.float32)
    for group in group_ids.unique():
        members = group_ids == group
        advantages[members] = _of_group(rewards[members].double(), norm_by_std).float()
    return advantages


def rloo_advantages(rewards: torch.Tensor, group_ids: torch.Tensor) -> torch.Tensor:
    """reward - mean of the group's others: [sequences] fp32; a group of one has its reward.

    Arguments and errors as grpo_advantages.

    Source:
        RLOO (arXiv 2402.14740).
    """
    advantages = grpo_advantages(rewards, group_ids, norm_by_std=False)
    _, inverse, counts = group_ids.unique(return_inverse=True, return_counts=True)
    size = counts[inverse].float()
    return torch.where(size > 1, advantages * size / (size - 1).clamp_min(1), advantages)


def overlong_penalty(response_lens: list[int], max_tokens: int, buffer: int, factor: float) -> torch.Tensor:
    """What DAPO's shaping adds to rewards: 0 up to max_tokens - buffer tokens, falling to -factor at max_tokens.

    Returns:
        [sequences] fp32, not above 0.
    Source:
        DAPO (arXiv 2503.14476).
    """
    over = torch.tensor(response_lens, dtype=torch.float32) - (max_tokens - buffer)
    return torch.clamp(-over / max(buffer, 1) * factor, max=0.0) if buffer else torch.zeros(len(response_lens))


def _of_group(rewards: torch.Tensor, norm_by_std: bool) -> torch.Tensor:
    if rewards.numel() == 1:
        return rewards
    if (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPS) if norm_by_std else centred
