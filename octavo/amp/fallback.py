"""When FP8 is left for a while: the stated rules, as pure arithmetic over what a loop sees of each step."""

import collections
import dataclasses
import math
import statistics
from typing import Any

from octavo.errors import ConfigError


@dataclasses.dataclass(frozen=True)
class Fallback:
    """From O1 to O2 for some steps, and back, on any of three rules.

    Args:
        steps: how many steps O2 then lasts.
        window: a loss spike is a loss > mean + num_std * std of the last `window` finite losses.
        num_std: see window; 0 turns the rule off.
        min_losses: finite losses that there must be before it holds.
        nonfinite_window: steps that max_nonfinite_share looks back.
        max_nonfinite_share: steps with a loss or gradients that are inf or NaN are more than this share of them (1.0
            turns the rule off).
        max_overflow_share: more than this share of delayed scaling's operands was clipped in one step (1.0 turns the
            rule off); other recipes make their scales from the tensor itself and clip nothing.

    Raises:
        ConfigError: for values with which a rule makes no sense.
    """

    steps: int = 100
    window: int = 64
    num_std: float = 6.0
    min_losses: int = 16
    nonfinite_window: int = 20
    max_nonfinite_share: float = 0.1
    max_overflow_share: float = 0.5

    def __post_init__(self) -> None:
        if self.steps < 1 or self.nonfinite_window < 1 or not 2 <= self.min_losses <= self.window:
            raise ConfigError(
                "a fallback needs steps >= 1, nonfinite_window >= 1 and 2 <= min_losses <= window; got "
                f"steps={self.steps}, nonfinite_window={self.nonfinite_window}, min_losses={self.min_losses}, "
                f"window={self.window}"
            )
        if self.num_std < 0 or not (0 <= self.max_nonfinite_share <= 1 and 0 <= self.max_overflow_share <= 1):
            raise ConfigError(
                f"num_std must be >= 0 and shares between 0 and 1, got {self.num_std}, {self.max_nonfinite_share}, "
                f"{self.max_overflow_share}"
            )


class Watch:
    """The memory of a Fallback: recent losses, recent bad steps, and how long O2 still lasts."""

    def __init__(self, rule: Fallback) -> None:
        self.rule = rule
        self.remaining = 0
        self._losses: collections.deque[float] = collections.deque(maxlen=rule.window)
        self._bad: collections.deque[bool] = collections.deque(maxlen=rule.nonfinite_window)

    def observe(self, loss: float, is_finite: bool, overflow_share: float) -> str | None:
        """Take note of a step that was computed under O1.

        Returns:
            Why to fall back now, or None.
        """
        reason = self._spike(loss)
        self.remember(loss)
        self._bad.append(not (is_finite and math.isfinite(loss)))
        num_bad, rule = sum(self._bad), self.rule
        if reason is None and num_bad / rule.nonfinite_window > rule.max_nonfinite_share:
            return (
                f"{num_bad} of the last {rule.nonfinite_window} steps had a loss or gradients that are not finite "
                f"(more than {rule.max_nonfinite_share:.0%})"
            )
        if reason is None and overflow_share > rule.max_overflow_share:
            limit = f"(more than {rule.max_overflow_share:.0%})"
            return f"{overflow_share:.0%} of delayed scaling's operands were clipped {limit}"
        return reason

    def remember(self, loss: float) -> None:
        """Take note of the loss of any step."""
        if math.isfinite(loss):
            self._losses.append(loss)

    def start(self) -> None:
        """O2 begins; the bad steps that led to it are forgotten."""
        self.remaining = self.rule.steps
        self._bad.clear()

    def _spike(self, loss: float) -> str | None:
        rule = self.rule
        if rule.num_std == 0 or not math.isfinite(loss) or len(self._losses) < rule.min_losses:
            return None
        mean, std = statistics.fmean(self._losses), statistics.pstdev(self._losses)
        if loss <= mean + rule.num_std * std:
            return None
        return (
            f"loss {loss:.4g} > mean {mean:.4g} + {rule.num_std:g} * std {std:.2g} of the last {len(self._losses)} "
            "finite losses"
        )

    def state_dict(self) -> dict[str, Any]:
        """Plain values."""
        return {"remaining": self.remaining, "losses": list(self._losses), "bad": list(self._bad)}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        """Go on from state_dict's values."""
        self.remaining = int(state["remaining"])
        self._losses.clear()
        self._losses.extend(state["losses"])
        self._bad.clear()
        self._bad.extend(state["bad"])
