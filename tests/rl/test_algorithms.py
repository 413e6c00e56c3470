"""RLOO, GSPO, CISPO, overlong shaping and dynamic sampling against their formulas."""

import itertools

import pytest
import torch

from octavo.rl.advantage import grpo_advantages, overlong_penalty, rloo_advantages
from octavo.rl.config import AlgorithmSection
from octavo.rl.correction import CorrectionSection
from octavo.rl.losses import cispo_terms, clipped_policy_terms, gspo_terms, token_coefficients
from octavo.rl.objective import TokenBatch, policy_objective
from octavo.rl.rollout_batch import Rollouts
from tests.rl.conftest import make_rollouts

LENS = [3, 1, 5]
IDS = torch.arange(3).repeat_interleave(torch.tensor(LENS))


def tokens(seed: int = 0, size: float = 0.3) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    old = -torch.rand(9, generator=gen, dtype=torch.float64) * 3
    advantages = torch.tensor([1.0, -2.0, 0.5], dtype=torch.float64)[IDS]
    return old + size * torch.randn(9, generator=gen, dtype=torch.float64), old, advantages


def test_rloo_is_the_distance_to_the_others() -> None:
    rewards, groups = torch.tensor([1.0, 0.0, 0.0, 5.0, 7.0, 3.0]), torch.tensor([0, 0, 0, 1, 1, 2])
    expected = [1.0 - 0.0, 0.0 - 0.5, 0.0 - 0.5, 5.0 - 7.0, 7.0 - 5.0, 3.0]
    torch.testing.assert_close(rloo_advantages(rewards, groups), torch.tensor(expected))
    equal = rloo_advantages(torch.ones(3), torch.zeros(3).long())
    assert not equal.any()


def test_overlong_responses_lose_by_the_token() -> None:
    found = overlong_penalty([1, 6, 8, 9, 10], max_tokens=10, buffer=4, factor=2.0)
    assert found.tolist() == [0.0, 0.0, -1.0, -1.5, -2.0]
    assert not overlong_penalty([10], 10, 0, 1.0).any()


def test_gspo_has_one_ratio_a_sequence() -> None:
    logp, old, advantages = tokens()
    terms = gspo_terms(logp, old, advantages, IDS, clip_low=0.1, clip_high=0.1)
    for i, (a, b) in enumerate(itertools.pairwise(itertools.accumulate(LENS, initial=0))):
        ratio = (logp - old)[a:b].mean().exp()
        adv = advantages[a]
        expected = torch.maximum(-adv * ratio, -adv * ratio.clamp(0.9, 1.1))
        torch.testing.assert_close(terms.per_token[a:b], expected.expand(LENS[i]))


def test_gspo_s_gradient_is_the_sequence_ratio_s() -> None:
    """Of the loss summed over a sequence: mean over tokens of s_i * A * grad logprob, times the length."""
    logp, old, advantages = tokens(size=0.01)
    leaf = logp.clone().requires_grad_()
    gspo_terms(leaf, old, advantages, IDS, clip_low=0.5, clip_high=0.5).per_token.sum().backward()
    direct = logp.clone().requires_grad_()
    for a, b in itertools.pairwise(itertools.accumulate(LENS, initial=0)):
        (-advantages[a] * (direct - old)[a:b].mean().exp() * (b - a)).backward(retain_graph=True)
    torch.testing.assert_close(leaf.grad, direct.grad)


def test_cispo_keeps_the_gradient_of_clipped_tokens() -> None:
    logp, old, advantages = tokens(size=0.4)
    leaf = logp.clone().requires_grad_()
    terms = cispo_terms(leaf, old, advantages, clip_low=0.2, clip_high=0.28)
    terms.per_token.sum().backward()
    expected = -(logp - old).exp().clamp(0.8, 1.28) * advantages
    torch.testing.assert_close(leaf.grad, expected)
    assert terms.is_clipped.any() and not terms.is_clipped.all()
    clipped = clipped_policy_terms(logp, old, advantages, clip_low=0.2, clip_high=0.28)
    assert not torch.equal(terms.per_token.detach(), clipped.per_token)


@pytest.mark.parametrize("policy_loss", ["ppo", "gspo", "cispo"])
def test_the_losses_do_not_depend_on_the_split(policy_loss: str) -> None:
    logp, old, advantages = (x.float() for x in tokens())
    batch = TokenBatch(old, advantages, token_coefficients(LENS), old_logprobs=old, sequence_ids=IDS)
    algorithm, none = AlgorithmSection(policy_loss=policy_loss), CorrectionSection()  # type: ignore[arg-type]
    whole = policy_objective(logp.requires_grad_(), batch, algorithm, none)
    parts = [policy_objective(logp[a:b], batch.narrow(a, b), algorithm, none) for a, b in ((0, 4), (4, 9))]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    plain = policy_objective(logp, batch, AlgorithmSection(), none)
    assert policy_loss == "ppo" or not torch.equal(whole.loss, plain.loss)


def rewarded(rewards: list[float], groups: list[int]) -> Rollouts:
    """Responses of two tokens."""
    num = len(rewards)
    fields = {"prompts": [f"p{group}" for group in groups], "rollout_logprobs": -torch.arange(2.0 * num)}
    return make_rollouts([2] * num, rewards=torch.tensor(rewards), group_ids=torch.tensor(groups), **fields)


def test_groups_are_told_apart_and_joined_again() -> None:
    rollouts = rewarded([1, 0, 1, 1, 0, 1], [0, 0, 1, 1, 2, 2])
    assert rollouts.count_equal_groups(grpo_advantages(rollouts.rewards, rollouts.group_ids)) == (1, 3)
    informative, equal = rollouts.split_groups()
    assert [group.prompts[0] for group in informative] == ["p0", "p2"]
    assert [group.prompts[0] for group in equal] == ["p1"]
    joined = Rollouts.join(informative + equal)
    assert joined.group_ids.tolist() == [0, 0, 1, 1, 2, 2]
    assert joined.prompts == ["p0", "p0", "p2", "p2", "p1", "p1"]
    assert joined.rollout_logprobs.tolist() == [-0.0, -1, -2, -3, -8, -9, -10, -11, -4, -5, -6, -7]
    assert grpo_advantages(joined.rewards, joined.group_ids)[4:].tolist() == [0, 0]
