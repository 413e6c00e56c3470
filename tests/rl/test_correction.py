"""Weights and rejections against their formulas, written out sequence by sequence."""

import dataclasses
import itertools
import math

import numpy as np
import pytest
import torch

from octavo.errors import ConfigError
from octavo.rl.config import AlgorithmSection
from octavo.rl.correction import CorrectionSection, correct, token_tis_weights
from octavo.rl.losses import token_coefficients
from octavo.rl.objective import TokenBatch, policy_objective

LENS = [4, 1, 7, 3]
BOUNDS = list(itertools.pairwise(itertools.accumulate(LENS, initial=0)))


def logprobs(noise: float = 0.7, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(sum(LENS), generator=gen) * 4
    return rollout + noise * torch.randn(sum(LENS), generator=gen), rollout


def ratios() -> np.ndarray:
    trainer, rollout = logprobs()
    return np.exp((trainer - rollout).double().numpy())


def spread(per_sequence: list[float]) -> np.ndarray:
    return np.repeat(per_sequence, LENS)


def found(**fields: object) -> tuple[np.ndarray | None, np.ndarray | None, dict[str, float]]:
    weights, kept, metrics = correct(CorrectionSection(**fields), *logprobs(), LENS)  # type: ignore[arg-type]
    return (None if weights is None else weights.numpy()), (None if kept is None else kept.numpy()), metrics


@pytest.mark.parametrize("cap", [2.1, 2.5])
@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis"])
def test_no_weight_is_above_the_configured_cap(kind: str, cap: float) -> None:
    """Truncated importance sampling: min(ratio, correction.cap), by token or by the product over a sequence."""
    r = ratios()
    ratio = r if kind == "token_tis" else spread([r[a:b].prod() for a, b in BOUNDS])
    weights, kept, _ = found(kind=kind, cap=cap)
    np.testing.assert_allclose(weights, np.minimum(ratio, cap), rtol=1e-5)
    assert kept is None and ratio.min() < cap < ratio.max()


def test_a_broken_token_stays_in_range_and_no_weight_has_a_gradient() -> None:
    weights = token_tis_weights(torch.tensor([-1000.0, 0.0]).requires_grad_(), torch.tensor([0.0, -1000.0]))
    assert weights.tolist() == pytest.approx([math.exp(-20), 2.0])
    assert not weights.requires_grad
    assert correct(CorrectionSection(), *logprobs(), LENS)[0] is None


def test_icepop_zeroes_what_is_outside() -> None:
    weights, _, _ = found(kind="icepop", low=0.6, cap=1.5)
    r = ratios()
    np.testing.assert_allclose(weights, np.where((r >= 0.6) & (r <= 1.5), r, 0.0), rtol=1e-5)
    assert (weights == 0).any() and (weights > 0).any()


@pytest.mark.parametrize("kind", ["token", "sequence", "geometric", "k3"])
def test_rejection(kind: str) -> None:
    r, high = ratios(), {"k3": 0.2, "sequence": 2.1}.get(kind, 1.3)
    statistic = {
        "token": r,
        "sequence": spread([r[a:b].prod() for a, b in BOUNDS]),
        "geometric": spread([np.exp(np.log(r[a:b]).mean()) for a, b in BOUNDS]),
        "k3": spread([(r[a:b] - 1 - np.log(r[a:b])).mean() for a, b in BOUNDS]),
    }[kind]
    expected = (statistic <= high) & ((statistic >= 0.7) | (kind == "k3"))
    weights, kept, metrics = found(reject=kind, reject_low=0.7, reject_high=high)
    assert weights is None
    assert kept is not None and kept.tolist() == expected.tolist()
    assert 0 < expected.sum() < len(expected)
    assert metrics["rollout_corr/rollout_rs_masked_fraction"] == pytest.approx(1 - expected.mean())
    assert metrics[f"rollout_corr/rollout_rs_{kind}_masked_fraction"] == pytest.approx(1 - expected.mean())


def test_bounds_are_of_the_ratio_and_not_of_its_inverse() -> None:
    section = CorrectionSection(reject="token", reject_low=0.9, reject_high=10.0)
    trainer = torch.tensor([-1.0, -1.0])
    _, kept, _ = correct(section, trainer, torch.tensor([-2.0, -2.0]), [2])
    assert kept is not None and kept.tolist() == [True, True]  # ratios e and e
    _, kept, _ = correct(section, torch.tensor([-3.0, -1.0]), torch.tensor([-2.0, -2.0]), [2])
    assert kept is not None and kept.tolist() == [False, True]  # 1/e is below 0.9, e is not above 10


def test_veto_drops_whole_sequences() -> None:
    r = ratios()
    expected = spread([float(r[a:b].min() >= 0.55) for a, b in BOUNDS]).astype(bool)
    _, kept, metrics = found(veto=0.55)
    assert kept is not None and kept.tolist() == expected.tolist()
    assert 0 < expected.sum() < len(expected)
    assert metrics["rollout_corr/rollout_token_veto_fraction"] == pytest.approx(1 - expected.mean())
    vetoed = [r[a:b].min() < 0.55 for a, b in BOUNDS]
    assert metrics["rollout_corr/rollout_is_veto_fraction"] == pytest.approx(np.mean(vetoed))
    assert metrics["rollout_corr/rollout_is_catastrophic_token_fraction"] == pytest.approx((r < 0.55).mean())
    assert len({round(share, 6) for name, share in metrics.items() if "veto" in name or "catastrophic" in name}) == 3


def test_batch_normalization_is_over_what_is_kept() -> None:
    fields = {"kind": "token_tis", "reject": "token", "reject_low": 0.7, "reject_high": 1.3}
    weights, kept, metrics = found(**fields, batch_normalize=True)
    assert weights is not None and kept is not None
    assert weights[kept].mean() == pytest.approx(1.0)
    assert not weights[~kept].any()
    raw, _, plain = found(**fields)
    assert raw is not None
    assert metrics["rollout_corr/rollout_is_batch_norm_factor"] == pytest.approx(raw[kept].mean())
    assert "rollout_corr/rollout_is_batch_norm_factor" not in plain


@pytest.mark.parametrize("kind", ["token_tis", "sequence_tis", "icepop"])
def test_agreement_needs_no_correction(kind: str) -> None:
    _, rollout = logprobs()
    section = CorrectionSection(kind=kind, reject="geometric", reject_low=0.999, reject_high=1.001, veto=1e-4)  # type: ignore[arg-type]
    weights, kept, metrics = correct(section, rollout, rollout, LENS)
    assert weights is not None and (weights == 1).all()
    assert kept is not None and kept.all()
    assert not any(metrics.values())


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"batch_normalize": True}, "no weights to divide"),
        ({"reject": "token", "reject_high": 0.9}, "both sides agree"),
        ({"kind": "tis"}, "token_tis"),
    ],
)
def test_bad_sections(fields: dict[str, object], text: str) -> None:
    with pytest.raises(ConfigError, match=text):
        CorrectionSection(**fields)  # type: ignore[arg-type]


@pytest.mark.parametrize(
    "aggregation", ["token-mean", "seq-mean-token-mean", "seq-mean-token-sum", "seq-mean-token-sum-norm"]
)
def test_rejected_tokens_count_nowhere(aggregation: str) -> None:
    kept = torch.tensor([1, 0, 1, 1, 0, 1, 1, 1, 1, 1, 1, 1, 0, 0, 0]).bool()  # the second and last sequences are out
    values = torch.arange(15.0)
    found_total = (token_coefficients(LENS, aggregation, is_kept=kept, max_tokens=8) * values).sum()
    sequences = [values[a:b][kept[a:b]] for a, b in BOUNDS if kept[a:b].any()]
    sums = torch.stack([x.sum() for x in sequences])
    expected = {
        "token-mean": torch.cat(sequences).mean(),
        "seq-mean-token-mean": torch.stack([x.mean() for x in sequences]).mean(),
        "seq-mean-token-sum": sums.mean(),
        "seq-mean-token-sum-norm": (sums / 8).mean(),
    }[aggregation]
    torch.testing.assert_close(found_total, expected)


def test_the_objective_takes_the_step_s_weights() -> None:
    trainer, rollout = logprobs()
    section = CorrectionSection(kind="token_tis", reject="sequence", reject_low=0.7, reject_high=2.1)
    weights, kept, _ = correct(section, trainer, rollout, LENS)
    batch = TokenBatch(rollout, torch.ones(15), token_coefficients(LENS, is_kept=kept), trainer, weights=weights)
    leaf = trainer.clone().requires_grad_()
    policy_objective(leaf, batch, AlgorithmSection(), section).loss.backward()
    assert leaf.grad is not None and weights is not None and kept is not None
    torch.testing.assert_close(leaf.grad, -weights / kept.sum())
    later = dataclasses.replace(batch, weights=weights * 2)
    objective = policy_objective(trainer.clone().requires_grad_(), later, AlgorithmSection(), section)
    torch.testing.assert_close(objective.loss, 2 * -(weights / kept.sum()).sum())
