"""Where a run's numbers go: metrics.jsonl, one row a line, and TensorBoard; both survive a kill and a resume."""

import dataclasses
import errno
import io
import json
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any, Generic, Self, TypeVar

from octavo.run.atomic import write_atomic
from octavo.run.tensorboard import TENSORBOARD_DIR, TensorBoard
from octavo.run.write_failures import WriteFailures

METRICS_FILE = "metrics.jsonl"


@dataclasses.dataclass(frozen=True)
class Row:
    """The numbers of one optimizer step; what was not measured at that step is None and is not written.

    Attributes:
        step: optimizer steps done, from 1.
        loss: mean over the step's target tokens, in nats.
        lr: of the update.
        grad_norm: of the update, before clipping.
        tokens_per_s: since the last row.
        seconds: since the run began (pauses between resumes not counted).
        val_loss: validation loss in nats a token.
        val_ppl: exp of val_loss.
        router_...: of a model with experts, over the steps since the last row; see octavo.nn.load_balance.metrics_of.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float
    tokens_per_s: float
    seconds: float
    val_loss: float | None = None
    val_ppl: float | None = None
    router_aux_loss: float | None = None
    router_z_loss: float | None = None
    router_entropy: float | None = None
    router_load_max_over_mean: float | None = None
    router_load_max_share: float | None = None
    router_load_mean_share: float | None = None
    router_idle_experts_share: float | None = None
    router_dropped_share: float | None = None

    def as_dict(self) -> dict[str, Any]:
        """What was measured, as plain values."""
        return {key: value for key, value in dataclasses.asdict(self).items() if value is not None}

    @classmethod
    def from_dict(cls, flat: dict[str, Any]) -> Self:
        """as_dict's inverse."""
        return cls(**flat)


R = TypeVar("R", bound=Row)


T = TypeVar("T")


def read_metrics(path: Path, kind: type[R] = Row) -> list[R]:  # type: ignore[assignment]
    """The rows of a metrics.jsonl; see read_rows."""
    return read_rows(path, kind.from_dict)


def read_rows(path: Path, make: Callable[[dict[str, Any]], T]) -> list[T]:
    """What is made of a JSON file's lines, up to the first that a kill cut short; none where there is no file."""
    rows: list[T] = []
    if not path.exists():
        return rows
    for line in path.read_text(encoding="utf-8", errors="replace").splitlines():
        try:
            rows.append(make(json.loads(line)))
        except (ValueError, TypeError):
            break
    return rows


class MetricsWriter(Generic[R]):
    """Appends rows to metrics.jsonl and, if asked, to TensorBoard.

    Args:
        directory: the run's.
        done_steps: the step that the run resumes after; rows of later steps are dropped. 0 starts over.
        tensorboard: write events into directory/tensorboard.
        kind: of the rows.
        failures: where writes that fail are counted; they raise nothing. Rows that are missing in the file are written
            with the next one that succeeds, or when the writer is synced or closed.
        writes: False reads and keeps rows, and writes none: another rank does.
    """

    def __init__(
        self,
        directory: Path,
        done_steps: int,
        tensorboard: bool,
        kind: type[R] = Row,  # type: ignore[assignment]
        failures: WriteFailures | None = None,
        *,
        writes: bool = True,
    ) -> None:
        directory.mkdir(parents=True, exist_ok=True)
        self._path, self._writes = directory / METRICS_FILE, writes
        self.failures = failures or WriteFailures()
        self.rows: list[R] = [row for row in read_metrics(self._path, kind) if row.step <= done_steps]
        self._file = self._open_whole()
        self._tensorboard = TensorBoard(
            directory / TENSORBOARD_DIR, done_steps, self.failures, is_wanted=tensorboard and writes
        )

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        with self.failures.caught(METRICS_FILE):
            self._whole_file().close()
        self._tensorboard.close()
        self.failures.log_total()

    @property
    def seconds(self) -> float:
        """Seconds of the run so far, by its last row."""
        return self.rows[-1].seconds if self.rows else 0.0

    def sync(self) -> None:
        """Push the rows to the disk: before a checkpoint that follows them."""
        if not self._writes:
            return
        with self.failures.caught(METRICS_FILE):
            os.fsync(self._whole_file().fileno())

    def write(self, row: R) -> None:
        """Append one row; it is on its way to the disk when this returns."""
        self.rows.append(row)
        with self.failures.caught(METRICS_FILE):
            self._append(row)
        numbers = ((key, value) for key, value in row.as_dict().items() if key not in ("step", "seconds"))
        self._tensorboard.write(numbers, row.step)

    def _append(self, row: R) -> None:
        """Add a line; where an earlier one is missing or was cut short, write the whole file again."""
        if self._file.closed:
            self._whole_file()
            return
        line = _line(row)
        try:
            num_written = self._file.write(line)
            if num_written != len(line):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self._path))
        except OSError:
            self._file.close()
            raise

    def _whole_file(self) -> io.FileIO:
        """The open file, written again where a write had failed."""
        if self._file.closed:
            self._file = self._open_whole()
        return self._file

    def _open_whole(self) -> io.FileIO:
        """The file with all rows, open for more; without a buffer, so that a failed write leaves nothing behind."""
        if not self._writes:
            return io.FileIO(os.devnull, "a")
        write_atomic(self._path, b"".join(map(_line, self.rows)).decode())
        return io.FileIO(self._path, "a")


def _line(row: Row) -> bytes:
    return (json.dumps(row.as_dict()) + "\n").encode()
