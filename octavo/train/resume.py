"""What a checkpoint holds of a run, and whether and how a run may go on from it."""

from collections.abc import Mapping
from typing import Any

from octavo.errors import CheckpointError
from octavo.models import Decoder
from octavo.run.checkpoint_store import changes, describe_model, flatten
from octavo.train.config import TrainConfig
from octavo.train.dataset import Dataset
from octavo.train.lora import Adapters, check_adapters

# Facts of an architecture that change no parameter's shape or meaning.
_FREE = {"max_position_embeddings"}


def describe(
    step: int, config: TrainConfig, model: Decoder, dataset: Dataset, adapters: Adapters | None = None
) -> dict[str, Any]:
    """trainer.json: everything but tensors, as plain JSON values."""
    assert model.conversion_report is not None, "the model's numerics are set when it is built"
    return {
        "step": step,
        "weight_version": model.weight_version,
        **describe_model(model, dataset.tokenizer),
        "text_fingerprint": dataset.fingerprint,
        "numerics": model.numerics.as_dict(),
        "numerics_fingerprint": model.numerics.fingerprint(),
        "fp8_linears": list(model.conversion_report.fp8_names),
        "linear_recipes": {row.name: row.recipe or "bf16" for row in model.conversion_report.rows},
        "config": config.model_dump(mode="json"),
        **({} if adapters is None else {"lora": adapters.describe()}),
    }


def check_continues(description: Mapping[str, Any], current: Mapping[str, Any]) -> list[str]:
    """Compare a checkpoint's description with the run's.

    Returns:
        What changed and is allowed to, for a person to read.
    Raises:
        CheckpointError: another architecture, another tokenizer, other adapters or another base of theirs.
    """
    theirs, ours = description["architecture"], current["architecture"]
    different = [key for key in ours if key not in _FREE and theirs.get(key) != ours[key]]
    if different:
        listed = ", ".join(f"{key} {theirs.get(key)} in the checkpoint and {ours[key]} here" for key in different)
        raise CheckpointError(
            f"the checkpoint has another architecture: {listed}; choose another run.dir, or start over with --no-resume"
        )
    if description["tokenizer_fingerprint"] != current["tokenizer_fingerprint"]:
        raise CheckpointError(
            "the checkpoint was trained with another tokenizer (was it trained again, on changed text?); set "
            "data.tokenizer to the checkpoint's model/tokenizer.json, or start over with --no-resume"
        )
    check_adapters(description.get("lora", {}), current.get("lora", {}))
    # keys that are newer than the checkpoint have the values that they had not
    before = dict(flatten(TrainConfig().model_dump(mode="json"))) | dict(flatten(description["config"]))
    notes = list(changes(before, current["config"]).values())
    if description["numerics_fingerprint"] != current["numerics_fingerprint"]:
        names = (values["numerics"]["recipe"]["name"] for values in (description, current))
        old, new = names
        notes.append(f"the recipe goes from {old} to {new}" if old != new else f"a field of recipe {new!r} has changed")
    if description["text_fingerprint"] != current["text_fingerprint"]:
        notes.append("the text is not the checkpoint's")
    return notes
