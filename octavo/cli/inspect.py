"""`octavo inspect PATH`: a checkpoint's dialect, every tensor, its scheme and scales, and what is missing or unused."""

from collections.abc import Iterable
from pathlib import Path
from typing import Annotated

import typer
from rich.table import Table

from octavo.cli.checkpoint_folder import newest_model
from octavo.cli.console import plain_console
from octavo.errors import CheckpointError
from octavo.models.checkpoint.inspect import CheckpointReport, inspect_checkpoint

_MIN_WIDTH = 140  # a pipe claims 80 columns, too few for a tensor's name beside its shapes


def command(
    path: Annotated[
        Path,
        typer.Argument(help="A checkpoint directory, or a run's; or one .safetensors file.", callback=newest_model),
    ],
    modules: Annotated[bool, typer.Option("--modules", help="Modules by kind alone, not every tensor.")] = False,
) -> None:
    """Print a checkpoint's tensors, the formats of its linears and its scales, then what is missing or unused.

    Reads headers only. Exits with 2 where a scale or tensor is missing, unused or misshapen.
    """
    report = inspect_checkpoint(path)
    console = plain_console(min_width=_MIN_WIDTH)
    if not modules:
        console.print(_tensor_table(report))
    table = _table("module", "count", "format", "dtype", "weight scale", "input scale")
    for row in report.modules:
        table.add_row(row.name, str(row.count), row.scheme, row.dtype, row.weight_scale or "", row.input_scale or "")
    console.print(table)
    for line in _summary(report):
        console.print(line, soft_wrap=True)
    for problem in report.problems:
        console.print(problem, style="red", soft_wrap=True)
    if report.problems:
        count = f"{len(report.problems)} problem{'s' * (len(report.problems) > 1)}"
        raise CheckpointError(f"{path}: {count}, listed above")
    console.print("no missing or unused scales", style="green")


def _summary(report: CheckpointReport) -> Iterable[str]:
    kinds = ", ".join(f"{num_bytes / 1e6:,.2f} MB {kind}" for kind, num_bytes in report.num_bytes_by_kind.items())
    yield f"{len(report.rows)} tensors, {report.num_bytes / 1e6:,.2f} MB ({kinds}), dialect {report.dialect}"
    layout = report.layout
    if layout is not None and layout.weight is not None:
        recipe = layout.recipe.name + (" with static input scales" if layout.recipe.static_input else "")
        yield f"declares {layout.weight.kind} weights, {layout.input} input scales; recipe auto is {recipe}"
        yield f"kept in high precision by config.json: {', '.join(layout.ignored) or 'nothing'}"
        yield from layout.remarks
    if report.kv_scales:
        yield "KV cache scales: " + ", ".join(f"{count} x {name}" for name, count in sorted(report.kv_scales.items()))
    if report.record is not None:
        yield (
            f"written by octavo from a {report.record.recipe} model, weight version {report.record.weight_version}, "
            f"numerics {report.record.numerics_fingerprint}"
        )


def _tensor_table(report: CheckpointReport) -> Table:
    table = _table("tensor", "dtype", "shape", "scheme", "scale shape")
    for row in report.rows:
        scale = "" if row.scale_shape is None else _sizes(row.scale_shape)
        table.add_row(row.name, row.dtype, _sizes(row.shape), row.scheme, scale)
    return table


def _table(*columns: str) -> Table:
    table = Table(box=None, pad_edge=False, header_style="bold")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


def _sizes(shape: tuple[int, ...]) -> str:
    return " x ".join(map(str, shape)) or "scalar"
