"""What commands take for a checkpoint: its folder, or that of a training run or step, which means the newest model."""

from pathlib import Path
from typing import Annotated

import typer
from rich.console import Console

from octavo.models.checkpoint.dialects import model_of_run


def newest_model(path: Path) -> Path:
    """The model's folder inside that of a run, of its checkpoints or of one step, said on stderr; else the path."""
    model = model_of_run(path)
    if model is None:
        return path
    console = Console(stderr=True, markup=False, emoji=False, highlight=False, soft_wrap=True)
    console.print(f"{path}: a run; reading {model}")
    return model


Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory, or a run's: its newest model.", callback=newest_model)
]
