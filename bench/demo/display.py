"""What a person sees while the demo runs: a bar a variant on a terminal, plain lines in a file or pipe."""

import time
from contextlib import AbstractContextManager, nullcontext
from types import TracebackType
from typing import Self

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn

_PLAIN_INTERVAL_S = 10.0


class Display:
    """Says which stage runs, and shows the bars of its parts.

    Args:
        console: where to; standard output by default.
    """

    def __init__(self, console: Console | None = None) -> None:
        self.console = console or Console()

    def stage(self, number: int, total: int, title: str) -> None:
        """Announce a stage."""
        self.console.print(f"\n[bold]{number}/{total}[/bold]  {title}", highlight=False)

    def say(self, text: str) -> None:
        """One line."""
        self.console.print(f"     {text}", markup=False, highlight=False, soft_wrap=True)

    def working(self, text: str) -> AbstractContextManager[object]:
        """Show that something short goes on, in a with statement; a plain line where there is no terminal."""
        if self.console.is_terminal:
            return self.console.status(f"     {text}")
        self.say(text)
        return nullcontext()

    def bars(self) -> "Bars":
        """A group of bars, to be used in a with statement."""
        return Bars(self.console)


class Bars:
    """Bars that move together: one for each part of a stage."""

    def __init__(self, console: Console) -> None:
        self._console = console
        self._spoken_s: dict[str, float] = {}
        self._tasks: dict[str, TaskID] = {}
        self._progress = Progress(
            TextColumn("     {task.description:<16}"),
            BarColumn(bar_width=24),
            MofNCompleteColumn(),
            TextColumn("{task.fields[status]}"),
            TimeRemainingColumn(),
            console=console,
            disable=not console.is_terminal,
        )

    def __enter__(self) -> Self:
        self._progress.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None
    ) -> None:
        self._progress.stop()

    def update(self, name: str, done: int, total: int, status: str = "") -> None:
        """Move a bar; the first call makes it."""
        if name not in self._tasks:
            self._tasks[name] = self._progress.add_task(name, total=total, status="")
            self._spoken_s[name] = time.monotonic()
        self._progress.update(self._tasks[name], completed=done, total=total, status=status)
        due = done >= total or time.monotonic() - self._spoken_s[name] >= _PLAIN_INTERVAL_S
        if due and not self._console.is_terminal:
            self._spoken_s[name] = time.monotonic()
            self._console.print(f"     {name} {done}/{total}  {status}", markup=False, highlight=False, soft_wrap=True)
