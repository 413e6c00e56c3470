"""What a person sees while a run goes on: one live line on a terminal, plain lines now and then in a file or pipe."""

import time
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeRemainingColumn

from octavo.run.metrics import Row

_PLAIN_INTERVAL_S = 10.0


class TrainProgress:
    """Shows loss, speed and time left.

    Args:
        num_steps: the run's length.
        done_steps: steps done before this process.
        enabled: False says nothing at all.
        console: where to; standard error by default.
    """

    def __init__(self, num_steps: int, done_steps: int, enabled: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self._num_steps = num_steps
        self._first_step = done_steps
        self._began_s = time.monotonic()
        self._spoke_s = self._began_s
        self._bar = Progress(
            TextColumn("training"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            TextColumn("left"),
            console=self._console,
            disable=not (enabled and self._console.is_terminal),
        )
        self._task = self._bar.add_task("training", total=num_steps, completed=done_steps, status="")

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def say(self, text: str) -> None:
        """Print a line above the bar."""
        if self._enabled:
            self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def update(self, row: Row) -> None:
        """Show a step's numbers."""
        status = f"loss {row.loss:.4f}  {row.tokens_per_s:,.0f} tokens/s"
        if row.val_ppl is not None:
            status += f"  validation perplexity {row.val_ppl:.2f}"
        self._bar.update(self._task, completed=row.step, status=status)
        if not self._console.is_terminal:
            self._say_plainly(row, status)

    def _say_plainly(self, row: Row, status: str) -> None:
        now = time.monotonic()
        is_last = row.step == self._num_steps
        if not is_last and row.val_ppl is None and now - self._spoke_s < _PLAIN_INTERVAL_S:
            return
        self._spoke_s = now
        seconds_a_step = (now - self._began_s) / max(row.step - self._first_step, 1)
        left_s = seconds_a_step * (self._num_steps - row.step)
        self.say(f"step {row.step}/{self._num_steps}  {status}  {left_s:.0f} s left")
