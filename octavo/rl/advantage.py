"""Group-relative advantages (GRPO): how much better a completion is than its siblings of the same prompt."""

import torch

from octavo.errors import ShapeError

STD_EPS = 1e-6


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
        ShapeError, where the two differ in length.
    Source: DeepSeekMath (arXiv 2402.03300) section 4.1; Dr. GRPO (arXiv 2503.20783).
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


def _of_group(rewards: torch.Tensor, norm_by_std: bool) -> torch.Tensor:
    if rewards.numel() == 1:
        return rewards
    if (rewards == rewards[0]).all():
        return torch.zeros_like(rewards)
    centred = rewards - rewards.mean()
    return centred / (rewards.std() + STD_EPS) if norm_by_std else centred
