"""Axes of a chart: where a value lands between 0 and 1, and the round numbers that are written beside it."""

import dataclasses
import math
from collections.abc import Sequence

_STEPS = (1.0, 2.0, 5.0, 10.0)
_MAX_DIGITS = 4  # behind the point; smaller numbers are written with an exponent
_ZERO_BAND = 0.12  # share of a log axis below its smallest decade, where exact zeros are drawn


@dataclasses.dataclass(frozen=True)
class Tick:
    """A number written at an axis, and its place from 0 to 1."""

    place: float
    label: str


@dataclasses.dataclass(frozen=True)
class LinearAxis:
    """Evenly spaced values from low to high, with a number written at every multiple of step."""

    low: float
    high: float
    step: float

    @classmethod
    def around(cls, values: Sequence[float], *, from_zero: bool = False, num_ticks: int = 5) -> "LinearAxis":
        """The axis between round numbers that holds all values (and 0, if asked)."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        if from_zero:
            low, high = min(low, 0.0), max(high, 0.0)
        if high - low <= 1e-12 * max(abs(low), abs(high), 1e-300):
            pad = abs(high) * 0.1 or 1.0
            low, high = low if from_zero else low - pad, high + pad
        step = _round_step((high - low) / num_ticks)
        return cls(math.floor(low / step + 1e-9) * step, math.ceil(high / step - 1e-9) * step, step)

    @classmethod
    def tight(cls, values: Sequence[float], *, num_ticks: int = 6) -> "LinearAxis":
        """The axis from the smallest to the largest value."""
        low, high = min(values, default=0.0), max(values, default=1.0)
        high = high if high > low else low + 1.0
        return cls(low, high, _round_step((high - low) / num_ticks))

    def place(self, value: float) -> float:
        """0 at low, 1 at high."""
        return (value - self.low) / (self.high - self.low)

    def ticks(self) -> list[Tick]:
        """Multiples of the step that lie on the axis."""
        first, last = math.ceil(self.low / self.step - 1e-9), math.floor(self.high / self.step + 1e-9)
        return [Tick(self.place(i * self.step), self._label(i)) for i in range(first, last + 1)]

    def _label(self, num_steps: int) -> str:
        digits = max(0, -math.floor(math.log10(self.step) + 1e-9))
        return number(num_steps * self.step, f",.{digits}f" if digits <= _MAX_DIGITS else ".3g")


@dataclasses.dataclass(frozen=True)
class LogAxis:
    """Decades from 10**low to 10**high; values of exactly zero have a line of their own below them."""

    low: int
    high: int
    has_zero: bool

    @classmethod
    def around(cls, values: Sequence[float]) -> "LogAxis":
        """The axis of whole decades that holds all positive values."""
        positive = [value for value in values if value > 0]
        low = math.floor(math.log10(min(positive, default=1e-6)))
        high = math.ceil(math.log10(max(positive, default=1.0)))
        return cls(low, max(high, low + 1), any(value == 0 for value in values))

    @property
    def _floor(self) -> float:
        return _ZERO_BAND if self.has_zero else 0.0

    def place(self, value: float) -> float:
        """0 for zero; above it by the logarithm."""
        if value <= 0:
            return 0.0
        return self._floor + (1 - self._floor) * (math.log10(value) - self.low) / (self.high - self.low)

    def ticks(self, num_ticks: int = 5) -> list[Tick]:
        """Decades, thinned where there are many, and 0."""
        every = max(1, math.ceil((self.high - self.low) / num_ticks))
        decades = [Tick(self.place(10.0**e), f"{10.0**e:g}") for e in range(self.low, self.high + 1, every)]
        return [Tick(0.0, "0"), *decades] if self.has_zero else decades


def number(value: float, form: str) -> str:
    """A number by a format spec, but 0 as `0`, which 0.00e+00 hides."""
    return "0" if value == 0 else format(value, form)


def _round_step(step: float) -> float:
    """The smallest of 1, 2, 5, 10 times a power of ten that is not below step."""
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in _STEPS if factor * power >= step * (1 - 1e-9))
