"""The objective of a micro-batch: importance weights, penalties, and sums that do not depend on the split."""

import pytest
import torch

from octavo.rl.config import AlgorithmSection
from octavo.rl.correction import CorrectionSection, token_tis_weights
from octavo.rl.losses import token_coefficients
from octavo.rl.objective import CorrectionProbe, TokenBatch, policy_objective

LENS = [3, 2, 4]
TIS = CorrectionSection(kind="token_tis")


def make_batch(noise: float = 1.0) -> tuple[torch.Tensor, TokenBatch]:
    gen = torch.Generator().manual_seed(0)
    logprobs = -torch.rand(9, generator=gen) * 2
    batch = TokenBatch(
        rollout_logprobs=logprobs + noise * torch.randn(9, generator=gen),
        advantages=torch.randn(3, generator=gen).repeat_interleave(torch.tensor(LENS)),
        coefficients=token_coefficients(LENS),
    )
    return logprobs.requires_grad_(), batch


def test_weights_multiply_each_tokens_gradient() -> None:
    logprobs, batch = make_batch()
    objective = policy_objective(logprobs, batch, AlgorithmSection(), TIS)
    objective.loss.backward(retain_graph=True)
    weights = token_tis_weights(logprobs, batch.rollout_logprobs, cap=2.0)
    assert logprobs.grad is not None
    torch.testing.assert_close(logprobs.grad, -batch.advantages * batch.coefficients * weights)
    (plain,) = torch.autograd.grad(objective.uncorrected_loss, logprobs)
    torch.testing.assert_close(plain, -batch.advantages * batch.coefficients)
    assert objective.sums["correction/weight_mean"] == pytest.approx(weights.mean().item())


def test_weights_refer_to_the_policy_before_the_first_update() -> None:
    logprobs, batch = make_batch()
    old = logprobs.detach() - 0.1
    later = TokenBatch(batch.rollout_logprobs, batch.advantages, batch.coefficients, old_logprobs=old)
    objective = policy_objective(logprobs, later, AlgorithmSection(clip_low=0.9, clip_high=9.0, clip_c=0), TIS)
    weights = token_tis_weights(old, batch.rollout_logprobs, cap=2.0)
    expected = -(batch.advantages * (logprobs - old).exp() * weights * batch.coefficients).sum()
    torch.testing.assert_close(objective.loss, expected)
    assert objective.sums["actor/ppo_kl"] == pytest.approx(-0.1, rel=1e-5)


def test_without_mismatch_weights_change_nothing() -> None:
    logprobs, batch = make_batch(noise=0.0)
    objective = policy_objective(logprobs, batch, AlgorithmSection(), TIS)
    assert torch.equal(objective.loss, objective.uncorrected_loss)


def test_shares_add_up_whatever_the_split() -> None:
    logprobs, batch = make_batch()
    algorithm = AlgorithmSection(kl_coef=0.1, entropy_coef=0.01)
    batch = TokenBatch(
        batch.rollout_logprobs,
        batch.advantages,
        batch.coefficients,
        reference_logprobs=batch.rollout_logprobs,
    )
    whole = policy_objective(logprobs, batch, algorithm, TIS)
    parts = [policy_objective(logprobs[a:b], batch.narrow(a, b), algorithm, TIS) for a, b in ((0, 5), (5, 9))]
    torch.testing.assert_close(parts[0].loss + parts[1].loss, whole.loss)
    assert "actor/kl_loss" in whole.sums
    for name, value in whole.sums.items():
        assert parts[0].sums[name] + parts[1].sums[name] == pytest.approx(value, rel=1e-5, abs=1e-7), name


def test_probe_measures_both_gradients_and_leaves_the_graph() -> None:
    model = torch.nn.Linear(1, 9, bias=False)
    _, batch = make_batch()
    objective = policy_objective(model(torch.ones(1)), batch, AlgorithmSection(), TIS)
    probe = CorrectionProbe(model)
    probe.add(objective)
    objective.loss.backward()
    assert model.weight.grad is not None
    metrics = probe.metrics()
    assert metrics["correction/grad_norm_with"] == pytest.approx(model.weight.grad.norm().item(), rel=1e-5)
    assert metrics["correction/grad_cosine"] < 1.0
    assert metrics["correction/loss_with"] == pytest.approx(objective.loss.item())
