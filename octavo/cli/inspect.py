"""`octavo inspect PATH`: every tensor of a checkpoint, its scheme and scales, and what is missing or unused."""

from collections import Counter
from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console
from rich.table import Table

from octavo.errors import CheckpointError
from octavo.models.checkpoint.inspect import CheckpointReport, inspect_checkpoint

_MIN_WIDTH = 140  # a pipe claims 80 columns, too few for a tensor's name beside its shapes


def command(
    path: Annotated[Path, typer.Argument(help="A checkpoint directory, or one .safetensors file.")],
) -> None:
    """Print every tensor of a checkpoint: dtype, shape, scheme and scale shape, then what is missing or unused.

    Reads headers only. Exits with 2 where a scale or tensor is missing, unused or misshapen.
    """
    report = inspect_checkpoint(path)
    console = Console()
    wide = console if console.is_terminal else Console(width=max(console.width, _MIN_WIDTH))
    wide.print(_table(report))
    schemes = ", ".join(f"{count} {scheme}" for scheme, count in Counter(row.scheme for row in report.rows).items())
    wide.print(
        f"{len(report.rows)} tensors ({schemes}), {report.num_bytes / 1e6:,.2f} MB, dialect {report.dialect}",
        highlight=False,
    )
    if report.record is not None:
        wide.print(
            f"written by octavo from a {report.record.recipe} model, weight version {report.record.weight_version}, "
            f"numerics {report.record.numerics_fingerprint}",
            highlight=False,
        )
    for problem in report.problems:
        wide.print(problem, style="red", markup=False, highlight=False, soft_wrap=True)
    if report.problems:
        count = f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}"
        raise CheckpointError(f"{path}: {count}, listed above")
    wide.print("no missing or unused scales", style="green")


def _table(report: CheckpointReport) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in ("tensor", "dtype", "shape", "scheme", "scale shape"):
        table.add_column(column, overflow="fold")
    for row in report.rows:
        scale = "" if row.scale_shape is None else _sizes(row.scale_shape)
        table.add_row(row.name, row.dtype, _sizes(row.shape), row.scheme, scale)
    return table


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
