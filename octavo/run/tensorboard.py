"""TensorBoard's events of a run; what cannot be written is counted, and ends no run."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

from octavo.run.write_failures import WriteFailures

TENSORBOARD_DIR = "tensorboard"
_EVENTS = "TensorBoard's events"


class TensorBoard:
    """A writer of events, or of nothing where it could not begin or is not wanted.

    Args:
        directory: of the event files.
        done_steps: the step that the run resumes after; events of later steps are dropped.
        failures: where writes that fail are counted.
        is_wanted: write events.
    """

    def __init__(self, directory: Path, done_steps: int, failures: WriteFailures, *, is_wanted: bool = True) -> None:
        self._failures = failures
        self._writer: Any = None
        if is_wanted:
            with failures.caught(_EVENTS):
                from torch.utils.tensorboard import SummaryWriter  # a second to import: only where it is wanted

                self._writer = SummaryWriter(str(directory), purge_step=done_steps + 1)

    def write(self, scalars: Iterable[tuple[str, float]], step: int) -> None:
        """Add a step's tags and values."""
        if self._writer is not None:
            with self._failures.caught(_EVENTS):
                for tag, value in scalars:
                    self._writer.add_scalar(tag, value, step)

    def close(self) -> None:
        """Close the file."""
        if self._writer is not None:
            with self._failures.caught(_EVENTS):
                self._writer.close()
