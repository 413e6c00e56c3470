"""What a checkpoint holds of a run, and whether and how a run may go on from it."""

import dataclasses
from collections.abc import Iterator, Mapping
from typing import Any

import torch

from octavo import __version__
from octavo.errors import CheckpointError
from octavo.models import Decoder
from octavo.models.tokenizer import tokenizer_fingerprint
from octavo.train.config import TrainConfig
from octavo.train.dataset import Dataset

# Facts of an architecture that change no parameter's shape or meaning.
_FREE = {"max_position_embeddings"}


def describe(step: int, config: TrainConfig, model: Decoder, dataset: Dataset) -> dict[str, Any]:
    """trainer.json: everything but tensors, as plain JSON values."""
    assert model.conversion_report is not None, "the model's numerics are set when it is built"
    return {
        "step": step,
        "weight_version": model.weight_version,
        "octavo": __version__,
        "torch": torch.__version__,
        "text_fingerprint": dataset.fingerprint,
        "tokenizer_fingerprint": tokenizer_fingerprint(dataset.tokenizer),
        "architecture": {key: _plain(value) for key, value in dataclasses.asdict(model.config).items()},
        "numerics": model.numerics.as_dict(),
        "numerics_fingerprint": model.numerics.fingerprint(),
        "fp8_linears": list(model.conversion_report.fp8_names),
        "linear_recipes": {row.name: row.recipe or "bf16" for row in model.conversion_report.rows},
        "config": config.model_dump(mode="json"),
    }


def check_continues(description: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare a checkpoint's description with the run's.

    Returns:
        What changed and is allowed to, for a person to read.
    Raises:
        CheckpointError: another architecture or another tokenizer.
    """
    theirs, ours = description["architecture"], current["architecture"]
    different = [key for key in ours if key not in _FREE and theirs.get(key) != ours[key]]
    if different:
        listed = ", ".join(f"{key} {theirs.get(key)} in the checkpoint and {ours[key]} here" for key in different)
        raise CheckpointError(
            f"the checkpoint has another architecture: {listed}; choose another run.dir, or start anew with --no-resume"
        )
    if description["tokenizer_fingerprint"] != current["tokenizer_fingerprint"]:
        raise CheckpointError(
            "the checkpoint was trained with another tokenizer (was it trained anew, on changed text?); set "
            "data.tokenizer to the checkpoint's model/tokenizer.json, or start anew with --no-resume"
        )
    before, after = dict(_flatten(description["config"])), dict(_flatten(current["config"]))
    notes = [f"{key} was {before.get(key)!r}, is {after[key]!r}" for key in after if before.get(key) != after[key]]
    if description["numerics_fingerprint"] != current["numerics_fingerprint"]:
        names = (values["numerics"]["recipe"]["name"] for values in (description, current))
        notes.append("the recipe goes from {} to {}".format(*names))
    if description["text_fingerprint"] != current["text_fingerprint"]:
        notes.append("the text is not the checkpoint's")
    return notes


def _plain(value: Any) -> Any:
    """As JSON gives it back."""
    return list(value) if isinstance(value, tuple) else value


def _flatten(values: Mapping[str, Any], prefix: str = "") -> Iterator[tuple[str, Any]]:
    for key, value in values.items():
        if isinstance(value, Mapping):
            yield from _flatten(value, f"{prefix}{key}.")
        else:
            yield f"{prefix}{key}", value
