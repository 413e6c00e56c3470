"""Group-relative advantages against a plain statement of the formula."""

from pathlib import Path

import numpy as np
import pytest
import torch

from octavo.errors import ShapeError
from octavo.rl.advantage import advantages_of, grpo_advantages
from tests.rl.conftest import tiny_config
from tests.rl.test_algorithms import rewarded


def statement(rewards: np.ndarray, groups: np.ndarray, norm_by_std: bool) -> np.ndarray:
    out = np.zeros(len(rewards))
    for i, (reward, group) in enumerate(zip(rewards, groups, strict=True)):
        siblings = rewards[groups == group]
        out[i] = reward - siblings.mean()
        if norm_by_std:
            out[i] /= siblings.std(ddof=1) + 1e-6
    return out


@pytest.mark.parametrize("norm_by_std", [True, False], ids=["std", "dr-grpo"])
def test_distances_over_the_standard_deviation(norm_by_std: bool) -> None:
    rng = np.random.default_rng(0)
    rewards = rng.random(24)
    groups = rng.permutation(np.arange(24) % 5)
    got = grpo_advantages(torch.tensor(rewards), torch.tensor(groups), norm_by_std=norm_by_std)
    np.testing.assert_allclose(got.numpy(), statement(rewards, groups, norm_by_std), rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize(
    ("algorithm", "norm_by_std"),
    [({}, True), ({"norm_adv_by_std": False}, False), ({"name": "reinforce"}, False)],
    ids=["grpo", "dr-grpo", "reinforce"],
)
def test_the_config_asks_for_the_standard_deviation(
    tmp_path: Path, algorithm: dict[str, object], norm_by_std: bool
) -> None:
    rewards, groups = [1.0, 0.0, 0.0, 5.0, 7.0, 3.0], [0, 0, 0, 1, 1, 1]
    got = advantages_of(rewarded(rewards, groups), tiny_config(tmp_path, algorithm=algorithm))
    expected = statement(np.array(rewards), np.array(groups), norm_by_std)
    np.testing.assert_allclose(got.numpy(), expected, rtol=1e-5)


@pytest.mark.parametrize("reward", [0.0, 1.0, 0.1, 1e-30, 1 / 3])
def test_an_all_equal_group_is_exactly_zero(reward: float) -> None:
    # 0.1 summed seven times and divided is not 0.1; the quotient by 1e-6 would show it.
    rewards = torch.tensor([reward] * 7 + [0.0, 1.0])
    advantages = grpo_advantages(rewards, torch.tensor([3] * 7 + [9] * 2))
    assert (advantages[:7] == 0).all()
    assert (advantages[7:] != 0).all()


def test_a_group_of_one_keeps_its_reward() -> None:
    assert grpo_advantages(torch.tensor([0.7]), torch.tensor([0])).item() == pytest.approx(0.7)


def test_lengths_must_agree() -> None:
    with pytest.raises(ShapeError, match="one length"):
        grpo_advantages(torch.zeros(3), torch.zeros(4, dtype=torch.int64))
