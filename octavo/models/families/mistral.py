"""Mistral: Llama's architecture without biases; only checkpoints without a sliding window."""

from typing import TYPE_CHECKING, Any

from octavo.errors import CheckpointError
from octavo.models.families.fields import read_common, require, write_common

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig

_DEFAULT_WINDOW = 4096  # what transformers takes where config.json has no sliding_window


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate MistralConfig's config.json."""
    window = fields.get("sliding_window", _DEFAULT_WINDOW)
    if window is not None:
        raise CheckpointError(
            f"config.json: sliding_window = {window!r} is not supported: attention sees all earlier tokens; only null "
            f"is (a Mistral config.json without the field means {_DEFAULT_WINDOW})"
        )
    # MistralConfig knows no use_sliding_window and no biases
    return read_common(fields, "mistral", head_dim=fields.get("head_dim"), attention_bias=False)


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of MistralConfig."""
    require(config, qk_norm=False, attention_bias=False)
    fields = write_common(config)
    del fields["attention_bias"]
    return {**fields, "sliding_window": None}
