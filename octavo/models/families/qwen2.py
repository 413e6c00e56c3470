"""Qwen2 and Qwen2.5: biases on q, k and v alone, heads of hidden_size / num_attention_heads, no sliding window."""

from typing import TYPE_CHECKING, Any

from octavo.errors import ConfigError
from octavo.models.families.fields import read_common, require, write_common

if TYPE_CHECKING:
    from octavo.models.config import ModelConfig


def from_hf(fields: dict[str, Any]) -> dict[str, Any]:
    """Translate Qwen2Config's config.json."""
    # transformers uses the window under use_sliding_window alone, which is off where it is not written
    fields = {"use_sliding_window": False, **fields}
    return read_common(fields, "qwen2", head_dim=fields.get("head_dim"), attention_bias=True)


def to_hf(config: "ModelConfig") -> dict[str, Any]:
    """The config.json of Qwen2Config."""
    require(config, qk_norm=False, attention_bias=True)
    if config.head_dim * config.num_heads != config.hidden_size:
        raise ConfigError(
            f"a qwen2 model has heads of hidden_size / num_heads = {config.hidden_size} / {config.num_heads}, got "
            f"head_dim={config.head_dim}; its config.json has no field for another"
        )
    fields = write_common(config)
    del fields["attention_bias"], fields["head_dim"]
    return {**fields, "use_sliding_window": False, "sliding_window": None}
