"""Correction weights against their formula, written out token by token."""

import math

import numpy as np
import pytest
import torch

from octavo.rl.correction import CorrectionSection, correction_weights, token_tis_weights

LENS = [4, 1, 7, 3]


def logprobs(noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(sum(LENS), generator=gen) * 4
    return rollout + noise * torch.randn(sum(LENS), generator=gen), rollout


def test_tis_weights_are_truncated_ratios_without_gradient() -> None:
    trainer, rollout = logprobs(1.0)
    weights = token_tis_weights(trainer.requires_grad_(), rollout, cap=2.0)
    expected = [min(math.exp(t - r), 2.0) for t, r in zip(trainer.tolist(), rollout.tolist(), strict=True)]
    np.testing.assert_allclose(weights.numpy(), expected, rtol=1e-6)
    assert not weights.requires_grad
    assert weights.max() == 2.0
    assert weights.min() > 0


def test_broken_tokens_stay_in_range() -> None:
    weights = token_tis_weights(torch.tensor([-1000.0, 0.0]), torch.tensor([0.0, -1000.0]))
    assert weights[0].item() == pytest.approx(math.exp(-20))
    assert weights[1].item() == 2.0


def test_equal_logprobs_have_weight_one() -> None:
    _, rollout = logprobs(0.0)
    assert (token_tis_weights(rollout, rollout) == 1).all()
    assert correction_weights(CorrectionSection(), rollout, rollout) is None
