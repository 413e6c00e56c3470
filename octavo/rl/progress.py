"""What a person sees while a run goes on: a live table on a terminal, plain lines in a file."""

import time
from typing import Self

from rich.console import Console, Group
from rich.live import Live
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeElapsedColumn

from octavo.rl.history import StepRow
from octavo.rl.step_table import cells, headers, make_table, phases_of
from octavo.rl.warmup import WarmupStep
from octavo.run.write_failures import WriteFailures

_PLAIN_INTERVAL_S = 10.0
_ROWS_SHOWN = 10


class RLProgress:
    """Shows loss and reward of the warm start, then the table of octavo.rl.step_table.

    Args:
        enabled: False says nothing at all.
        console: where to; standard error by default.

    Attributes:
        failures: lines that could not be printed, as where a terminal is gone, and all else of the run that could not
            be written for people.
    """

    def __init__(self, enabled: bool, console: Console | None = None) -> None:
        self._console = console or Console(stderr=True)
        self._enabled = enabled
        self.failures = WriteFailures()
        self._is_live = enabled and self._console.is_terminal
        self._bar = Progress(
            TextColumn("{task.description}"),
            BarColumn(bar_width=20),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeElapsedColumn(),
            console=self._console,
            auto_refresh=False,
        )
        self._rows: list[StepRow] = []
        self._live = Live(get_renderable=self._render, console=self._console, refresh_per_second=4)
        self._phase: TaskID | None = None
        self._num_steps = 0
        self._spoke_s = 0.0
        self._sampled = ""

    def __enter__(self) -> Self:
        if self._is_live:
            self._live.start()
        return self

    def __exit__(self, *_: object) -> None:
        if self._is_live:
            self._live.stop()

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
        """Print a line above the table."""
        if self._enabled:
            with self.failures.caught("progress"):
                self._console.print(text, markup=False, highlight=False, soft_wrap=True)

    def show_warmup(self, row: WarmupStep) -> None:
        """Show a step of the warm start."""
        if row.reward is not None:
            self._sampled = f"  sampled reward {row.reward:.2f}"
        self._show("warm start", row.step, f"loss {row.loss:.3f}{self._sampled}")

    def show_step(self, row: StepRow) -> None:
        """Show a step of reinforcement."""
        before = self._rows[-1] if self._rows else None
        self._rows = [*self._rows[-_ROWS_SHOWN:], row]
        reward = row.metrics.get("eval/reward")
        held_out = "" if reward is None else f"held-out reward {reward:.3f}"
        if self._is_live:
            self._show("reinforce", row.step, held_out)
            return
        phases = phases_of(row.metrics)
        pairs = list(zip(headers(phases), cells(row, before, phases), strict=True))[1:]
        words = [f"{title} {cell}" for title, cell in pairs if cell] + ([held_out] if held_out else [])
        self._show("reinforce", row.step, "  ".join(words))

    def _show(self, phase: str, step: int, status: str) -> None:
        assert self._phase is not None, "begin comes first"
        self._bar.update(self._phase, completed=step, status=status)
        now = time.monotonic()
        is_due = step == self._num_steps or now - self._spoke_s >= _PLAIN_INTERVAL_S
        if is_due and not self._is_live:
            self._spoke_s = now
            self.say(f"{phase} {step}/{self._num_steps}  {status}")

    def _render(self) -> Group:
        if not self._rows:
            return Group(self._bar)
        before = self._rows[0] if len(self._rows) > _ROWS_SHOWN else None
        return Group(make_table(self._rows[-_ROWS_SHOWN:], before), self._bar)
