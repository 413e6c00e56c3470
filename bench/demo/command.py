"""`octavo demo`: everything that octavo does, in one run of a few minutes on any machine."""

from pathlib import Path
from typing import Annotated

import typer

from bench.demo import run_demo


def command(
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long all of it may take; at least 20. Some 60 s of one core's time are fixed (imports, the "
            "least steps, RL's warm start), so that it takes longer on fewer or busy cores."
        ),
    ] = 280.0,
    out: Annotated[Path, typer.Option(help="Directory for the report, checkpoints and metrics.")] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order and sampling.")] = 0,
) -> None:
    """Train a small model in bf16 and FP8, export, sample and reinforce it; writes OUT/report.html."""
    run_demo(seconds, out, seed)
