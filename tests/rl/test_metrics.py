"""Mismatch metrics under verl's names against their formulas, written out token by token in numpy."""

import itertools
import math

import numpy as np
import pytest
import torch

from octavo.errors import ShapeError
from octavo.rl.metrics import correction_effect, mismatch_metrics, repetition_share, reward_metrics

LENS = [4, 1, 7, 3]


def logprobs(noise: float, seed: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
    gen = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(sum(LENS), generator=gen) * 4
    return rollout + noise * torch.randn(sum(LENS), generator=gen), rollout


def statement(trainer: np.ndarray, rollout: np.ndarray, cap: float, low: float) -> dict[str, float]:
    """verl's formulas (rl.md 3.4), with pi_o the trainer and mu the rollout."""
    d = trainer - rollout
    p, q = np.exp(trainer), np.exp(rollout)
    bounds = np.cumsum([0, *LENS])
    sequences = [slice(a, b) for a, b in itertools.pairwise(bounds)]
    gaps = np.array([rollout[s].mean() - trainer[s].mean() for s in sequences])
    raw = np.exp(np.clip(d, -20, 20))
    clamped = np.clip(raw, low, cap)
    means = np.array([raw[s].mean() for s in sequences])
    return {
        "training/rollout_probs_diff_mean": np.abs(p - q).mean(),
        "training/rollout_probs_diff_max": np.abs(p - q).max(),
        "training/rollout_probs_diff_std": np.abs(p - q).std(ddof=1),
        "training/rollout_actor_probs_pearson_corr": np.corrcoef(p, q)[0, 1],
        "rollout_corr/kl": (rollout - trainer).mean(),
        "rollout_corr/k3_kl": (np.exp(d) - d - 1).mean(),
        "rollout_corr/training_ppl": np.mean([np.exp(-trainer[s].mean()) for s in sequences]),
        "rollout_corr/training_log_ppl": np.mean([-trainer[s].mean() for s in sequences]),
        "rollout_corr/rollout_log_ppl": np.mean([-rollout[s].mean() for s in sequences]),
        "rollout_corr/rollout_ppl": np.mean([np.exp(-rollout[s].mean()) for s in sequences]),
        "rollout_corr/ppl_ratio": np.exp(gaps).mean(),
        "rollout_corr/log_ppl_diff": gaps.mean(),
        "rollout_corr/log_ppl_abs_diff": np.abs(gaps).mean(),
        "rollout_corr/log_ppl_diff_max": gaps.max(),
        "rollout_corr/log_ppl_diff_min": gaps.min(),
        "rollout_corr/chi2_token": (raw**2).mean() - 1,
        "rollout_corr/chi2_seq": np.mean([raw[s].prod() ** 2 for s in sequences]) - 1,
        "rollout_corr/rollout_is_mean": raw.mean(),
        "rollout_corr/rollout_is_min": raw.min(),
        "rollout_corr/rollout_is_max": raw.max(),
        "rollout_corr/rollout_is_std": np.sqrt((clamped**2).mean() - clamped.mean() ** 2),
        "rollout_corr/rollout_is_eff_sample_size": 1 / ((clamped / clamped.mean()) ** 2).mean(),
        "rollout_corr/rollout_is_ratio_fraction_high": (raw > cap).mean(),
        "rollout_corr/rollout_is_ratio_fraction_low": (raw < low).mean(),
        "rollout_corr/rollout_is_seq_mean": means.mean(),
        "rollout_corr/rollout_is_seq_std": means.std(ddof=1),
        "rollout_corr/rollout_is_seq_min": means.min(),
        "rollout_corr/rollout_is_seq_max": means.max(),
        "rollout_corr/rollout_is_seq_max_deviation": np.abs(means - 1).max(),
        "rollout_corr/rollout_is_seq_fraction_high": (means > cap).mean(),
        "rollout_corr/rollout_is_seq_fraction_low": (means < low).mean(),
        "mismatch/eff_sample_size": raw.mean() ** 2 / (raw**2).mean(),
        "mismatch/weight_std": raw.std(),
        "mismatch/token_mult_prob_error": np.exp(np.abs(d)).mean(),
        "mismatch/logprob_abs_diff_max": np.abs(d).max(),
        "mismatch/logprob_abs_diff_mean": np.abs(d).mean(),
        "mismatch/tokens_differing_share": (d != 0).mean(),
    }


@pytest.mark.parametrize("noise", [1.0, 0.01], ids=["far", "near"])
@pytest.mark.parametrize(("cap", "low"), [(2.0, None), (5.0, None), (5.0, 0.5)])
def test_metrics_equal_their_formulas(noise: float, cap: float, low: float | None) -> None:
    trainer, rollout = logprobs(noise)
    got = mismatch_metrics(trainer, rollout, LENS, cap, low)
    expected = statement(trainer.double().numpy(), rollout.double().numpy(), cap, low or 1 / cap)
    if low is not None:
        high, below = (expected[f"rollout_corr/rollout_is_ratio_fraction_{side}"] for side in ("high", "low"))
        expected["rollout_corr/rollout_is_oob_ratio"] = high + below
    assert got.keys() == expected.keys()
    for name, value in expected.items():
        assert got[name] == pytest.approx(value, rel=1e-8, abs=1e-12), name


def test_no_mismatch_reads_as_none() -> None:
    _, rollout = logprobs(0.0)
    got = mismatch_metrics(rollout, rollout, LENS)
    zero = ("kl", "k3_kl", "chi2_token", "chi2_seq", "log_ppl_abs_diff", "rollout_is_std")
    assert all(got[f"rollout_corr/{name}"] == 0.0 for name in zero)
    assert got["mismatch/logprob_abs_diff_max"] == 0.0
    assert got["rollout_corr/rollout_is_eff_sample_size"] == 1.0
    assert got["training/rollout_actor_probs_pearson_corr"] == 1.0


def test_the_clamp_hides_what_the_raw_weights_show() -> None:
    rollout = torch.zeros(100)
    trainer = torch.full((100,), math.log(0.01))
    trainer[0] = math.log(100.0)
    got = mismatch_metrics(trainer, rollout, [100])
    assert got["rollout_corr/rollout_is_eff_sample_size"] > 0.64  # clamped to [0.5, 2] it cannot be less
    assert got["mismatch/eff_sample_size"] < 0.02


def test_responses_without_tokens_have_no_say() -> None:
    trainer, rollout = logprobs(1.0)
    assert mismatch_metrics(trainer, rollout, [0, 4, 1, 0, 7, 3]) == mismatch_metrics(trainer, rollout, LENS)
    with pytest.raises(ShapeError, match="at least one"):
        mismatch_metrics(trainer[:0], rollout[:0], [0, 0])
    with pytest.raises(ShapeError, match="responses of 14 tokens"):
        mismatch_metrics(trainer, rollout, [4, 10])


def test_one_token_has_no_spread() -> None:
    got = mismatch_metrics(torch.tensor([-1.0]), torch.tensor([-1.1]), [1])
    assert all(math.isfinite(value) for value in got.values())


def test_repetition_is_seen_in_long_responses() -> None:
    garbage, prose, short = [7] * 30 + [1, 2], list(range(16)) * 4, [7] * 31
    assert repetition_share([garbage, prose, prose, short]) == pytest.approx(1 / 3)
    assert repetition_share([short]) == 0.0


def test_reward_metrics() -> None:
    got = reward_metrics(torch.tensor([0.0, 1.0]), torch.tensor([0.0, 0.5]), [2, 4], torch.tensor([-1.0] * 5 + [-4.0]))
    assert got == {
        "reward/mean": 0.5, "reward/max": 1.0, "reward/informative_share": 0.5, "response_length/mean": 3.0,
        "response_length/max": 4.0, "actor/entropy": 1.5,
    }  # fmt: skip


def test_correction_effect_compares_gradients() -> None:
    plain = [torch.tensor([3.0, 0.0]), torch.tensor([[4.0]])]
    corrected = [torch.tensor([0.0, 3.0]), torch.tensor([[4.0]])]
    got = correction_effect(plain, corrected, 1.0, 0.5)
    assert got["correction/grad_norm_without"] == pytest.approx(5.0)
    assert got["correction/grad_cosine"] == pytest.approx(16 / 25)
    assert got["correction/grad_relative_change"] == pytest.approx(math.sqrt(18) / 5)
    assert (got["correction/loss_without"], got["correction/loss_with"]) == (1.0, 0.5)
