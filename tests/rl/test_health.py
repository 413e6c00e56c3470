"""Limits warn, skip or stop as they are told, NaN included; patience and growth survive a resume."""

import json
import math
from pathlib import Path
from typing import Any

import pytest
import torch

from octavo.config import load_config
from octavo.errors import ConfigError, HealthError
from octavo.rl.config import RLConfig
from octavo.rl.health import K3, K3_GROWTH, METRICS, HealthMonitor, HealthSection, Limit
from octavo.rl.history import HEALTH_FILE, StepRow, read_alerts
from octavo.rl.metrics import mismatch_metrics
from octavo.rl.report import REPORT_FILE
from octavo.run.metrics import METRICS_FILE, read_metrics
from tests.rl.conftest import Policy, tiny_config
from tests.rl.test_loop import run, weights_of


def monitor(**limits: object) -> HealthMonitor:
    return HealthMonitor(HealthSection(**limits))  # type: ignore[arg-type]


def measured(noise: float, seed: int = 0) -> dict[str, float]:
    gen = torch.Generator().manual_seed(seed)
    rollout = -torch.rand(2000, generator=gen) * 3
    return mismatch_metrics(rollout + noise * torch.randn(2000, generator=gen), rollout, [100] * 20)


def test_agreement_is_healthy() -> None:
    status = monitor().check(1, measured(0.0))
    assert (status.alerts, status.action, status.blocks_update) == ((), "off", False)
    assert status.metrics == {"health/num_findings": 0.0, "health/update_skipped": 0.0}
    status.raise_if_stopped()


def test_the_level_of_fp8_rollouts_is_healthy_and_a_broken_sampler_is_not() -> None:
    assert monitor().check(1, measured(0.03)).action == "off"
    broken = monitor().check(1, measured(1.5))
    assert broken.action == "warn"
    assert not broken.blocks_update
    assert {"is_std", "k3_kl", "chi2_token", "token_mult_prob_error"} <= {f.key for f in broken.alerts}


# one value on each side of every default bound
@pytest.mark.parametrize(
    ("key", "good", "bad"),
    [
        ("ess", 0.31, 0.29), ("is_mean", 0.51, 0.49), ("is_mean", 1.99, 2.01), ("is_std", 0.99, 1.01),
        ("kl", 0.09, 0.11), ("kl", -0.09, -0.11), ("k3_kl", 0.09, 0.11), ("chi2_token", 0.9, 1.1),
        ("token_mult_prob_error", 1.04, 1.06), ("probs_pearson_corr", 0.91, 0.89), ("repetition", 0.4, 0.6),
    ],
)  # fmt: skip
def test_default_bounds(key: str, good: float, bad: float) -> None:
    assert monitor().check(1, {METRICS[key]: good}).alerts == ()
    (alert,) = monitor().check(7, {METRICS[key]: bad}).alerts
    assert (alert.key, alert.step, alert.value, alert.action) == (key, 7, bad, "warn")
    assert METRICS[key] in alert.text and f"health.{key}" in alert.text


def test_every_key_limits_a_metric_that_is_measured() -> None:
    elsewhere = {"actor/entropy", "response/repetition_share", K3_GROWTH}
    assert set(METRICS.values()) - elsewhere <= measured(0.1).keys()


@pytest.mark.parametrize("action", ["warn", "skip", "stop"])
def test_actions(action: str) -> None:
    status = monitor(k3_kl=Limit(high=0.01, action=action)).check(3, {K3: 0.02})  # type: ignore[arg-type]
    assert status.action == action
    assert status.blocks_update == (action != "warn")
    assert status.metrics["health/update_skipped"] == float(action != "warn")
    if action == "stop":
        with pytest.raises(HealthError, match=r"step 3: rollout_corr/k3_kl = 0.02, should be at most 0.01"):
            status.raise_if_stopped()
    else:
        status.raise_if_stopped()


def test_the_severest_action_counts() -> None:
    limits = {"k3_kl": Limit(high=0.01), "ess": Limit(low=0.5, action="skip")}
    status = monitor(**limits).check(1, {K3: 0.02, METRICS["ess"]: 0.4})
    assert (len(status.alerts), status.action) == (2, "skip")
    assert monitor(k3_kl=Limit(high=0.01, action="off")).check(1, {K3: 5.0}).alerts == ()


@pytest.mark.parametrize("value", [math.nan, math.inf])
def test_what_is_not_finite_is_outside(value: float) -> None:
    (alert,) = monitor().check(1, {K3: value}).alerts
    json.dumps(alert.as_dict(), allow_nan=False)


def test_nan_is_within_no_bounds() -> None:
    assert monitor().check(1, {METRICS["entropy"]: math.nan}).alerts == ()
    assert len(monitor(entropy=Limit(low=0.1)).check(1, {METRICS["entropy"]: math.nan}).alerts) == 1


def test_patience_counts_steps_in_a_row() -> None:
    patient = monitor(k3_kl=Limit(high=0.01, patience=2))
    found = [bool(patient.check(step, {K3: k3}).alerts) for step, k3 in enumerate([0.1, 0.0, 0.1, 0.1, 0.1])]
    assert found == [False, False, False, True, True]


def test_growth_compares_the_last_window_with_the_first() -> None:
    grown = monitor(window=2, k3_growth=Limit(high=4.0))
    rows = [grown.check(step, {K3: k3}) for step, k3 in enumerate([1e-3, 3e-3, 4e-3, 4e-3, 2e-2])]
    assert [K3_GROWTH in row.metrics for row in rows] == [False, False, False, True, True]
    assert rows[3].metrics[K3_GROWTH] == pytest.approx(2.0)
    assert rows[4].metrics[K3_GROWTH] == pytest.approx(6.0)
    assert [f.key for f in rows[4].alerts] == ["k3_growth"]


def test_exact_runs_do_not_grow() -> None:
    exact = monitor(window=1)
    assert [exact.check(step, {K3: 0.0}).metrics.get(K3_GROWTH) for step in range(3)] == [None, 1.0, 1.0]


def test_a_monitor_that_sees_the_steps_again_goes_on() -> None:
    limits = {"window": 2, "k3_kl": Limit(high=0.01, patience=3)}
    whole, resumed = monitor(**limits), monitor(**limits)
    rows = []
    for step, k3 in enumerate([1e-3, 0.02, 0.02, 0.02, 0.5]):
        metrics = {K3: k3}
        rows.append(metrics | whole.check(step, metrics).metrics)  # as metrics.jsonl has them
    for step in range(4):
        resumed.check(step, rows[step])
    last = whole.check(5, {K3: 0.5})
    resumed.check(4, rows[4])
    assert resumed.check(5, {K3: 0.5}) == last
    assert last.alerts and K3_GROWTH in last.metrics


def test_what_a_limit_does_not_say_stays(tmp_path: Path) -> None:
    config = tmp_path / "config.toml"
    config.write_text('[health]\nwindow = 3\n[health.ess]\naction = "stop"\n[health.kl]\nhigh = 0.5\n')
    section = load_config(RLConfig, config, ["health.k3_kl.patience=4"]).health
    assert section.ess == Limit(low=0.3, action="stop")
    assert section.kl == Limit(low=-0.1, high=0.5)
    assert section.k3_kl == Limit(high=0.1, patience=4)
    assert (section.window, section.is_std) == (3, HealthSection().is_std)
    with pytest.raises(ConfigError, match=r"health\.ess\.lo\b.*did you mean health\.ess\.low"):
        load_config(RLConfig, config, ["health.ess.lo=1"])


def test_bad_limits() -> None:
    with pytest.raises(ConfigError, match="nothing would be within"):
        Limit(low=2.0, high=1.0)
    with pytest.raises(ConfigError, match="warn"):
        Limit(action="explode")  # type: ignore[arg-type]


# through the loop: FP8 rollouts of a bf16 trainer, whose KL is above 0


def config_of(directory: Path, action: str, **sections: Any) -> RLConfig:
    return tiny_config(
        directory,
        exact=False,
        rollout={"recipe": "blockwise"},
        trainer={"recipe": "bf16", **sections.pop("trainer", {})},
        health={"k3_kl": {"high": 1e-12, "action": action}},
        **sections,
    )


@pytest.mark.parametrize("minibatches", [1, 2])
@pytest.mark.parametrize("action", ["warn", "skip"])
def test_a_step_beyond_its_limit_is_not_learned_from(
    tmp_path: Path, policy: Policy, action: str, minibatches: int
) -> None:
    config = config_of(tmp_path, action, trainer={"steps": 2, "minibatches": minibatches})
    before = weights_of(policy[0])
    result = run(config, model=policy[0], tokenizer=policy[1])
    assert all(torch.equal(before[name], p) for name, p in policy[0].named_parameters()) == (action == "skip")
    assert [row["health/update_skipped"] for row in result.history] == [float(action == "skip")] * 2
    assert all((row["actor/lr"] == 0.0) == (action == "skip") for row in result.history)
    assert all(row["actor/grad_norm"] > 0 and row["health/num_findings"] >= 1 for row in result.history)
    alerts = [(f["step"], f["action"]) for f in read_alerts(tmp_path / HEALTH_FILE) if f["key"] == "k3_kl"]
    assert alerts == [(1, action), (2, action)]


def test_a_run_that_is_stopped_leaves_its_numbers_and_a_report(tmp_path: Path, policy: Policy) -> None:
    before = policy[0].head_weight.clone()
    with pytest.raises(HealthError, match=r"step 1: rollout_corr/k3_kl = .*health\.k3_kl.*octavo doctor mismatch"):
        run(config_of(tmp_path, "stop"), model=policy[0], tokenizer=policy[1])
    assert torch.equal(before, policy[0].head_weight)
    assert [row.step for row in read_metrics(tmp_path / METRICS_FILE, StepRow)] == [1]
    assert "the run ends here" in (tmp_path / REPORT_FILE).read_text(encoding="utf-8")


def test_exact_runs_pass_no_limit(tmp_path: Path, policy: Policy) -> None:
    result = run(tiny_config(tmp_path, trainer={"steps": 1}), model=policy[0], tokenizer=policy[1])
    assert result.history[0]["health/num_findings"] == 0.0
    assert not (tmp_path / HEALTH_FILE).exists()
