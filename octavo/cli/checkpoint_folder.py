"""What commands take for a checkpoint: its folder, or that of a training run or step, which means the newest model."""

from pathlib import Path
from typing import Annotated

import typer

from octavo.cli.console import plain_console
from octavo.errors import CheckpointError, did_you_mean
from octavo.models.checkpoint.dialects import model_of_run


def newest_model(path: Path) -> Path:
    """The model's folder inside that of a run, of its checkpoints or of one step, said on stderr; else the path."""
    model = model_of_run(path)
    if model is None:
        return path
    plain_console(stderr=True).print(f"{path}: a run; reading {model}", soft_wrap=True)
    return model


def existing_model(path: Path) -> Path:
    """newest_model of a path that exists.

    Raises:
        CheckpointError: it does not.
    """
    if not path.exists():
        beside = [other.name for other in path.parent.iterdir()] if path.parent.is_dir() else []
        raise CheckpointError(f"{path}: no such checkpoint{did_you_mean(path.name, beside)}")
    return newest_model(path)


Checkpoint = Annotated[
    Path, typer.Argument(help="Checkpoint directory, or a run's: its newest model.", callback=existing_model)
]
