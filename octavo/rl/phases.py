"""Time and energy of a step, phase by phase: sampling, scoring, learning, refit."""

import time
from collections.abc import Callable

SECONDS, JOULES = "timing_s/", "energy_j/"


class PhaseMeter:
    """Measures one step; phases follow each other without a gap.

    Args:
        joules: reads the GPU's energy counter; None where there is none, and then no joules are reported.
    """

    def __init__(self, joules: Callable[[], float] | None = None) -> None:
        self._joules = joules
        self._began = self._last = self._read()
        self._phases: dict[str, tuple[float, float]] = {}

    def end(self, phase: str) -> None:
        """The phase that went on until now is over; one that comes again is added to."""
        now = self._read()
        seconds, joules = self._phases.get(phase, (0.0, 0.0))
        self._phases[phase] = (seconds + now[0] - self._last[0], joules + now[1] - self._last[1])
        self._last = now

    @property
    def seconds(self) -> float:
        """Until the last phase's end."""
        return self._last[0] - self._began[0]

    def metrics(self) -> dict[str, float]:
        """`timing_s/<phase>` and, where there is a counter, `energy_j/<phase>`, each with a "step" for the whole."""
        whole = {"step": (self.seconds, self._last[1] - self._began[1])}
        rows = {**self._phases, **whole}
        found = {SECONDS + name: seconds for name, (seconds, _) in rows.items()}
        return found if self._joules is None else found | {JOULES + name: joules for name, (_, joules) in rows.items()}

    def _read(self) -> tuple[float, float]:
        return time.perf_counter(), 0.0 if self._joules is None else self._joules()
