"""Health of a step: limits on what is measured before the update, and what happens where one is passed.

The defaults are the thresholds that verl's and NeMo-RL's users watch by eye; here they warn, skip the update or stop.
"""

import collections
import dataclasses
import math
from collections.abc import Mapping
from typing import Any, Literal, Self

from pydantic import PositiveInt, model_validator

from octavo.config import Config
from octavo.errors import HealthError

Action = Literal["off", "warn", "skip", "stop"]
ACTIONS: tuple[Action, ...] = ("off", "warn", "skip", "stop")  # each does what those before it do

K3 = "rollout_corr/k3_kl"
K3_GROWTH = "health/k3_growth"
_K3_FLOOR = 1e-6  # below it a KL is rounding, and how often it doubled means nothing

# Key of [health] -> the metric that it limits.
METRICS = {
    "ess": "mismatch/eff_sample_size",
    "is_mean": "rollout_corr/rollout_is_mean",
    "is_std": "mismatch/weight_std",
    "kl": "rollout_corr/kl",
    "k3_kl": K3,
    "k3_growth": K3_GROWTH,
    "chi2_token": "rollout_corr/chi2_token",
    "token_mult_prob_error": "mismatch/token_mult_prob_error",
    "probs_pearson_corr": "training/rollout_actor_probs_pearson_corr",
    "entropy": "actor/entropy",
    "repetition": "response/repetition_share",
}


class Limit(Config):
    """Bounds of one metric, and what happens outside of them.

    Args:
        low: the least that the metric may be; none is no bound. NaN is outside of any bound.
        high: the most that the metric may be; none is no bound.
        action: "off"; "warn" says so; "skip" leaves the step's update out; "stop" also ends the run, after the step's
            numbers are written.
        patience: steps in a row that must be outside before anything happens.
    """

    low: float | None = None
    high: float | None = None
    action: Action = "warn"
    patience: PositiveInt = 1

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.low is not None and self.high is not None and self.low > self.high:
            raise ValueError(f"a limit's low={self.low} is above its high={self.high}; nothing would be within")
        return self

    def admits(self, value: float) -> bool:
        """Whether a value is within; without any bound everything is."""
        if self.low is None and self.high is None:
            return True
        return (self.low is None or value >= self.low) and (self.high is None or value <= self.high) and value == value


class HealthSection(Config):
    """Limits of a step, measured on its rollouts before the update; `health.<key>.action` decides what they do.

    A key's bounds, action and patience can be given one by one; the others stay.

    Args:
        ess: effective sample size of the weights trainer / sampler, as a share; of the raw weights, because those
            clamped to a cap of 2, which `rollout_corr/` reports, cannot fall below 0.64.
        is_mean: mean of the raw weights.
        is_std: standard deviation of the raw weights.
        kl: mismatch KL a token, its k1 estimate.
        k3_kl: mismatch KL a token, its k3 estimate.
        k3_growth: k3 over the last `window` steps against the run's first `window` steps.
        chi2_token: mean squared weight less 1.
        token_mult_prob_error: mean of exp |delta logprob|.
        probs_pearson_corr: correlation of the two sides' probabilities.
        entropy: nats a token; no bound unless one is set.
        repetition: share of long responses that say one or two tokens over and over.
        window: steps of each of k3_growth's two means.
    """

    ess: Limit = Limit(low=0.3)
    is_mean: Limit = Limit(low=0.5, high=2.0)
    is_std: Limit = Limit(high=1.0)
    kl: Limit = Limit(low=-0.1, high=0.1)
    k3_kl: Limit = Limit(high=0.1)
    k3_growth: Limit = Limit(high=10.0)
    chi2_token: Limit = Limit(high=1.0)
    token_mult_prob_error: Limit = Limit(high=1.05)
    probs_pearson_corr: Limit = Limit(low=0.9)
    entropy: Limit = Limit()
    repetition: Limit = Limit(high=0.5)
    window: PositiveInt = 10

    @model_validator(mode="before")
    @classmethod
    def _keep_defaults(cls, given: Any) -> Any:
        """What a limit does not say stays as it is by default: its action may be given alone, without its bounds."""
        if not isinstance(given, Mapping):
            return given
        merged = dict(given)
        for key in METRICS:
            if isinstance(given.get(key), Mapping):
                default = cls.model_fields[key].default.model_dump(exclude_none=True)
                merged[key] = {**default, **given[key]}
        return merged

    def limits(self) -> dict[str, Limit]:
        """Key -> its limit, in the order above."""
        return {key: getattr(self, key) for key in METRICS}


@dataclasses.dataclass(frozen=True)
class Alert:
    """One metric outside of its limit.

    Attributes:
        key: of the [health] section.
        steps: how many in a row it has been outside.
        action: what is done about it at this step.
    """

    step: int
    key: str
    metric: str
    value: float
    low: float | None
    high: float | None
    steps: int
    action: Action

    @property
    def text(self) -> str:
        """The alert in one sentence, with the key that changes it."""
        bounds = " and ".join(
            f"{word} {bound:g}" for word, bound in (("at least", self.low), ("at most", self.high)) if bound is not None
        )
        lasting = f" for {self.steps} steps" if self.steps > 1 else ""
        done = {"warn": "", "skip": "; this step's update is left out", "stop": "; the run ends here"}
        return (
            f"{self.metric} = {self.value:.4g}{lasting}, should be {bounds}{done.get(self.action, '')} "
            f"(health.{self.key})"
        )

    def as_dict(self) -> dict[str, Any]:
        """Plain JSON values."""
        value = self.value if math.isfinite(self.value) else repr(self.value)
        return {**dataclasses.asdict(self), "value": value, "text": self.text}


@dataclasses.dataclass(frozen=True)
class HealthStatus:
    """What a step's numbers call for.

    Attributes:
        alerts: those past their patience.
        metrics: `health/...`, to be logged with the step.
    """

    alerts: tuple[Alert, ...]
    metrics: dict[str, float]

    @property
    def action(self) -> Action:
        """The severest of all alerts' actions; "off" for none."""
        return max((f.action for f in self.alerts), key=ACTIONS.index, default="off")

    @property
    def blocks_update(self) -> bool:
        """Whether the step's update must be left out."""
        return self.action in ("skip", "stop")

    def raise_if_stopped(self) -> None:
        """End the run where a limit's action says so.

        Raises:
            HealthError: naming step, metric, value, bounds and key.
        """
        stopping = [f for f in self.alerts if f.action == "stop"]
        if stopping:
            raise HealthError(
                f"step {stopping[0].step}: {'; '.join(f.text for f in stopping)}. Nothing was updated from this step; "
                "`octavo doctor mismatch` finds out which part of the two sides differs"
            )


class HealthMonitor:
    """Holds each step's numbers against the limits; remembers what patience and growth need.

    A run that goes on from a checkpoint shows a new monitor the steps that it has, and so makes it the old one.

    Args:
        section: the limits.
    """

    def __init__(self, section: HealthSection) -> None:
        self.section = section
        self._streaks: dict[str, int] = {}
        self._first: list[float] = []
        self._recent: collections.deque[float] = collections.deque(maxlen=section.window)
        self._num_seen = 0

    def check(self, step: int, metrics: Mapping[str, float]) -> HealthStatus:
        """Judge one step, once.

        Args:
            metrics: what was measured before the update; a metric that is missing is not checked.
        """
        growth = self._note_k3(metrics[K3]) if K3 in metrics else {}
        known = {**metrics, **growth}
        alerts = []
        for key, limit in self.section.limits().items():
            metric = METRICS[key]
            if limit.action == "off" or metric not in known:
                continue
            is_outside = not limit.admits(known[metric])
            self._streaks[key] = streak = self._streaks.get(key, 0) + 1 if is_outside else 0
            if streak >= limit.patience:
                alerts.append(Alert(step, key, metric, known[metric], limit.low, limit.high, streak, limit.action))
        status = HealthStatus(tuple(alerts), growth)
        counted = {
            "health/num_findings": float(len(alerts)),
            "health/update_skipped": float(status.blocks_update),
        }
        return dataclasses.replace(status, metrics={**growth, **counted})

    def _note_k3(self, k3: float) -> dict[str, float]:
        """How much k3 has grown, once both means are over whole windows that do not overlap."""
        window = self.section.window
        self._num_seen += 1
        self._recent.append(k3)
        if len(self._first) < window:
            self._first.append(k3)
        if self._num_seen < 2 * window:
            return {}
        first, recent = (sum(x) / window for x in (self._first, self._recent))
        return {K3_GROWTH: max(recent, _K3_FLOOR) / max(first, _K3_FLOOR) if recent == recent else math.nan}
