"""The demo's clock: splits the seconds that were asked for over the stages, and keeps what each stage took."""

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping

from octavo.errors import ConfigError

MIN_SECONDS = 20.0


def check_seconds(seconds: float) -> None:
    """Refuse fewer seconds than the demo can do with.

    Raises:
        ConfigError: they are fewer.
    """
    if not seconds >= MIN_SECONDS:
        raise ConfigError(f"--seconds must be at least {MIN_SECONDS:.0f}, got {seconds:g}; the default is 280")


class Budget:
    """Time for the stages that are still to come, in the proportion of their shares.

    A stage that ends early leaves its rest to the later ones; one that overruns takes from them.

    Args:
        seconds: for the whole demo.
        shares: stage name -> its share, in the order of the stages; any positive numbers.
        clock: seconds, monotonic.
        began: when the demo began, by that clock; now where it is not given.
    """

    def __init__(
        self,
        seconds: float,
        shares: Mapping[str, float],
        *,
        clock: Callable[[], float] = time.monotonic,
        began: float | None = None,
    ) -> None:
        self.seconds = seconds
        self._shares = dict(shares)
        self._clock = clock
        self._began = clock() if began is None else began
        self.spent: dict[str, float] = {}

    @property
    def elapsed(self) -> float:
        """Seconds since the demo began."""
        return self._clock() - self._began

    def seconds_for(self, stage: str) -> float:
        """What a stage that is yet to end may take from now on; never below a tenth of its first allotment."""
        ahead = {name: share for name, share in self._shares.items() if name not in self.spent}
        left = self.seconds - self.elapsed
        least = 0.1 * self.seconds * self._shares[stage] / sum(self._shares.values())
        return max(left * ahead[stage] / sum(ahead.values()), least)

    @contextlib.contextmanager
    def stage(self, name: str) -> Iterator[float]:
        """Run a stage: gives what it may take, and keeps what it took."""
        began = self._clock()
        yield self.seconds_for(name)
        self.spent[name] = self._clock() - began


def num_steps_within(seconds: float, seconds_a_step: float, *, least: int, most: int) -> int:
    """Steps that fit into the seconds, between bounds.

    Args:
        seconds_a_step: measured; above 0.
    """
    return max(least, min(most, int(seconds / seconds_a_step)))
