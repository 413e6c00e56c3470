"""`octavo train`: one TOML file in, checkpoints and metrics out."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.config import load_config
from octavo.train import TrainConfig, TrainResult, train


def command(
    recipe: Annotated[Path, typer.Argument(help="The recipe, a TOML file; see recipes/.")],
    overrides: Annotated[
        list[str] | None, typer.Option("--set", metavar="SECTION.KEY=VALUE", help="Set a key of the recipe.")
    ] = None,
    resume: Annotated[
        bool, typer.Option("--resume/--no-resume", help="Go on from run.dir's last checkpoint, if it has one.")
    ] = True,
    device: Annotated[str | None, typer.Option(help="Short for --set run.device=...: cpu, cuda, cuda:1.")] = None,
) -> None:
    """Train a language model from one TOML file.

    A run that is interrupted, in whatever way, goes on from its last checkpoint when the same command is given
    again, and ends with the same bits. --no-resume moves the earlier run aside and starts anew.
    """
    chosen = [*(overrides or []), *([f"run.device={device}"] if device else [])]
    print_result(train(load_config(TrainConfig, recipe, chosen), resume=resume))


def print_result(result: TrainResult) -> None:
    """What a run came to, and where it is."""
    console = Console(highlight=False)
    if result.stopped_by:
        console.print(f"stopped by {result.stopped_by} after step {result.step}; the same command goes on from there")
    if result.val_loss is not None:
        console.print(f"validation loss {result.val_loss:.4f}, perplexity {result.val_ppl:.2f}")
    console.print(f"checkpoint {result.checkpoint}", soft_wrap=True)
    console.print(f"sample from it: octavo generate {result.checkpoint / 'model'} -p ...", soft_wrap=True)
