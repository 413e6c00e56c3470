"""`octavo quantize MODEL OUT --dialect NAME`: an FP8 checkpoint from one in bf16, and what that costs in accuracy."""

import re
import statistics
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated, Self

import typer
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TaskID, TextColumn, TimeRemainingColumn
from rich.table import Table

from octavo.cli.checkpoint_folder import newest_model
from octavo.cli.console import plain_console
from octavo.errors import ConfigError, did_you_mean
from octavo.models import CalibrationText, QuantizationReport, quantize_checkpoint
from octavo.models.checkpoint import compressed_tensors
from octavo.models.quantize import QUANTIZED_DIALECTS
from octavo.run.build import find_device

# llm-compressor's names of what compressed-tensors holds
_SCHEMES = {
    "FP8_DYNAMIC": compressed_tensors.CHANNEL.dialect,
    "FP8": compressed_tensors.TENSOR.dialect,
    "FP8_BLOCK": compressed_tensors.BLOCK.dialect,
}
_WIDTH = 140  # a pipe claims 80 columns, too few for a module's name beside its reason


def command(
    model: Annotated[
        Path, typer.Argument(help="Checkpoint directory in bf16, or a run's: its newest model.", callback=newest_model)
    ],
    out: Annotated[Path, typer.Argument(help="Directory to make; it must not exist.")],
    dialect: Annotated[
        str,
        typer.Option(
            "--dialect",
            "--scheme",
            callback=lambda name: _SCHEMES.get(name, name),
            help=f"Required: {', '.join(QUANTIZED_DIALECTS)}; also llm-compressor's {', '.join(_SCHEMES)}.",
        ),
    ] = "",
    activation: Annotated[
        str | None, typer.Option(help="static or dynamic scales of inputs; by default what the dialect has.")
    ] = None,
    calibration: Annotated[
        Path | None, typer.Option(help="Text for static scales, .txt or .jsonl; what follows is held out.")
    ] = None,
    eval_text: Annotated[
        Path | None, typer.Option(help="Text for perplexity instead of the calibration file's held-out part.")
    ] = None,
    num_calibration_samples: Annotated[int, typer.Option(min=1, help="Sequences to calibrate with.")] = 256,
    eval_samples: Annotated[int, typer.Option(min=1, help="Sequences to measure perplexity with, at most.")] = 32,
    max_seq_length: Annotated[int, typer.Option(min=2, help="Tokens of a sequence.")] = 512,
    kv_scales: Annotated[bool, typer.Option("--kv-scales", help="Write static scales of the KV cache.")] = False,
    ignore: Annotated[
        list[str] | None,
        typer.Option(help="Modules to keep in bf16: names, last parts, * wildcards, re:...; may be given often."),
    ] = None,
    device: Annotated[str, typer.Option(help="cpu, cuda, cuda:1; empty takes a GPU where there is one.")] = "",
) -> None:
    """Quantize a checkpoint's linears to FP8, read it back, and print what it costs.

    Static input scales and scales of the KV cache are made from calibration text. OUT appears whole or not at all.
    """
    if dialect not in QUANTIZED_DIALECTS:
        hint = did_you_mean(dialect, QUANTIZED_DIALECTS)
        got = f"got {dialect!r}{hint}" if dialect else "and is not given"
        most = "vLLM, SGLang and transformers read fp8-block"
        raise ConfigError(f"--dialect must be one of {', '.join(QUANTIZED_DIALECTS)} ({most}), {got}")
    console = plain_console(min_width=_WIDTH)
    text = CalibrationText(calibration, eval_text, num_calibration_samples, eval_samples, max_seq_length)
    with _ProgressBar() as progress:
        report = quantize_checkpoint(
            model,
            out,
            dialect,
            activation=activation,
            text=text,
            kv_scales=kv_scales,
            ignore=ignore or [],
            device=find_device(device),
            on_progress=progress.update,
        )
    console.print(_kept_table(report))
    for line in _summary(report, out):
        console.print(line, soft_wrap=True)


def _summary(report: QuantizationReport, out: Path) -> Iterator[str]:
    before, after = report.num_bytes_before, report.num_bytes_after
    yield f"{out}: {len(report.quantized)} modules in FP8, {len(report.kept)} in bf16, dialect {report.dialect}"
    yield f"{before / 1e6:,.2f} MB before, {after / 1e6:,.2f} MB after ({after / before:.1%})"
    worst = min(report.weight_sqnr_db, key=report.weight_sqnr_db.__getitem__)
    median = statistics.median(report.weight_sqnr_db.values())
    yield f"SQNR of the weights: median {median:.1f} dB, least {report.weight_sqnr_db[worst]:.1f} dB ({worst})"
    if report.num_calibration_tokens:
        yield f"calibrated with {report.num_calibration_tokens:,} tokens"
    if report.perplexity_before is None or report.perplexity_after is None:
        yield "accuracy was not measured: give --eval-text or --calibration"
        return
    yield (
        f"perplexity over {report.num_eval_tokens:,} tokens: {report.perplexity_before:.4f} in bf16, "
        f"{_beside(report.perplexity_after, report.perplexity_before)} in FP8"
    )
    if report.perplexity_fp8_kv is not None:
        yield f"with the KV cache in FP8 too: {_beside(report.perplexity_fp8_kv, report.perplexity_before)}"


def _beside(perplexity: float, reference: float) -> str:
    return f"{perplexity:.4f} ({perplexity / reference - 1:+.2%})"


def _kept_table(report: QuantizationReport) -> Table:
    table = Table("kept in bf16", "count", "why", box=None, pad_edge=False, header_style="bold")
    kinds = Counter((re.sub(r"\.\d+(?=\.)", ".*", name), reason) for name, reason in report.kept.items())
    for (name, reason), count in kinds.items():
        table.add_row(name, str(count), reason)
    return table


class _ProgressBar:
    """A bar a stage on a terminal, a line a stage in a file or pipe; both on standard error."""

    def __init__(self) -> None:
        console = Console(stderr=True)
        self._console, self._is_live = console, console.is_terminal
        columns = (TextColumn("{task.description}"), BarColumn(), MofNCompleteColumn(), TimeRemainingColumn())
        self._bar = Progress(*columns, console=console, disable=not self._is_live)
        self._tasks: dict[str, TaskID] = {}

    def __enter__(self) -> Self:
        self._bar.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.stop()

    def update(self, stage: str, done: int, total: int) -> None:
        """What quantize_checkpoint reports."""
        if stage not in self._tasks:
            self._tasks[stage] = self._bar.add_task(stage, total=total)
            if not self._is_live:
                self._console.print(stage, markup=False, highlight=False)
        self._bar.update(self._tasks[stage], completed=done)
