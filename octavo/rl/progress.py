"""What a person sees while a run goes on: one live line on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from octavo.rl.history import StepRow
from octavo.rl.warmup import WarmupStep

_PLAIN_INTERVAL_S = 10.0


class RLProgress:
    """Shows loss and accuracy of the warm start, then reward, KL and length.

    Args:
        enabled: False says nothing at all.
        console: where to; standard error by default.
    """

    def __init__(self, enabled: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self._spoke_s = 0.0
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, phase: str, num_steps: int) -> None:
        """Start the bar of a phase."""
        self._phase, self._num_steps = phase, num_steps
        self._task = self._bar.add_task(phase, total=num_steps, status="")

    def end(self) -> None:
        """Fill the phase's bar: a phase may be done before its last step."""
        self._bar.update(self._task, total=max(self._bar.tasks[-1].completed, 1))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def warmup(self, row: WarmupStep) -> None:
        """Show a step of the warm start."""
        status = f"loss {row.loss:.3f}"
        if row.accuracy is not None:
            status += f"  sampled accuracy {row.accuracy:.2f}"
            self._bar.update(self._task, accuracy=f"  sampled accuracy {row.accuracy:.2f}")
        self._update(row.step, status)

    def step(self, row: StepRow) -> None:
        """Show a step of reinforcement."""
        self._update(row.step, row.summary)

    def _update(self, step: int, status: str) -> None:
        self._bar.update(self._task, completed=step, status=status)
        now = time.monotonic()
        due = step == self._num_steps or now - self._spoke_s >= _PLAIN_INTERVAL_S
        if due and not self._console.is_terminal:
            self._spoke_s = now
            self.say(f"{self._phase} {step}/{self._num_steps}  {status}")
