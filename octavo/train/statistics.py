"""A run's per-layer statistics: observers on its model, statistics.jsonl, and TensorBoard's `statistics` run."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import IO, Any, Self

import torch

from octavo.distributed.mesh import ONE_PROCESS, Mesh
from octavo.nn.statistics import STATS, TENSORS, StatisticsRow, TensorStatistics
from octavo.run.atomic import write_atomic
from octavo.run.metrics import read_rows
from octavo.run.tensorboard import TENSORBOARD_DIR, TensorBoard
from octavo.run.write_failures import WriteFailures

STATISTICS_FILE = "statistics.jsonl"


class StatisticsWriter:
    """Appends rows to statistics.jsonl and, if asked, to TensorBoard; a resume drops what came after its checkpoint.

    Args:
        directory: the run's.
        done_steps: the step that the run resumes after; 0 starts from nothing.
        failures: where writes that fail are counted; they raise nothing.
    """

    def __init__(self, directory: Path, done_steps: int, tensorboard: bool, failures: WriteFailures) -> None:
        self._failures = failures
        directory.mkdir(parents=True, exist_ok=True)
        path = directory / STATISTICS_FILE
        kept = [row for row in read_statistics(path) if row["step"] <= done_steps]
        write_atomic(path, "".join(json.dumps(row) + "\n" for row in kept))
        self._file: IO[str] = path.open("a", encoding="utf-8")
        self._tensorboard = TensorBoard(
            directory / TENSORBOARD_DIR / "statistics", done_steps, failures, is_wanted=tensorboard
        )

    def write(self, rows: Sequence[StatisticsRow]) -> None:
        """Append rows; they are on their way to the disk when this returns."""
        with self._failures.caught(STATISTICS_FILE):
            for row in rows:
                self._file.write(json.dumps(row.as_dict(), allow_nan=False) + "\n")
            self._file.flush()
        for row in rows:
            self._tensorboard.write(row.scalars(), row.step)

    def close(self) -> None:
        """Close the files."""
        with self._failures.caught(STATISTICS_FILE):
            self._file.close()
        self._tensorboard.close()


class RunStatistics:
    """TensorStatistics of a run, written as its steps end; a context manager. Does nothing where `every` is 0.

    Args:
        mesh: the ranks, all of which have one; rows are of the micro-batches of all, and the first rank writes them.
        done_steps: steps before the first one; a step is known by how many are done with it, as in metrics.jsonl.
        every: see octavo.nn.statistics.TensorStatistics.
        start_step: the same.
        end_step: the same; 0 has no end.
        layers: the same.
        tensors: the same; none are all of them.
        stats: the same; none are all of them.
        failures: where writes that fail are counted; they raise nothing.
    """

    def __init__(
        self,
        model: torch.nn.Module,
        directory: Path,
        done_steps: int,
        *,
        tensorboard: bool = True,
        every: int = 0,
        start_step: int = 0,
        end_step: int = 0,
        layers: Sequence[str] = (),
        tensors: Sequence[str] = (),
        stats: Sequence[str] = (),
        failures: WriteFailures | None = None,
        mesh: Mesh = ONE_PROCESS,
    ) -> None:
        self._statistics: TensorStatistics | None = None
        self._writer: StatisticsWriter | None = None
        if every == 0:
            return
        self._statistics = TensorStatistics(
            model,
            stats=stats or STATS,
            tensors=tensors or tuple(TENSORS),
            layers=layers,
            freq=every,
            start_step=start_step,
            end_step=end_step or None,
            first_step=done_steps + 1,
            gather=mesh.gather_objects,
        )
        if mesh.is_first:
            self._writer = StatisticsWriter(directory, done_steps, tensorboard, failures or WriteFailures())

    def step(self) -> None:
        """An optimizer step has ended."""
        if self._statistics is not None:
            self._statistics.step()
            rows = self._statistics.rows()
            if self._writer is not None:
                self._writer.write(rows)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self._statistics is not None:
            self._statistics.close()
        if self._writer is not None:
            self._writer.close()


def read_statistics(path: Path) -> list[dict[str, Any]]:
    """The rows of a statistics.jsonl, up to the first line that a kill cut short."""
    return read_rows(path, dict)
