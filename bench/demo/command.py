"""`octavo demo`: everything that octavo does, in one run of a few minutes on any machine."""

from pathlib import Path
from typing import Annotated

import typer

from bench.demo import run_demo
from bench.demo.display import Display
from bench.demo.ranks import NUM_RANKS, run_ranks_demo
from bench.demo.run import make_directory
from octavo.errors import ConfigError


def command(
    seconds: Annotated[
        float,
        typer.Option(
            help="About how long all of it may take; at least 20. Some 60 s of one core's time are fixed (imports, the "
            "least steps, RL's warm start), so that it takes longer on fewer or busy cores."
        ),
    ] = 280.0,
    out: Annotated[
        Path,
        typer.Option(
            help="Directory for the report, checkpoints and metrics. Of an earlier demo in it the report alone stays, "
            "as report-previous.html."
        ),
    ] = Path("runs/demo"),
    seed: Annotated[int, typer.Option(min=0, help="Seed of weights, data order and sampling.")] = 0,
    ranks: Annotated[
        int,
        typer.Option(
            min=0,
            help="2, 4 or 8. Instead: train, sample and reinforce on so many ranks, each compared with one process; it "
            "writes OUT/ranks.json, and --seconds has no meaning.",
        ),
    ] = 0,
) -> None:
    """Train a small model in bf16 and FP8, export, sample and reinforce it; writes OUT/report.html."""
    if not ranks:
        run_demo(seconds, out, seed)
        return
    if ranks not in NUM_RANKS:
        raise ConfigError(f"--ranks must be 2, 4 or 8, got {ranks}; leave it out for the demo of one process")
    make_directory(out)
    if not run_ranks_demo(ranks, out.resolve(), seed, Display()):
        raise typer.Exit(1)
