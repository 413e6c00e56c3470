"""What a person sees while a run goes on: one live line a phase on a terminal, a plain line now and then elsewhere."""

import time
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

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
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._phase: TaskID | None = None
        self._num_steps = 0
        self._spoke_s = 0.0
        self._accuracy = ""

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._bar.stop()

    def begin(self, phase: str, num_steps: int) -> None:
        """Start a phase's bar."""
        self._phase = self._bar.add_task(phase, total=num_steps, status="")
        self._num_steps = num_steps
        self._spoke_s = time.monotonic()

    def end(self) -> None:
        """Stop a phase's bar where it is: a phase may be done before its last step."""
        if self._phase is not None:
            self._bar.update(self._phase, total=max(self._bar.tasks[-1].completed, 1))

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_warmup(self, row: WarmupStep) -> None:
        """Show a step of the warm start."""
        if row.accuracy is not None:
            self._accuracy = f"  sampled accuracy {row.accuracy:.2f}"
        self._show("warm start", row.step, f"loss {row.loss:.3f}{self._accuracy}")

    def show_step(self, row: StepRow) -> None:
        """Show a step of reinforcement."""
        self._show("reinforce", row.step, row.summary)

    def _show(self, phase: str, step: int, status: str) -> None:
        assert self._phase is not None, "begin comes first"
        self._bar.update(self._phase, completed=step, status=status)
        now = time.monotonic()
        is_due = step == self._num_steps or now - self._spoke_s >= _PLAIN_INTERVAL_S
        if is_due and not self._console.is_terminal:
            self._spoke_s = now
            self.say(f"{phase} {step}/{self._num_steps}  {status}")
