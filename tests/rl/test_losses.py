"""The policy loss against a per-token statement in numpy, finite differences and splits into micro-batches."""

import math

import numpy as np
import pytest
import torch

from octavo.rl.losses import clipped_policy_terms, entropy_surrogate, reference_kl, token_coefficients


def one_token(logp: float, old: float, adv: float, low: float, high: float, c: float | None) -> float:
    """One token's loss, written out."""
    ratio = math.exp(min(max(logp - old, -20.0), 20.0))
    loss = max(-adv * ratio, -adv * min(max(ratio, 1 - low), 1 + high))
    if adv < 0 and c is not None:
        loss = min(loss, -adv * c)
    return loss


def tokens(seed: int, n: int = 200) -> tuple[torch.Tensor, ...]:
    gen = torch.Generator().manual_seed(seed)
    old = -torch.rand(n, generator=gen, dtype=torch.float64) * 3
    logp = old + torch.randn(n, generator=gen, dtype=torch.float64)
    advantages = torch.randn(n, generator=gen, dtype=torch.float64)
    return logp, old, advantages


@pytest.mark.parametrize("clip_c", [None, 3.0], ids=["plain", "dual-clip"])
def test_equals_the_per_token_statement(clip_c: float | None) -> None:
    logp, old, advantages = tokens(0)
    terms = clipped_policy_terms(logp, old, advantages, clip_low=0.2, clip_high=0.28, clip_c=clip_c)
    rows = zip(logp.tolist(), old.tolist(), advantages.tolist(), strict=True)
    expected = [one_token(*row, 0.2, 0.28, clip_c) for row in rows]
    np.testing.assert_allclose(terms.per_token.numpy(), expected, rtol=1e-12)


@pytest.mark.parametrize("clip_c", [None, 3.0], ids=["plain", "dual-clip"])
def test_gradient_is_that_of_finite_differences(clip_c: float | None) -> None:
    logp, old, advantages = tokens(1, n=40)

    def loss(x: torch.Tensor) -> torch.Tensor:
        return clipped_policy_terms(x, old, advantages, clip_c=clip_c).per_token

    assert torch.autograd.gradcheck(loss, logp.requires_grad_())


def test_clipped_tokens_are_those_without_gradient() -> None:
    logp, old, advantages = tokens(2)
    logp.requires_grad_()
    terms = clipped_policy_terms(logp, old, advantages)
    terms.per_token.sum().backward()
    assert logp.grad is not None
    assert torch.equal(terms.is_clipped, logp.grad == 0)
    assert 0 < int(terms.is_clipped.sum()) < 200


def test_on_policy_gradient_is_reinforce() -> None:
    logp = torch.tensor([-1.0, -2.0, -0.5], requires_grad=True)
    advantages = torch.tensor([1.0, -2.0, 0.5])
    clipped_policy_terms(logp, logp.detach(), advantages).per_token.sum().backward()
    assert logp.grad is not None
    assert torch.equal(logp.grad, -advantages)


def test_old_logprobs_get_no_gradient() -> None:
    logp, old, advantages = tokens(3)
    clipped_policy_terms(logp.requires_grad_(), old.requires_grad_(), advantages).per_token.sum().backward()
    assert logp.grad is not None
    assert old.grad is None


def test_a_wild_ratio_stays_finite() -> None:
    logp = torch.tensor([0.0, -500.0], requires_grad=True)
    terms = clipped_policy_terms(logp, torch.tensor([-500.0, 0.0]), torch.tensor([-1.0, 1.0]))
    assert terms.per_token.isfinite().all()
    assert terms.per_token[0].item() == 3.0  # the dual clip


@pytest.mark.parametrize("gap", [0.0, 1e-4, 0.5, -2.0])
def test_reference_kl_is_k3(gap: float) -> None:
    logp = torch.tensor([-1.0], dtype=torch.float64)
    assert reference_kl(logp, logp + gap).item() == pytest.approx(math.exp(gap) - gap - 1, abs=1e-12)


def test_reference_kl_is_bounded_and_differentiable() -> None:
    logp = torch.tensor([-1.0, -300.0], dtype=torch.float64, requires_grad=True)
    kl = reference_kl(logp, torch.tensor([-1.4, 0.0], dtype=torch.float64))
    assert kl[1].item() == 10.0
    kl.sum().backward()
    assert logp.grad is not None
    assert logp.grad[0].item() == pytest.approx(1 - math.exp(-0.4))  # d/dlogp of exp(ref - logp) - (ref - logp) - 1


def test_entropy_surrogate_has_the_gradient_of_entropy() -> None:
    logits = torch.tensor([0.3, -1.2, 2.0, 0.1], dtype=torch.float64, requires_grad=True)
    logp = logits.log_softmax(0)
    (expected,) = torch.autograd.grad(-(logp.exp() * logp).sum(), logits, retain_graph=True)
    # The expectation over sampled tokens, taken exactly.
    (got,) = torch.autograd.grad((logp.detach().exp() * entropy_surrogate(logp)).sum(), logits)
    torch.testing.assert_close(got, expected)


@pytest.mark.parametrize("aggregation", ["token-mean", "seq-mean-token-mean"])
def test_coefficients_are_global(aggregation: str) -> None:
    lens = [3, 1, 5, 2]
    coefficients = token_coefficients(lens, aggregation)
    assert coefficients.sum().item() == pytest.approx(1.0)
    loss = torch.arange(11.0)
    whole = (loss * coefficients).sum()
    parts = [(x * y).sum() for x, y in zip(loss.split([4, 7]), coefficients.split([4, 7]), strict=True)]
    assert sum(parts).item() == pytest.approx(whole.item())
    means = [x.mean().item() for x in loss.split(lens)]
    expected = loss.mean().item() if aggregation == "token-mean" else sum(means) / 4
    assert whole.item() == pytest.approx(expected)
