"""The folder `octavo/` inside a checkpoint: the numerics that the weights were used with, delayed scaling's state.

Beside them lies what `octavo quantize` measured.

Other readers of the checkpoint never look there.
"""

import dataclasses
import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import save_file

from octavo.errors import CheckpointError
from octavo.models.checkpoint.safetensors_io import SafetensorsReader
from octavo.numerics import Numerics

FOLDER = "octavo"
_RECORD, _STATE, _REPORT = "numerics.json", "recipe_state.safetensors", "quantization.json"
_FORMAT = 1


@dataclasses.dataclass(frozen=True)
class Record:
    """What octavo knew about the model that it wrote.

    Attributes:
        recipe: the linears' recipe, by name.
        numerics_fingerprint: Numerics.fingerprint().
        high_precision: octavo's names of the linears that an FP8 recipe left in high precision.
        weight_version: of the weights written.
    """

    recipe: str
    numerics_fingerprint: str
    high_precision: tuple[str, ...]
    weight_version: int


def write(
    directory: Path,
    numerics: Numerics,
    high_precision: tuple[str, ...],
    weight_version: int,
    recipe_state: dict[str, torch.Tensor],
) -> None:
    """Write the folder.

    Args:
        directory: the checkpoint being written.
        recipe_state: delayed scaling's buffers by octavo's names; none for other recipes.
    """
    folder = directory / FOLDER
    folder.mkdir()
    fields = {
        "format": _FORMAT,
        "numerics": numerics.as_dict(),
        "numerics_fingerprint": numerics.fingerprint(),
        "high_precision": list(high_precision),
        "weight_version": weight_version,
    }
    (folder / _RECORD).write_text(json.dumps(fields, indent=2) + "\n", encoding="utf-8")
    if recipe_state:
        save_file({name: tensor.detach().cpu() for name, tensor in recipe_state.items()}, folder / _STATE)


def is_ours(directory: Path) -> bool:
    """Whether octavo wrote this checkpoint directory, so that another save may replace it."""
    return (directory / FOLDER / _RECORD).is_file()


def read(directory: Path) -> Record | None:
    """The record of a checkpoint that octavo wrote, None of any other.

    Raises:
        CheckpointError: a record that cannot be understood.
    """
    file = directory / FOLDER / _RECORD
    if not file.is_file():
        return None
    try:
        fields: dict[str, Any] = json.loads(file.read_text(encoding="utf-8"))
        if fields["format"] != _FORMAT:
            raise CheckpointError(f"{file}: written by a newer octavo (format {fields['format']}); update octavo")
        return Record(
            recipe=fields["numerics"]["recipe"]["name"],
            numerics_fingerprint=fields["numerics_fingerprint"],
            high_precision=tuple(fields["high_precision"]),
            weight_version=int(fields["weight_version"]),
        )
    except (ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{file}: not a record of octavo ({error!r}); delete it to load without") from error


def write_report(directory: Path, report: dict[str, Any]) -> None:
    """Keep what quantize_checkpoint reports beside the weights."""
    (directory / FOLDER / _REPORT).write_text(json.dumps(report, indent=2) + "\n", encoding="utf-8")


def read_report(directory: Path) -> dict[str, Any] | None:
    """What quantize_checkpoint reported of a checkpoint, None where octavo did not quantize it.

    Raises:
        CheckpointError: the file cannot be understood.
    """
    file = directory / FOLDER / _REPORT
    try:
        found: dict[str, Any] | None = json.loads(file.read_text(encoding="utf-8")) if file.is_file() else None
    except ValueError as error:
        raise CheckpointError(f"{file}: not a report of octavo ({error}); delete it to go on without") from error
    return found


def state_file(directory: Path) -> Path | None:
    """The file with delayed scaling's buffers, None where there is none."""
    file = directory / FOLDER / _STATE
    return file if file.is_file() else None


def read_recipe_state(directory: Path) -> dict[str, torch.Tensor]:
    """Delayed scaling's buffers, empty where there are none.

    Raises:
        CheckpointError: damaged files.
    """
    file = state_file(directory)
    if file is None:
        return {}
    reader = SafetensorsReader(file)
    return {name: reader.load(name) for name in reader.entries}
